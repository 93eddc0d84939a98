// SPDX-License-Identifier: Apache-2.0

//! Executes commands: status, restarts, workers, models, and the stop of the whole fleet.

use std::sync::Arc;
use std::time::Duration;

use super::children::supervised_child;
use super::{ManagedModel, SupervisedChild, SupervisorLoop, answer};
use crate::commands::{CommandError, CommandReply, FleetCommand};
use crate::events::SupervisorEvent;
use crate::process::ChildProcess;
use crate::spec::{ChildRole, ModelSpec};
use crate::state::{AfterExit, ChildEvent, ChildState};
use crate::status::{FleetEvent, FleetStatus, ModelState};
use service::runtime_dir::WORKERS_MAX;

impl SupervisorLoop {
    pub(super) fn handle_command(&mut self, command: FleetCommand) {
        match command {
            FleetCommand::Status(reply) => {
                // The caller may have gone away.
                let _: Result<(), _> = reply.send(self.status());
            }
            FleetCommand::Restart { name, drain, reply } => answer(reply, self.restart(&name, drain)),
            FleetCommand::Drain { name, grace, reply } => self.drain(&name, grace, reply),
            FleetCommand::AddWorker { model, reply } => answer(reply, self.add_worker(model)),
            FleetCommand::RemoveWorker { name, reply } => match self.children.get_key_value(name.as_str()) {
                None => answer(reply, Err(CommandError::UnknownChild { name })),
                Some((_, child)) if child.slot.is_none() => {
                    answer(reply, Err(CommandError::NotAWorker { name }))
                }
                Some((name, _)) => self.remove_worker(&name.clone(), Some(reply)),
            },
            FleetCommand::LoadModel { model, reply } => answer(reply, self.load_model(model, true)),
            FleetCommand::UnloadModel { name, reply } => self.unload_model(name, reply),
            FleetCommand::Reload { dry_run, reply } => self.reload(dry_run, reply),
            FleetCommand::Stop => self.stopping = true,
            FleetCommand::Kill => self.kill_children(),
        }
    }

    pub(super) fn status(&self) -> FleetStatus {
        let now = self.deadlines.running_time();
        FleetStatus {
            children: self.children.values().map(|child| child.status(now)).collect(),
            models: self.models.values().map(ManagedModel::status).collect(),
            stored_fds: self.fd_store.len(),
            http_address: self.spec.http_address.clone(),
        }
    }

    fn known_child(&self, name: &str) -> Result<Arc<str>, CommandError> {
        let known = self.children.get_key_value(name).map(|(name, _)| name.clone());
        known.ok_or_else(|| CommandError::UnknownChild { name: name.to_owned() })
    }

    fn known_worker(&self, name: &str) -> Result<Arc<str>, CommandError> {
        let name = self.known_child(name)?;
        match self.children.get(&name).is_some_and(|child| child.slot.is_some()) {
            true => Ok(name),
            false => Err(CommandError::NotAWorker { name: name.to_string() }),
        }
    }

    fn restart(&mut self, name: &str, drain: Option<Duration>) -> Result<(), CommandError> {
        self.check_not_stopping()?;
        let (name, event) = match drain {
            None => (self.known_child(name)?, ChildEvent::Restart),
            Some(grace) => (self.known_worker(name)?, ChildEvent::Drain { grace, then: AfterExit::Start }),
        };
        self.apply_event(&name, event);
        Ok(())
    }

    fn drain(&mut self, name: &str, grace: Duration, reply: CommandReply<()>) {
        let name = match self.check_not_stopping().and_then(|()| self.known_worker(name)) {
            Ok(name) => name,
            Err(error) => return answer(reply, Err(error)),
        };
        supervised_child(&mut self.children, &name).waits_for_stop.push(reply);
        self.apply_event(&name, ChildEvent::Drain { grace, then: AfterExit::StayStopped });
    }

    pub(super) fn add_worker(&mut self, model: String) -> Result<String, CommandError> {
        self.check_not_stopping()?;
        let found = match (model.is_empty(), self.models.len()) {
            (true, 1) => self.models.values().next(),
            (true, models) => return Err(CommandError::AmbiguousModel { models }),
            (false, _) => self.models.get(&model),
        };
        let Some(ManagedModel { spec: model, .. }) = found else {
            return Err(CommandError::UnknownModel { name: model });
        };
        let used = |index| self.children.values().any(|c| c.slot.as_ref().is_some_and(|s| s.index == index));
        self.check_worker_count(1)?;
        // A worker's index is part of its socket name. Recorded workers of an earlier supervisor
        // may have any index.
        let index = (0..).find(|&index| !used(index)).expect("invariant: fewer workers than numbers");
        let (spec, slot) = self.spec.worker_spec(index, model);
        let name = spec.name.clone();
        let added = self.add_child(spec, slot);
        let child = added.map_err(|error| CommandError::StartFailed {
            name: name.clone(),
            why: service::exit::one_line(&error),
        })?;
        self.apply_event(&child, ChildEvent::Start);
        Ok(name)
    }

