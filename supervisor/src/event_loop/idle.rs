// SPDX-License-Identifier: Apache-2.0

//! Models that become idle and are woken. Becoming idle is an unload whose end keeps the name and
//! the settings; waking is a load with these.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::oneshot;

use super::{ManagedModel, SupervisorLoop, answer};
use crate::commands::{CommandError, CommandReply, DRAIN_GRACE};
use crate::idle_models::IdleModel;
use crate::spec::ModelSpec;
use crate::status::{FleetEvent, ModelFailure, ModelState};

impl SupervisorLoop {
    /// Unloads a model, or takes an idle one out of the fleet.
    pub(super) fn unload(&mut self, name: String, grace: Duration, keep_idle: bool, reply: CommandReply<()>) {
        let is_in_fleet = self.models.contains_key(&name) || self.idle_models.contains(&name);
        if !keep_idle && !is_in_fleet && self.unusable.remove(&name).is_some() {
            self.publish(FleetEvent::ModelRemoved(name));
            return answer(reply, Ok(()));
        }
        if !self.idle_models.contains(&name) {
            if keep_idle && let Err(error) = self.check_not_drafting(&name) {
                return answer(reply, Err(error));
            }
            // It leaves the fleet after all.
            let unloading = self.models.get_mut(&name).and_then(|model| model.unloading.as_mut());
            if let Some(unloading) = unloading.filter(|_| !keep_idle) {
                (unloading.keep_idle, unloading.wake_after) = (false, false);
            }
            return self.unload_model(name, grace, keep_idle, reply);
        }
        if !keep_idle {
            self.idle_models.remove(&name);
            self.record_models();
            self.publish(FleetEvent::ModelRemoved(name));
        }
        answer(reply, Ok(()));
    }

    /// A model that drafts for one with workers is as busy as that one.
    pub(super) fn check_not_drafting(&self, name: &str) -> Result<(), CommandError> {
        let drafts = |model: &&ManagedModel| model.spec.draft() == Some(name);
        match self.models.values().find(drafts) {
            None => Ok(()),
            Some(model) => {
                let why = format!("it drafts for {:?}: let that one become idle first", model.spec.name);
                Err(CommandError::UnloadFailed { name: name.to_owned(), why })
            }
        }
    }

    /// The weights of a model that is to be kept are gone.
    pub(super) fn become_idle(&mut self, model: ManagedModel, wake_after: bool) {
        let name = model.spec.name.clone();
        let (spec, digest) = match model.replacement {
            Some(spec) => (spec, Bytes::new()),
            None => (model.spec, model.copies.digest().unwrap_or_default()),
        };
        tracing::info!(model = name, "idle");
        self.insert_idle(IdleModel::new(spec, model.by_command, digest));
        if wake_after && let Err(error) = self.wake(&name, true) {
            tracing::error!(model = name, %error, "cannot wake the model");
        }
    }

    pub(super) fn insert_idle(&mut self, model: IdleModel) {
        let name = model.spec.name.clone();
        self.idle_models.insert(model);
        self.record_models();
        self.publish_idle(&name);
    }

    pub(super) fn publish_idle(&self, name: &str) {
        if let Some(status) = self.idle_models.status(name, Instant::now()) {
            self.publish(FleetEvent::Model(status));
        }
    }

    /// The file of a model that is loaded on demand has changed. A model that is loaded leaves
    /// after its streams; requests that come meanwhile wait for the new file.
    pub(super) fn replace_file(&mut self, spec: &ModelSpec) {
        if let Some(idle) = self.idle_models.spec_mut(&spec.name) {
            *idle = spec.clone();
            return self.record_models();
        }
        let Some(model) = self.models.get_mut(&spec.name) else { return };
        model.replacement = Some(spec.clone());
        // Otherwise it is replaced when it becomes idle.
        if model.unloading.is_none() && self.may_become_idle(&spec.name) {
            // No caller waits for the end.
            self.unload_model(spec.name.clone(), DRAIN_GRACE, true, oneshot::channel().0);
        }
    }

