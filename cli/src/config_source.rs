// SPDX-License-Identifier: Apache-2.0

//! [`ConfigSource`]: the file that a fleet was configured with, for reading it again while the
//! fleet runs.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use service::RuntimeDir;
use supervisor::{ReadSpec, ReloadedSpec, diff_settings, recorded_models};
use toml::Table;

use crate::chat_templates::{UnusableTemplate, read_chat_templates};
use crate::cli_error::{CliResult, IoContext};
use crate::fleet_config::FleetConfig;
use crate::model_config::to_toml_table;
use crate::resident_models::ResidentModels;
use crate::swapped_files::with_swapped_files;

/// Keys that only a restart of the supervisor applies: its sockets and directory, the memory of the
/// weight-server, and what all processes get at their start.
const FIXED: [&str; 6] = ["runtime-dir", "listen", "host-budget", "gpu-budget", "gpu", "supervision"];

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ConfigSource {
    path: PathBuf,
    /// The values of [`FIXED`] at the start, as the file has them.
    fixed: Table,
}

impl ConfigSource {
    /// `read` is what the file says, without overrides of the command line.
    pub(crate) fn new(path: &Path, read: &FleetConfig) -> CliResult<Self> {
        let path = std::path::absolute(path).with_context(|| format!("cannot find {}", path.display()))?;
        Ok(Self { path, fixed: fixed_settings(read)? })
    }

    /// What the supervisor calls to reload. `listen` is the address on which the router listens.
    pub(crate) fn reader(self, directory: RuntimeDir, listen: Option<SocketAddr>) -> ReadSpec {
        Arc::new(move || self.read(&directory, listen).map_err(|failure| failure.message().to_owned()))
    }

    fn read(&self, directory: &RuntimeDir, listen: Option<SocketAddr>) -> CliResult<ReloadedSpec> {
        let config = with_swapped_files(&FleetConfig::load(&self.path, None)?, directory);
        let resident = ResidentModels::find(&config, directory);
        let mut sized = config.sized_without(&resident)?;
        // A task of the supervisor that may block runs this.
        tokio::runtime::Handle::current().block_on(read_chat_templates(
            &mut sized,
            &recorded_models(directory),
            UnusableTemplate::Refuse,
        ))?;
        Ok(ReloadedSpec {
            router: to_toml_table(&config.router_config(directory, listen))?,
            models: config.model_specs(&sized, &resident)?,
            not_applied: diff_settings(&self.fixed, &fixed_settings(&config)?),
        })
    }
}

fn fixed_settings(config: &FleetConfig) -> CliResult<Table> {
    let mut settings = to_toml_table(config)?;
    settings.retain(|key, _| FIXED.contains(&key));
    Ok(settings)
}
