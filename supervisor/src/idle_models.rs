// SPDX-License-Identifier: Apache-2.0

//! The idle models of the fleet: known by name and settings, without weights and workers. A plain
//! value; time is an argument. docs/decisions/0050-idle-models-are-unloaded.md has the reasons.
//!
//! ```text
//! ManagedModel -- unloaded, to be kept --> idle -- wake --> ManagedModel
//!                                           ^                  |
//!                                           '-- no copy loads -'  the next wake after a pause
//! ```

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::commands::CommandError;
use crate::spec::ModelSpec;
use crate::status::{ModelFailure, ModelState, ModelStatus};

/// After a wake that failed, requests are refused for this long. Each wake reads the model's file.
pub(crate) const WAKE_PAUSE: Duration = Duration::from_secs(30);

#[derive(Clone, Debug)]
pub(crate) struct IdleModel {
    pub(crate) spec: ModelSpec,
    /// A command loaded the model: the configuration does not name it.
    pub(crate) by_command: bool,
    /// Of the weights that it had; empty if they are not known.
    pub(crate) digest: Bytes,
    /// The last wake failed.
    failure: Option<(ModelFailure, Instant)>,
}

/// By name. No name is also that of a model with weights.
#[derive(Debug, Default)]
pub(crate) struct IdleModels(BTreeMap<String, IdleModel>);

impl IdleModel {
    pub(crate) fn new(spec: ModelSpec, by_command: bool, digest: Bytes) -> Self {
        Self { spec, by_command, digest, failure: None }
    }

    /// A model that could not be woken.
    pub(crate) fn failed(self, failure: ModelFailure, now: Instant) -> Self {
        Self { failure: Some((failure, now)), ..self }
    }

    fn current_failure(&self, now: Instant) -> Option<&ModelFailure> {
        let (failure, since) = self.failure.as_ref()?;
        (now.saturating_duration_since(*since) < WAKE_PAUSE).then_some(failure)
    }

    fn status(&self, now: Instant) -> ModelStatus {
        let ModelSpec { name, path, settings, fallback, .. } = self.spec.clone();
        ModelStatus {
            name,
            aliases: self.spec.aliases().map(str::to_owned).collect(),
            files: self.spec.files.clone(),
            path,
            state: ModelState::Idle(self.current_failure(now).cloned()),
            copies: Vec::new(),
            digest: self.digest.clone(),
            settings,
            is_unloading: false,
            becomes_idle: false,
            wakes_after: false,
            fallback,
        }
    }
}

impl IdleModels {
    pub(crate) fn insert(&mut self, model: IdleModel) {
        self.0.insert(model.spec.name.clone(), model);
    }

    /// What kept the models from this device is gone. Returns those that may be woken at once now.
    pub(crate) fn forget_failures_on(&mut self, device: &str) -> Vec<String> {
        let failed = self.0.values_mut().filter(|model| model.spec.copy_on(device).is_some());
        let failed = failed.filter_map(|model| model.failure.take().map(|_| model.spec.name.clone()));
        failed.collect()
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    pub(crate) fn remove(&mut self, name: &str) -> Option<IdleModel> {
        self.0.remove(name)
    }

    /// Takes a model out that is to be loaded; nothing if there is no such model. After a wake that
    /// failed, one `on_demand` is refused for a time.
    pub(crate) fn wake(
        &mut self,
        name: &str,
        now: Instant,
        on_demand: bool,
    ) -> Result<Option<IdleModel>, CommandError> {
        let failure = self.0.get(name).and_then(|model| model.current_failure(now));
        if let Some(failure) = failure.filter(|_| on_demand) {
            return Err(CommandError::WakeFailed { name: name.to_owned(), failure: failure.clone() });
        }
        Ok(self.0.remove(name))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &IdleModel> {
        self.0.values()
    }

    pub(crate) fn spec_mut(&mut self, name: &str) -> Option<&mut ModelSpec> {
        self.0.get_mut(name).map(|model| &mut model.spec)
    }

    pub(crate) fn statuses(&self, now: Instant) -> impl Iterator<Item = ModelStatus> {
        self.0.values().map(move |model| model.status(now))
    }

    pub(crate) fn status(&self, name: &str, now: Instant) -> Option<ModelStatus> {
        self.0.get(name).map(|model| model.status(now))
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use service::Exit;

    use super::*;
    use crate::spec::{CopyMemory, CopySpec};

    fn model(name: &str) -> IdleModel {
        let copy = CopySpec {
            device: "host".to_owned(),
            weights: name.to_owned(),
            worker_config: toml::Table::new(),
            memory: CopyMemory::default(),
        };
        let spec = ModelSpec {
            name: name.to_owned(),
            path: PathBuf::from("/m.gguf"),
            workers: 1,
            copies: vec![copy],
            pack: true,
            files: String::new(),
            configured_path: PathBuf::new(),
            idle_unload: None,
            on_demand: false,
            fallback: None,
            settings: toml::Table::new(),
        };
        IdleModel::new(spec, false, Bytes::from_static(b"d"))
    }

    #[test]
    fn a_model_is_woken_once() {
        let mut models = IdleModels::default();
        models.insert(model("m"));
        let now = Instant::now();
        assert_eq!(models.statuses(now).map(|m| m.state).collect::<Vec<_>>(), [ModelState::Idle(None)]);
        assert!(models.wake("other", now, true).unwrap().is_none());
        assert_eq!(models.wake("m", now, true).unwrap().unwrap().spec.name, "m");
        assert!(models.wake("m", now, true).unwrap().is_none() && !models.contains("m"));
    }

    #[test]
    fn a_wake_that_failed_is_repeated_after_a_pause() {
        let mut models = IdleModels::default();
        let now = Instant::now();
        let failure = ModelFailure { exit: Exit::OutOfResources, text: "no room".to_owned() };
        models.insert(model("m").failed(failure.clone(), now));
        let refused = models.wake("m", now + WAKE_PAUSE / 2, true).unwrap_err();
        assert_eq!(refused, CommandError::WakeFailed { name: "m".to_owned(), failure: failure.clone() });
        assert_eq!(models.status("m", now).unwrap().state, ModelState::Idle(Some(failure)));
        assert_eq!(models.status("m", now + WAKE_PAUSE).unwrap().state, ModelState::Idle(None));
        let mut for_a_person = models.0.clone();
        assert!(models.wake("m", now + WAKE_PAUSE, true).unwrap().is_some());
        models.0.append(&mut for_a_person);
        assert!(models.wake("m", now, false).unwrap().is_some());
    }
}