    /// Loads an idle model, and the idle model that drafts for it. One that is becoming idle is
    /// loaded after that. Any other model stays as it is.
    pub(super) fn wake(&mut self, name: &str, on_demand: bool) -> Result<(), CommandError> {
        self.check_not_stopping()?;
        if let Some(model) = self.models.get_mut(name) {
            return match (&mut model.unloading, model.copies.state()) {
                (Some(unloading), _) if unloading.keep_idle => {
                    unloading.wake_after = true;
                    Ok(())
                }
                (Some(_), _) => Err(CommandError::UnknownModel { name: name.to_owned() }),
                (None, ModelState::Failed(failure)) if model.copies.has_given_up() => {
                    Err(CommandError::WakeFailed { name: name.to_owned(), failure })
                }
                (None, _) => Ok(()),
            };
        }
        let woken = self.idle_models.wake(name, Instant::now(), on_demand)?;
        let Some(woken) = woken else { return Err(CommandError::UnknownModel { name: name.to_owned() }) };
        let draft = self.draft_in_fleet(&woken.spec);
        let loaded = draft.map_or(Ok(()), |draft| self.wake(&draft, on_demand));
        let loaded = loaded.and_then(|()| self.load_model(woken.spec.clone(), woken.by_command));
        if let Err(error) = loaded {
            if let Some(model) = self.models.remove(name) {
                model.abort();
            }
            self.remove_workers_on(name, None);
            let failure = ModelFailure { exit: service::Exit::OutOfResources, text: error.to_string() };
            self.insert_idle(woken.failed(failure, Instant::now()));
            return Err(error);
        }
        tracing::info!(model = name, "waking");
        let now = self.deadlines.advance(Instant::now());
        if let Some(model) = self.models.get_mut(name) {
            model.is_waking = true;
            if on_demand {
                model.model_use.requested(now);
            }
        }
        Ok(())
    }

    /// The model that drafts for this one. "lookup" is none.
    pub(super) fn draft_in_fleet(&self, spec: &ModelSpec) -> Option<String> {
        let is_model = |name: &&str| self.models.contains_key(*name) || self.idle_models.contains(name);
        spec.draft().filter(is_model).map(str::to_owned)
    }

    /// This worker begins to serve: requests that have waited for it come now.
    pub(super) fn worker_serves(&mut self, worker: &Arc<str>) {
        let now = self.deadlines.advance(Instant::now());
        let slot = self.children.get(worker).and_then(|child| child.slot.as_ref());
        if let Some(model) = slot.and_then(|slot| self.models.get_mut(&slot.model)) {
            model.model_use.served(now);
        }
    }

    /// Requests use this worker.
    pub(super) fn model_used(&mut self, worker: &Arc<str>) {
        let slot = self.children.get(worker).and_then(|child| child.slot.as_ref());
        let Some(name) = slot.map(|slot| slot.model.clone()) else { return };
        let now = self.deadlines.advance(Instant::now());
        let Some(model) = self.models.get_mut(&name) else { return };
        model.model_use.requested(now);
        // What drafts for the model is used with it.
        let draft = model.spec.draft().map(str::to_owned);
        if let Some(draft) = draft.and_then(|draft| self.models.get_mut(&draft)) {
            draft.model_use.requested(now);
        }
    }

    /// Lets models become idle that no request has used for their time.
    pub(super) fn unload_unused(&mut self, now: Instant) {
        let mut unused = Vec::new();
        for (name, model) in &mut self.models {
            let is_serving = model.unloading.is_none() && model.copies.state() == ModelState::Ready;
            let limit = model.spec.idle_unload.filter(|_| is_serving);
            if limit.is_some_and(|limit| model.model_use.is_over(limit, now)) {
                unused.push(name.clone());
            }
        }
        for name in unused {
            if self.may_become_idle(&name) {
                tracing::info!(model = name, "becomes idle: no request has used it for its `idle-unload`");
                // No caller waits for the end.
                self.unload_model(name, DRAIN_GRACE, true, oneshot::channel().0);
            }
        }
    }

    pub(super) fn may_become_idle(&self, name: &str) -> bool {
        self.check_not_stopping().is_ok()
            && self.check_not_drafting(name).is_ok()
            && self.check_not_swapped(name).is_ok()
    }

    /// No copy of the model could be loaded. If it was being woken, it is idle again.
    pub(super) fn wake_failed(&mut self, name: &str) {
        if !self.models.get(name).is_some_and(|model| model.is_waking) {
            return;
        }
        let Some(model) = self.models.remove(name) else { return };
        let failure = match model.copies.state() {
            ModelState::Failed(failure) => failure,
            // Every copy has failed.
            ModelState::Loading { .. } | ModelState::Ready | ModelState::Idle(_) => {
                ModelFailure { exit: service::Exit::Internal, text: "no copy could be loaded".to_owned() }
            }
        };
        let digest = model.copies.digest().unwrap_or_default();
        let idle = IdleModel::new(model.spec, model.by_command, digest);
        self.insert_idle(idle.failed(failure, Instant::now()));
    }

    /// Refuses what needs workers of a model that has none.
    pub(super) fn check_not_idle(&self, name: &str) -> Result<(), CommandError> {
        match self.idle_models.contains(name) {
            true => Err(CommandError::ModelIsIdle { name: name.to_owned() }),
            false => Ok(()),
        }
    }
}