    pub(super) fn load_model(&mut self, spec: ModelSpec, by_command: bool) -> Result<(), CommandError> {
        self.check_not_stopping()?;
        match self.models.get(&spec.name) {
            Some(ManagedModel { state: ModelState::Failed(_), .. }) | None => {}
            Some(_) => return Err(CommandError::NameTaken { name: spec.name }),
        }
        let (name, workers) = (spec.name.clone(), spec.workers);
        self.check_worker_count(workers)?;
        self.add_model(spec, by_command);
        self.record_models();
        let model = self.models.get_mut(&name).expect("invariant: the model was just added");
        model.load(&self.admin, &self.commands);
        for _ in 0..workers {
            self.add_worker(name.clone())?;
        }
        Ok(())
    }

    fn unload_model(&mut self, name: String, reply: CommandReply<()>) {
        let Some(model) = self.models.get_mut(&name) else {
            return answer(reply, Err(CommandError::UnknownModel { name }));
        };
        if model.unloading.is_some() {
            let why = "an unload is already in progress".to_owned();
            return answer(reply, Err(CommandError::UnloadFailed { name, why }));
        }
        model.abort();
        model.unloading = Some(reply);
        self.remove_model_workers(&name);
        self.unload_if_unused(&name);
    }

    pub(super) fn check_worker_count(&self, more: u32) -> Result<(), CommandError> {
        let present = self.children.values().filter(|child| child.slot.is_some()).count();
        match u32::try_from(present).is_ok_and(|present| present.saturating_add(more) <= WORKERS_MAX) {
            true => Ok(()),
            false => Err(CommandError::TooManyWorkers { present, more }),
        }
    }

    pub(super) fn check_not_stopping(&self) -> Result<(), CommandError> {
        match self.stopping {
            true => Err(CommandError::Stopping),
            false => Ok(()),
        }
    }

    pub(super) fn set_model_state(&mut self, name: &str, state: ModelState) {
        let Some(model) = self.models.get_mut(name) else { return };
        if let ModelState::Failed(failure) = &state {
            tracing::warn!(model = name, why = failure.text, "cannot load the model");
        }
        let failed = matches!(state, ModelState::Failed(_)) && !model.was_served;
        model.was_served |= state == ModelState::Ready;
        model.state = state;
        let status = model.status();
        self.publish(FleetEvent::Model(status));
        if failed {
            self.remove_model_workers(name);
        }
    }

    fn remove_model_workers(&mut self, model: &str) {
        let of_model = |c: &SupervisedChild| c.slot.as_ref().is_some_and(|s| s.model == model);
        let workers: Vec<Arc<str>> =
            self.children.iter().filter(|(_, c)| of_model(c)).map(|(name, _)| name.clone()).collect();
        for worker in workers {
            self.remove_worker(&worker, None);
        }
    }

    pub(super) fn remove_worker(&mut self, name: &Arc<str>, reply: Option<CommandReply<()>>) {
        supervised_child(&mut self.children, name).removed = Some(reply);
        self.apply_event(name, ChildEvent::Stop);
    }

    pub(super) fn unload_if_unused(&mut self, name: &str) {
        let used = self.children.values().any(|c| c.slot.as_ref().is_some_and(|s| s.model == name));
        let unloading = self.models.get(name).is_some_and(|m| m.unloading.is_some());
        if used || !unloading {
            return;
        }
        let (admin, event_loop, name) =
            (self.admin.clone(), self.commands.event_loop.clone(), name.to_owned());
        tokio::spawn(async move {
            let refusal = admin.unload(name.clone()).await.err().map(|status| status.message().to_owned());
            let _: Result<(), _> = event_loop.send(SupervisorEvent::ModelUnloaded { name, refusal }).await;
        });
    }

    pub(super) fn model_unloaded(&mut self, name: &str, refusal: Option<String>) {
        let Some(reply) = self.models.get_mut(name).and_then(|m| m.unloading.take()) else { return };
        let name = name.to_owned();
        if let Some(why) = refusal {
            tracing::error!(model = name, why, "cannot unload the model");
            return answer(reply, Err(CommandError::UnloadFailed { name, why }));
        }
        self.models.remove(&name);
        self.record_models();
        self.publish(FleetEvent::ModelRemoved(name));
        answer(reply, Ok(()));
    }

    /// Stops the first role that still has processes. Returns true when no role has any.
    pub(super) fn advance_shutdown(&mut self) -> bool {
        for role in ChildRole::STOP_ORDER {
            let of_role: Vec<Arc<str>> = self
                .children
                .iter()
                .filter(|(_, c)| c.spec.role == role)
                .map(|(name, _)| name.clone())
                .collect();
            for name in &of_role {
                let asked = self.children.get(name).map(|c| c.machine.state());
                if !matches!(asked, None | Some(ChildState::Stopped)) {
                    self.apply_event(name, ChildEvent::Stop);
                }
            }
            if of_role.iter().any(|name| self.children.get(name).is_some_and(|c| c.machine.has_process())) {
                return false;
            }
        }
        true
    }

    fn kill_children(&mut self) {
        self.stopping = true;
        let names: Vec<Arc<str>> = self.children.keys().cloned().collect();
        for name in names {
            self.apply_event(&name, ChildEvent::Stop);
            // A child that waited for its removal is gone when it has stopped.
            if self.children.contains_key(&name) {
                self.signal(&name, ChildProcess::kill);
            }
        }
    }
}
