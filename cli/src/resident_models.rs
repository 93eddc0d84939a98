// SPDX-License-Identifier: Apache-2.0

//! Models whose files cannot be read while a fleet that serves them still runs.
//!
//! A successor of a dead supervisor needs the heads of the model files for the sizes of its
//! workers. If a mount is away, it takes what its predecessor recorded, and the resident weights
//! go on.

use service::RuntimeDir;
use supervisor::{RecordedModel, recorded_models};

use crate::bounded_read::read_files;
use crate::fleet_config::FleetConfig;
use crate::model_config::FleetModelConfig;

/// The recorded models that take the place of those whose files cannot be read.
#[derive(Debug, Default)]
pub(crate) struct ResidentModels {
    models: Vec<RecordedModel>,
}

impl ResidentModels {
    /// Compares the configuration with the record in the runtime directory. A model under another
    /// path is another model.
    pub(crate) fn find(config: &FleetConfig, directory: &RuntimeDir) -> Self {
        let recorded = recorded_models(directory);
        let mut found = Self::default();
        let known: Vec<(&FleetModelConfig, &RecordedModel)> = config
            .models
            .iter()
            .filter_map(|model| {
                let path = std::path::absolute(&model.path).ok()?;
                let is_it = |recorded: &&RecordedModel| recorded.name == model.name && recorded.path == path;
                Some((model, recorded.iter().find(is_it)?))
            })
            .collect();
        let paths = known.iter().map(|(_, known)| known.path.clone()).collect();
        for ((model, known), read) in known.into_iter().zip(read_files(paths, 1)) {
            if let Err(error) = read {
                tracing::error!(
                    model = known.name,
                    path = %known.path.display(),
                    %error,
                    "cannot read the model's file: its workers and its resident weights go on as they are"
                );
                found.models.push(RecordedModel { workers: model.workers, ..known.clone() });
            }
        }
        found.add_drafted(config, &recorded);
        found
    }

    /// The size of a worker depends on its draft model too.
    fn add_drafted(&mut self, config: &FleetConfig, recorded: &[RecordedModel]) {
        for model in &config.models {
            let has_draft = |draft: &String| self.get(draft).is_some();
            if self.get(&model.name).is_none() && model.draft.as_ref().is_some_and(has_draft) {
                self.models.extend(recorded.iter().find(|recorded| recorded.name == model.name).cloned());
            }
        }
    }

    pub(crate) fn get(&self, name: &str) -> Option<&RecordedModel> {
        self.models.iter().find(|model| model.name == name)
    }
}
