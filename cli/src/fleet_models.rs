// SPDX-License-Identifier: Apache-2.0

//! [`FleetModels`]: what a start needs from the model files, read on a thread of its own.

use service::{Exit, RuntimeDir};
use supervisor::{ModelFailure, UnusableModel};

use crate::cli_error::{CliError, CliResult};
use crate::fleet_config::{FleetConfig, devices_for};
use crate::gguf_file;
use crate::model_config::FleetModelConfig;
use crate::models_directory::{FoundFile, add_models};
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
    /// What the models directory held.
    pub(crate) found: Vec<FoundFile>,
}

impl FleetModels {
    /// Reads the headers of the files. A file on a mount whose server is gone does not answer. If
    /// the caller then stops, the thread stays behind.
    pub(crate) async fn read(config: &FleetConfig, directory: &RuntimeDir) -> CliResult<Self> {
        let (mut config, directory) = (config.clone(), directory.clone());
        let read = tokio::task::spawn_blocking(move || {
            let found = add_models(&mut config)?;
            let mut config = with_swapped_files(&config, &directory);
            let resident = ResidentModels::find(&config, &directory);
            let (sized, unusable) = sized_or_unusable(&mut config, &resident, |_| true)?;
            Ok(Self { config, resident, sized, unusable, found })
        });
        read.await.unwrap_or_else(|panic| Err(CliError::new(Exit::Internal, panic.to_string())))
    }
}

/// Reads the headers of the files. Models that `may_leave` and whose files cannot be used are taken
/// out of the configuration, unless nothing would be left to serve.
pub(crate) fn sized_or_unusable(
    config: &mut FleetConfig,
    resident: &ResidentModels,
    may_leave: impl Fn(&FleetModelConfig) -> bool,
) -> CliResult<(Vec<SizedModel>, Vec<UnusableModel>)> {
    let failure = match config.sized_without(resident) {
        Ok(sized) => return Ok((sized, Vec::new())),
        Err(failure) => failure,
    };
    let unusable = take_unusable(config, resident, may_leave);
    // Files that can be used may come into a models directory.
    let may_serve = config.models_directory.is_some() || config.models.iter().any(|model| model.workers > 0);
    match unusable.is_empty() || !may_serve {
        true => Err(failure),
        false => Ok((config.sized_without(resident)?, unusable)),
    }
}

/// Takes those of the named models out of the configuration whose files cannot be used, and those
/// for which such a model drafts.
fn take_unusable(
    config: &mut FleetConfig,
    resident: &ResidentModels,
    may_leave: impl Fn(&FleetModelConfig) -> bool,
) -> Vec<UnusableModel> {
    let mut unusable: Vec<UnusableModel> = Vec::new();
    let entry = |model: &FleetModelConfig, exit, text| {
        let (name, path) = (model.name.clone(), model.path.clone());
        let is_from_directory = model.is_from_directory;
        UnusableModel { name, path, failure: ModelFailure { exit, text }, is_from_directory }
    };
    let readable = config.models.iter().filter(|model| resident.get(&model.name).is_none());
    for model in readable.filter(|model| may_leave(model)) {
        let read = match model.is_from_directory {
            // The settings of the directory may not suit each of its files.
            true => devices_for([&model.device])
                .and_then(|seen| SizedModel::all(std::slice::from_ref(model), 0, &seen))
                .map(drop),
            false => gguf_file::open(&model.path)
                .and_then(|file| gguf_file::describe(&model.path, &file))
                .map(drop)
                .or_else(|failure| match failure.exit {
                    Exit::ModelRefused => Err(failure),
                    // Nothing is wrong with the file.
                    _ => Ok(()),
                }),
        };
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
