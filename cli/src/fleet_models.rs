// SPDX-License-Identifier: Apache-2.0

//! [`FleetModels`]: what a start needs from the model files, read on a thread of its own.

use service::{Exit, RuntimeDir};

use crate::cli_error::{CliError, CliResult};
use crate::fleet_config::FleetConfig;
use crate::resident_models::ResidentModels;
use crate::sized_model::SizedModel;
use crate::swapped_files::with_swapped_files;

pub(crate) struct FleetModels {
    /// With the files of a swap.
    pub(crate) config: FleetConfig,
    pub(crate) resident: ResidentModels,
    pub(crate) sized: Vec<SizedModel>,
}

impl FleetModels {
    /// Reads the headers of the files. A file on a mount whose server is gone does not answer. If
    /// the caller then stops, the thread stays behind.
    pub(crate) async fn read(config: &FleetConfig, directory: &RuntimeDir) -> CliResult<Self> {
        let (config, directory) = (config.clone(), directory.clone());
        let read = tokio::task::spawn_blocking(move || {
            let config = with_swapped_files(&config, &directory);
            let resident = ResidentModels::find(&config, &directory);
            let sized = config.sized_without(&resident)?;
            Ok(Self { config, resident, sized })
        });
        read.await.unwrap_or_else(|panic| Err(CliError::new(Exit::Internal, panic.to_string())))
    }
}
