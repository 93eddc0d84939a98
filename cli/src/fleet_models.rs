// SPDX-License-Identifier: Apache-2.0

//! [`FleetModels`]: what a start needs from the model files, read on a thread of its own.

use service::{Exit, RuntimeDir};
use supervisor::{ModelFailure, UnusableModel};

use crate::cli_error::{CliError, CliResult};
use crate::fleet_config::FleetConfig;
use crate::gguf_file;
use crate::model_config::FleetModelConfig;
use crate::resident_models::ResidentModels;
use crate::sized_model::SizedModel;
use crate::swapped_files::with_swapped_files;

pub(crate) struct FleetModels {
    /// With the files of a swap, and without the models that are unusable.
    pub(crate) config: FleetConfig,
    pub(crate) resident: ResidentModels,
    pub(crate) sized: Vec<SizedModel>,
    /// Models whose files are missing or refused. The fleet starts with the others.
    pub(crate) unusable: Vec<UnusableModel>,
}

impl FleetModels {
    /// Reads the headers of the files. A file on a mount whose server is gone does not answer. If
    /// the caller then stops, the thread stays behind.
    pub(crate) async fn read(config: &FleetConfig, directory: &RuntimeDir) -> CliResult<Self> {
        let (config, directory) = (config.clone(), directory.clone());
        let read = tokio::task::spawn_blocking(move || {
            let mut config = with_swapped_files(&config, &directory);
            let resident = ResidentModels::find(&config, &directory);
            let mut unusable = Vec::new();
            let sized = match config.sized_without(&resident) {
                Err(failure) if failure.exit == Exit::ModelRefused => {
                    unusable = take_unusable(&mut config, &resident);
                    let has_workers = |model: &FleetModelConfig| model.workers > 0;
                    if unusable.is_empty() || !config.models.iter().any(has_workers) {
                        return Err(failure);
                    }
                    config.sized_without(&resident)?
                }
                sized => sized?,
            };
            Ok(Self { config, resident, sized, unusable })
        });
        read.await.unwrap_or_else(|panic| Err(CliError::new(Exit::Internal, panic.to_string())))
    }
}

/// Takes the models out of the configuration whose files cannot be used, and those for which such a
/// model drafts.
fn take_unusable(config: &mut FleetConfig, resident: &ResidentModels) -> Vec<UnusableModel> {
    let mut unusable: Vec<UnusableModel> = Vec::new();
    let entry = |model: &FleetModelConfig, exit, text| {
        let (name, path) = (model.name.clone(), model.path.clone());
        UnusableModel { name, path, failure: ModelFailure { exit, text } }
    };
    for model in config.models.iter().filter(|model| resident.get(&model.name).is_none()) {
        let read = gguf_file::open(&model.path).and_then(|file| gguf_file::describe(&model.path, &file));
        if let Err(failure) = read {
            unusable.push(entry(model, failure.exit, failure.message().to_owned()));
        }
    }
    let drafts = |model: &FleetModelConfig| {
        let draft = model.draft.as_deref()?;
        unusable.iter().find(|other| other.name == draft).map(|other| other.failure.clone())
    };
    let drafted = config.models.iter().filter_map(|model| {
        let ModelFailure { exit, text } = drafts(model)?;
        Some(entry(model, exit, format!("its draft model cannot be used: {text}")))
    });
    let drafted: Vec<UnusableModel> = drafted.collect();
    unusable.extend(drafted);
    config.models.retain(|model| unusable.iter().all(|other| other.name != model.name));
    unusable
}
