// SPDX-License-Identifier: Apache-2.0

//! Executes commands: status, restarts, workers, models, and the stop of the whole fleet.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::children::supervised_child;
use super::room::RoomWait;
use super::{ManagedModel, SupervisorLoop, Unload, answer};
use crate::commands::{CommandError, CommandReply, FleetCommand};
use crate::events::SupervisorEvent;
use crate::process::ChildProcess;
use crate::shared_weights;
use crate::spec::{ChildRole, ChildSpec, CopySpec, ModelSpec, UnusableModel, WorkerSlot};
use crate::state::{AfterExit, ChildEvent, ChildState};
use crate::status::{FleetEvent, FleetStatus, ModelState};
use service::runtime_dir::WORKERS_MAX;

/// A name of the model that one of the others has already.
pub(super) fn taken_name<'a>(
    model: &ModelSpec,
    mut others: impl Iterator<Item = &'a ModelSpec>,
) -> Option<String> {
    others.find_map(|other| {
        model.names().find(|name| other.names().any(|taken| taken == *name)).map(str::to_owned)
    })
}

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
            FleetCommand::RemoveWorker { name, grace, reply } => match self.known_worker(&name) {
                Ok(name) => self.remove_drained(&name, grace, Some(reply)),
                Err(error) => answer(reply, Err(error)),
            },
            FleetCommand::LoadModel { model, reply } => self.load_by_command(model, reply),
            FleetCommand::UnloadModel { name, grace, keep_idle, reply } => {
                self.unload(name, grace, keep_idle, reply)
            }
            FleetCommand::WakeModel { name, on_demand, reply } => answer(reply, self.wake(&name, on_demand)),
            FleetCommand::SwapModel { model, grace, reply } => self.swap_model(model, grace, reply),
            FleetCommand::Reload { scope, reply } => self.reload(scope, reply),
            FleetCommand::QuarantineDevice { device, reason, reply } => {
                answer(reply, self.quarantine_device(&device, reason))
            }
            FleetCommand::EndQuarantine { device, reply } => answer(reply, self.end_quarantine(&device)),
            FleetCommand::Stop => self.stopping = true,
            FleetCommand::Kill => self.kill_children(),
        }
    }

    pub(super) fn status(&self) -> FleetStatus {
        let now = self.deadlines.running_time();
        // The workers of a file that has just become unusable may still drain.
        let is_listed_alone = |model: &&UnusableModel| {
            !self.models.contains_key(&model.name) && !self.idle_models.contains(&model.name)
        };
        FleetStatus {
            children: self.children.values().map(|child| child.status(now)).collect(),
            models: self
                .models
                .values()
                .map(ManagedModel::status)
                .chain(self.idle_models.statuses(Instant::now()))
                .chain(self.unusable.values().filter(is_listed_alone).map(UnusableModel::status))
                .collect(),
            stored_fds: self.fd_store.len(),
            http_address: self.spec.http_address.clone(),
            crash_reports: self.crash_reports.status(),
            devices: self.device_status(now),
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
        self.check_not_idle(&model)?;
        self.check_not_swapped(&model)?;
        let found = match (model.is_empty(), self.models.len()) {
            (true, 1) => self.models.values().next(),
            (true, models) => return Err(CommandError::AmbiguousModel { models }),
            (false, _) => self.models.get(&model),
        };
        let found = found.filter(|found| found.unloading.is_none());
        let Some(found) = found else { return Err(CommandError::UnknownModel { name: model }) };
        let spec = found.spec.clone();
        let device = found.copies.device_for_worker(|device| self.workers_on(&spec.name, device));
        self.start_worker(&spec, &device.expect("invariant: a model has a copy"))
    }

    pub(super) fn start_worker(&mut self, model: &ModelSpec, device: &str) -> Result<String, CommandError> {
        let used = |index| self.children.values().any(|c| c.slot.as_ref().is_some_and(|s| s.index == index));
        self.check_worker_count(1)?;
        self.check_in_service(device)?;
        // A worker's index is part of its socket name. Recorded workers of an earlier supervisor
        // may have any index.
        let index = (0..).find(|&index| !used(index)).expect("invariant: fewer workers than numbers");
        let copy = model.copy_on(device).expect("invariant: workers start on devices of their model");
        let (spec, slot) = self.worker_spec(index, model, copy);
        let name = spec.name.clone();
        let added = self.add_child(spec, slot);
        let child = added.map_err(|error| CommandError::StartFailed {
            name: name.clone(),
            why: service::exit::one_line(&error),
        })?;
        self.apply_event(&child, ChildEvent::Start);
        Ok(name)
    }

    /// The specification of a worker of the model, which may have another model draft for it.
    pub(super) fn worker_spec(
        &self,
        index: u32,
        model: &ModelSpec,
        copy: &CopySpec,
    ) -> (ChildSpec, Option<WorkerSlot>) {
        let weights_of = |name: &str, device: &str| {
            let model = self.models.get(name)?;
            model.spec.weights_on(device).map(str::to_owned)
        };
        self.spec.worker_spec(index, model, copy, weights_of)
    }

    /// Names the weights of a model that comes to this fleet. It shares those of a model of the
    /// same file, unless these are just being unloaded.
    pub(super) fn name_weights(&self, spec: &mut ModelSpec) {
        let is_going =
            |model: &ManagedModel| model.unloading.is_some() && !self.has_workers(&model.spec.name);
        // The model of this name that could not be loaded has no weights.
        let name = spec.name.clone();
        let is_lost = |other: &str| {
            other == name
                && self.models.get(other).is_some_and(|m| matches!(m.copies.state(), ModelState::Failed(_)))
        };
        let stays = |other: &&ModelSpec| !self.models.get(&other.name).is_some_and(is_going);
        let known = || self.specs().filter(|other| !is_lost(&other.name));
        for index in 0..spec.copies.len() {
            let taken = known().flat_map(ModelSpec::weights);
            let device = &spec.copies[index].device;
            spec.copies[index].weights = shared_weights::name_for(spec, device, known().filter(stays), taken);
        }
    }

    fn has_workers(&self, model: &str) -> bool {
        self.children.values().any(|c| c.slot.as_ref().is_some_and(|slot| slot.model == model))
    }

    pub(super) fn load_model(&mut self, mut spec: ModelSpec, by_command: bool) -> Result<(), CommandError> {
        self.check_not_stopping()?;
        self.name_weights(&mut spec);
        let is_failed = |model: &ManagedModel| matches!(model.copies.state(), ModelState::Failed(_));
        // A model that is being unloaded keeps its name to its end, but not its aliases.
        let is_other = |model: &&ManagedModel| match model.spec.name == spec.name {
            true => !is_failed(model),
            false => model.unloading.is_none(),
        };
        let others = self.models.values().filter(is_other).map(|model| &model.spec);
        let idle = self.idle_models.iter().map(|model| &model.spec);
        if let Some(name) = taken_name(&spec, others.chain(idle)) {
            return Err(CommandError::NameTaken { name });
        }
        self.check_worker_count(spec.total_workers())?;
        let now = self.deadlines.advance(Instant::now());
        self.unusable.remove(&spec.name);
        self.add_model(spec, by_command, RoomWait::new(true, now));
        self.record_models();
        self.request_room(Duration::ZERO);
        Ok(())
    }

    /// Unloads the model after its workers have finished their streams.
    pub(super) fn unload_model(
        &mut self,
        name: String,
        grace: Duration,
        keep_idle: bool,
        reply: CommandReply<()>,
    ) {
        let Some(model) = self.models.get(&name) else {
            return answer(reply, Err(CommandError::UnknownModel { name }));
        };
        if model.unloading.is_some() {
            let why = "an unload is already in progress".to_owned();
            return answer(reply, Err(CommandError::UnloadFailed { name, why }));
        }
        if let Err(error) = self.check_not_swapped(&name) {
            return answer(reply, Err(error));
        }
        let Some(model) = self.models.get_mut(&name) else { return };
        model.abort();
        model.unloading = Some(Unload { reply, keep_idle, wake_after: false });
        for worker in self.workers_of(&name) {
            self.remove_drained(&worker, grace, None);
        }
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

    /// Removes a worker that serves nothing.
    pub(super) fn remove_worker(&mut self, name: &Arc<str>) {
        supervised_child(&mut self.children, name).removed.get_or_insert(None);
        self.apply_event(name, ChildEvent::Stop);
    }

    /// Removes a worker after its streams, at most after `grace`.
    pub(super) fn remove_drained(
        &mut self,
        name: &Arc<str>,
        grace: Duration,
        reply: Option<CommandReply<()>>,
    ) {
        let child = supervised_child(&mut self.children, name);
        match (&child.removed, reply) {
            (None, reply) => child.removed = Some(reply),
            (Some(_), Some(reply)) => child.waits_for_stop.push(reply),
            (Some(_), None) => {}
        }
        self.apply_event(name, ChildEvent::Drain { grace, then: AfterExit::StayStopped });
    }

    pub(super) fn unload_if_unused(&mut self, name: &str) {
        let Some(model) = self.models.get(name) else { return };
        if self.has_workers(name) || model.unloading.is_none() {
            return;
        }
        let unused = self.unused_copies(&model.spec, Some(name));
        if unused.is_empty() {
            return self.model_unloaded(name, None);
        }
        let (admin, event_loop, name) =
            (self.admin.clone(), self.commands.event_loop.clone(), name.to_owned());
        tokio::spawn(async move {
            let refusal = admin.unload_all(unused).await.err().map(|status| status.message().to_owned());
            let _: Result<(), _> = event_loop.send(SupervisorEvent::ModelUnloaded { name, refusal }).await;
        });
    }

    pub(super) fn model_unloaded(&mut self, name: &str, refusal: Option<String>) {
        let unload = self.models.get_mut(name).and_then(|m| m.unloading.take());
        let Some(Unload { reply, keep_idle, wake_after }) = unload else { return };
        let name = name.to_owned();
        if let Some(why) = refusal {
            tracing::error!(model = name, why, "cannot unload the model");
            self.request_room(Duration::ZERO);
            return answer(reply, Err(CommandError::UnloadFailed { name, why }));
        }
        match self.models.remove(&name) {
            Some(model) if keep_idle => self.become_idle(model, wake_after),
            _ => {
                self.record_models();
                self.publish(FleetEvent::ModelRemoved(name));
            }
        }
        self.request_room(Duration::ZERO);
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
