// SPDX-License-Identifier: Apache-2.0

//! The record of a fleet's models in the runtime directory, from which a successor of the
//! supervisor learns what its predecessor served.
//!
//! The record tells models of the configuration from those that a command loaded: the first kind
//! ends with its entry in the configuration, the second one with a command. And it has what
//! follows from the head of a model file, for a successor that cannot read the file.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use service::RuntimeDir;
use service::config::{self, ConfigFileError};

use crate::spec::{CopyMemory, CopySpec, ModelSpec};

/// A model that the predecessor served.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct RecordedModel {
    pub name: String,
    pub path: PathBuf,
    pub workers: u32,
    /// Of the first copy, so that earlier versions read the record of a model with one.
    pub device: String,
    pub pack: bool,
    /// A command loaded it: the configuration does not name it.
    pub by_command: bool,
    // A record of version 0.1 lacks these.
    #[serde(default)]
    pub files: String,
    /// Of the first copy.
    #[serde(default)]
    pub weights: String,
    /// The path that the configuration names; `path` differs after a swap.
    #[serde(default)]
    pub configured_path: PathBuf,
    #[serde(default)]
    pub settings: toml::Table,
    /// Of the first copy.
    pub worker_config: toml::Table,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub further_copies: Vec<RecordedCopy>,
    /// It had neither weights nor workers.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub idle: bool,
    #[serde(default, with = "service::duration::optional", skip_serializing_if = "Option::is_none")]
    pub idle_unload: Option<Duration>,
    /// Of the first copy.
    #[serde(default)]
    pub memory: CopyMemory,
}

/// A further copy of a model on another device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct RecordedCopy {
    pub device: String,
    /// Empty: that of the first copy.
    #[serde(default)]
    pub weights: String,
    pub worker_config: toml::Table,
    #[serde(default)]
    pub memory: CopyMemory,
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
            copies,
            pack,
            files,
            configured_path,
            idle_unload,
            settings,
            ..
        } = spec.clone();
        let copy = |CopySpec { device, weights, worker_config, memory }| RecordedCopy {
            device,
            weights,
            worker_config,
            memory,
        };
        let mut copies = copies.into_iter().map(copy);
        let RecordedCopy { device, weights, worker_config, memory } =
            copies.next().expect("invariant: a model has a copy");
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
            further_copies: copies.collect(),
            idle: false,
            idle_unload,
            memory,
        }
    }

    pub fn devices(&self) -> impl Iterator<Item = &str> {
        let further = self.further_copies.iter().map(|copy| copy.device.as_str());
        std::iter::once(self.device.as_str()).chain(further)
    }

    /// The name of the weights on a device of the model.
    pub fn weights_on(&self, device: &str) -> Option<&str> {
        // A record of version 0.1 names no weights: they have the model's name.
        let first = if self.weights.is_empty() { &self.name } else { &self.weights };
        let further = self.further_copies.iter().map(|copy| (&copy.device, &copy.weights));
        let (_, weights) =
            std::iter::once((&self.device, first)).chain(further).find(|(known, _)| *known == device)?;
        Some(if weights.is_empty() { first } else { weights })
    }

    pub fn spec(&self) -> ModelSpec {
        let known = self.clone();
        let weights = |device: &str| self.weights_on(device).unwrap_or_default().to_owned();
        let first = CopySpec {
            weights: weights(&known.device),
            device: known.device,
            worker_config: known.worker_config,
            memory: known.memory,
        };
        let copy = |RecordedCopy { device, worker_config, memory, .. }| CopySpec {
            weights: weights(&device),
            device,
            worker_config,
            memory,
        };
        ModelSpec {
            name: known.name,
            path: known.path,
            workers: known.workers,
            copies: std::iter::once(first).chain(known.further_copies.into_iter().map(copy)).collect(),
            pack: known.pack,
            files: known.files,
            configured_path: known.configured_path,
            idle_unload: known.idle_unload,
            on_demand: false,
            fallback: None,
            settings: known.settings,
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
        let copy = |(device, weights): (&str, &str)| CopySpec {
            device: device.to_owned(),
            weights: weights.to_owned(),
            worker_config: worker_config.clone(),
            memory: CopyMemory { weights_bytes: 5, worker_bytes: 3 },
        };
        let spec = ModelSpec {
            name: "a/b \"c\"".to_owned(),
            path: "/models/a.gguf".into(),
            workers: 2,
            copies: [("host", "a#2"), ("host:1", "c")].map(copy).into(),
            pack: true,
            files: "1:2".to_owned(),
            configured_path: "/models/b.gguf".into(),
            idle_unload: Some(Duration::from_secs(600)),
            on_demand: false,
            fallback: None,
            settings: "name = \"a\"".parse().unwrap(),
        };
        let models = vec![RecordedModel::of(&spec, true), RecordedModel::of(&spec, false)];
        store_models(&directory, models.clone()).unwrap();
        assert_eq!(recorded_models(&directory), models);
        assert_eq!(recorded_models(&directory)[0].spec(), spec);
        std::fs::write(directory.models_record(), "models = 3").unwrap();
        assert_eq!(recorded_models(&directory), []);
    }
}
