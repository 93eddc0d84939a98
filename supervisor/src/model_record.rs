// SPDX-License-Identifier: Apache-2.0

//! The record of a fleet's models in the runtime directory, from which a successor of the
//! supervisor learns what its predecessor served.
//!
//! The record tells models of the configuration from those that a command loaded: the first kind
//! ends with its entry in the configuration, the second one with a command. And it has what
//! follows from the head of a model file, for a successor that cannot read the file.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use service::RuntimeDir;
use service::config::{self, ConfigFileError};

use crate::spec::ModelSpec;

/// A model that the predecessor served.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct RecordedModel {
    pub name: String,
    pub path: PathBuf,
    pub workers: u32,
    pub device: String,
    pub pack: bool,
    /// A command loaded it: the configuration does not name it.
    pub by_command: bool,
    // A record of version 0.1 lacks these.
    #[serde(default)]
    pub files: String,
    #[serde(default)]
    pub weights: String,
    /// The path that the configuration names; `path` differs after a swap.
    #[serde(default)]
    pub configured_path: PathBuf,
    #[serde(default)]
    pub settings: toml::Table,
    pub worker_config: toml::Table,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelRecord {
    #[serde(default)]
    models: Vec<RecordedModel>,
}

impl RecordedModel {
    pub(crate) fn of(spec: &ModelSpec, by_command: bool) -> Self {
        let ModelSpec {
            name,
            path,
            workers,
            device,
            pack,
            files,
            weights,
            configured_path,
            settings,
            worker_config,
        } = spec.clone();
        Self {
            name,
            path,
            workers,
            device,
            pack,
            by_command,
            files,
            weights,
            configured_path,
            settings,
            worker_config,
        }
    }

    pub fn spec(&self) -> ModelSpec {
        let known = self.clone();
        ModelSpec {
            name: known.name,
            path: known.path,
            workers: known.workers,
            device: known.device,
            pack: known.pack,
            files: known.files,
            weights: known.weights,
            configured_path: known.configured_path,
            settings: known.settings,
            worker_config: known.worker_config,
        }
    }
}

/// The models that the last supervisor in this directory served; empty without a record.
pub fn recorded_models(directory: &RuntimeDir) -> Vec<RecordedModel> {
    let path = directory.models_record();
    match config::load::<ModelRecord>(&path) {
        Ok(record) => record.models,
        Err(ConfigFileError::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            Vec::new()
        }
        Err(error) => {
            tracing::error!(
                cause = service::exit::one_line(&error),
                "the record of the fleet's models is lost"
            );
            Vec::new()
        }
    }
}

pub(crate) fn store_models(
    directory: &RuntimeDir,
    models: Vec<RecordedModel>,
) -> Result<(), ConfigFileError> {
    config::store(&directory.models_record(), &ModelRecord { models })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_is_read_back_and_a_missing_one_is_empty() {
        let folder = tempfile::tempdir().unwrap();
        let directory = RuntimeDir::at(folder.path());
        assert_eq!(recorded_models(&directory), []);
        let worker_config: toml::Table = "threads = 2\n[kv]\ntype = \"f16\"".parse().unwrap();
        let spec = ModelSpec {
            name: "a/b \"c\"".to_owned(),
            path: "/models/a.gguf".into(),
            workers: 2,
            device: "host".to_owned(),
            pack: true,
            files: "1:2".to_owned(),
            weights: "a#2".to_owned(),
            configured_path: "/models/b.gguf".into(),
            settings: "name = \"a\"".parse().unwrap(),
            worker_config,
        };
        let models = vec![RecordedModel::of(&spec, true), RecordedModel::of(&spec, false)];
        store_models(&directory, models.clone()).unwrap();
        assert_eq!(recorded_models(&directory), models);
        assert_eq!(recorded_models(&directory)[0].spec(), spec);
        std::fs::write(directory.models_record(), "models = 3").unwrap();
        assert_eq!(recorded_models(&directory), []);
    }
}
