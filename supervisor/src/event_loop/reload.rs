// SPDX-License-Identifier: Apache-2.0

//! Reads the configuration again, and applies what differs from the running fleet.
//!
//! The configuration is read and checked as a whole before anything changes. `spec_diff` compares;
//! this module carries the changes out. It begins each change and does not wait for its end: loads,
//! drains and rolling restarts go on as events.

use std::sync::Arc;

use bytes::Bytes;

use tokio::sync::oneshot;

use super::children::supervised_child;
use super::commands::taken_name;
use super::{ManagedModel, SupervisorLoop, answer};
use crate::commands::{CommandError, CommandReply, DRAIN_GRACE};
use crate::events::SupervisorEvent;
use crate::idle_models::IdleModel;
use crate::spec::{ChildRole, ModelSpec, ReloadScope, ReloadedSpec};
use crate::spec_diff::{ComparedSpec, SpecChange, diff_specs};
use crate::state::ChildEvent;
use service::runtime_dir::WORKERS_MAX;

impl SupervisorLoop {
    /// Reads the configuration in a task: a file on a slow mount must not stop the event loop.
    pub(super) fn reload(&mut self, scope: ReloadScope, reply: CommandReply<Vec<SpecChange>>) {
        if scope == ReloadScope::All {
            self.tell_parent_of_reload(true);
        }
        let (read, event_loop) = (self.spec.read_again.clone(), self.commands.event_loop.clone());
        tokio::task::spawn_blocking(move || {
            let read = match read {
                Some(reader) => (reader.read)(scope).map_err(|why| CommandError::Configuration { why }),
                None => Err(CommandError::NoConfiguration),
            };
            // Without an event loop the result is of no use.
            let _: Result<(), _> =
                event_loop.blocking_send(SupervisorEvent::ConfigurationRead { read, scope, reply });
        });
    }

    pub(super) fn configuration_read(
        &mut self,
        read: Result<ReloadedSpec, CommandError>,
        scope: ReloadScope,
        reply: CommandReply<Vec<SpecChange>>,
    ) {
        let outcome = read.and_then(|mut wanted| {
            self.leave_out_taken(&mut wanted);
            let changes = self.changes_to(&wanted)?;
            if scope == ReloadScope::Preview {
                return Ok(changes);
            }
            self.check_no_swap()?;
            if let (ReloadScope::All, Some(reader)) = (scope, &self.spec.read_again) {
                (reader.accept)();
            }
            self.add_devices(std::mem::take(&mut wanted.gpus));
            self.unusable.retain(|_, model| scope != ReloadScope::All && !model.is_from_directory);
            self.unusable.extend(wanted.unusable.iter().map(|model| (model.name.clone(), model.clone())));
            for model in wanted.models {
                let known = self.models.get_mut(&model.name).map(|known| &mut known.spec);
                if let Some(known) = known.or_else(|| self.idle_models.spec_mut(&model.name)) {
                    known.configured_path = model.configured_path;
                }
            }
            self.apply_changes(changes)
        });
        if scope == ReloadScope::All {
            self.tell_parent_of_reload(false);
        }
        answer(reply, outcome);
    }

    /// systemd waits for both messages (`Type=notify-reload`).
    fn tell_parent_of_reload(&self, begins: bool) {
        let told = if begins { self.parent.reloading() } else { self.parent.ready() };
        if let Err(error) = told {
            tracing::warn!(%error, "cannot report the reload to the service manager");
        }
    }

    /// The models that commands have loaded, the idle ones among them.
    fn loaded_by_command(&self) -> impl Iterator<Item = &ModelSpec> {
        let loaded = self.models.values().filter(|known| known.by_command).map(|known| &known.spec);
        let idle = self.idle_models.iter().filter(|known| known.by_command).map(|known| &known.spec);
        loaded.chain(idle)
    }

    /// A file of the models directory that has the name of a model which a command has loaded is
    /// left out, until that one is unloaded.
    fn leave_out_taken(&self, wanted: &mut ReloadedSpec) {
        let taken: Vec<&ModelSpec> = self.loaded_by_command().collect();
        wanted.models.retain(|model| {
            let name = taken_name(model, taken.iter().copied()).filter(|_| model.on_demand);
            if let Some(name) = &name {
                tracing::warn!(name, "a model that is loaded on demand is left out: its name is taken");
            }
            name.is_none()
        });
        wanted
            .unusable
            .retain(|model| taken.iter().all(|known| known.names().all(|name| name != model.name)));
    }

    /// Adds a model that is loaded on demand.
    fn add_idle(&mut self, spec: &ModelSpec) {
        self.unusable.remove(&spec.name);
        if let Some(model) = self.models.get_mut(&spec.name) {
            if let Some(unloading) = &mut model.unloading {
                // It was taken off and has come back.
                unloading.keep_idle = true;
                model.replacement = Some(spec.clone());
                return;
            }
            // It could not be loaded.
            model.abort();
            self.models.remove(&spec.name);
            self.remove_workers_on(&spec.name, None);
        }
        self.insert_idle(IdleModel::new(spec.clone(), false, Bytes::new()));
    }

    /// Compares and checks; changes nothing.
    fn changes_to(&self, wanted: &ReloadedSpec) -> Result<Vec<SpecChange>, CommandError> {
        self.check_not_stopping()?;
        for model in &wanted.models {
            if let Some(name) = taken_name(model, self.loaded_by_command()) {
                return Err(CommandError::NameTaken { name });
            }
        }
        // A model that could not be loaded has no workers; it is added anew.
        let is_running = |model: &&ManagedModel| {
            let stays = model.unloading.as_ref().is_none_or(|unload| unload.keep_idle);
            !model.by_command && stays && !model.copies.has_given_up()
        };
        let running = self.models.values().filter(is_running).map(|model| &model.spec);
        let idle = self.idle_models.iter().filter(|model| !model.by_command).map(|model| &model.spec);
        let running: Vec<ModelSpec> = running.chain(idle).cloned().collect();
        let running = ComparedSpec { router: &self.spec.router, models: &running };
        let mut changes =
            diff_specs(running, ComparedSpec { router: &wanted.router, models: &wanted.models });
        changes.extend(wanted.not_applied.iter().cloned().map(|change| SpecChange::NotApplied { change }));
        self.check_worker_growth(&changes)?;
        Ok(changes)
    }

    fn check_worker_growth(&self, changes: &[SpecChange]) -> Result<(), CommandError> {
        let more = changes.iter().map(|change| match change {
            SpecChange::ModelAdded { spec } if !spec.on_demand => spec.total_workers(),
            SpecChange::ModelDevices { from, spec } => {
                let is_new = |device: &&str| !from.iter().any(|known| known == device);
                let new = u32::try_from(spec.devices().filter(is_new).count()).unwrap_or(u32::MAX);
                spec.workers.saturating_mul(new)
            }
            SpecChange::WorkerCount { devices, from, to, .. } => {
                to.saturating_sub(*from).saturating_mul(*devices)
            }
            _ => 0,
        });
        self.check_worker_count(more.fold(0, |sum, workers| sum.saturating_add(workers).min(WORKERS_MAX + 1)))
    }

    /// Applies every change, also after one that fails. Returns the first failure.
    fn apply_changes(&mut self, changes: Vec<SpecChange>) -> Result<Vec<SpecChange>, CommandError> {
        let mut failure = None;
        for change in &changes {
            tracing::info!(%change, "reload");
            if let Err(error) = self.apply_change(change) {
                tracing::error!(%change, %error, "cannot apply a change of the configuration");
                failure.get_or_insert(error);
            }
        }
        self.record_models();
        failure.map_or(Ok(changes), Err)
    }

    fn apply_change(&mut self, change: &SpecChange) -> Result<(), CommandError> {
        match change {
            SpecChange::ModelRemoved { name } => {
                // No caller waits for the end.
                self.unload(name.clone(), DRAIN_GRACE, false, oneshot::channel().0);
                Ok(())
            }
            SpecChange::ModelAdded { spec } if spec.on_demand => {
                self.add_idle(spec);
                Ok(())
            }
            SpecChange::ModelAdded { spec } => self.load_model(spec.clone(), false),
            SpecChange::FileReplaced { spec } => {
                self.replace_file(spec);
                Ok(())
            }
            SpecChange::ModelDevices { spec, .. } => {
                self.change_devices(spec);
                Ok(())
            }
            SpecChange::WorkerCount { model, from, to, .. } => self.change_worker_count(model, *from, *to),
            SpecChange::WorkerSettings { model, copies, settings, .. } => {
                let known = self.models.get_mut(model).map(|model| &mut model.spec);
                if let Some(spec) = known.or_else(|| self.idle_models.spec_mut(model)) {
                    for copy in &mut spec.copies {
                        let wanted = copies.iter().find(|wanted| wanted.device == copy.device);
                        (copy.worker_config, copy.memory) =
                            wanted.map_or_else(Default::default, |w| (w.worker_config.clone(), w.memory));
                    }
                    spec.settings = settings.clone();
                }
                let workers = self.workers_of(model);
                self.restart_rolling(workers);
                Ok(())
            }
            SpecChange::IdleUnload { model, to, settings, .. } => {
                let known = self.models.get_mut(model).map(|model| &mut model.spec);
                if let Some(spec) = known.or_else(|| self.idle_models.spec_mut(model)) {
                    (spec.idle_unload, spec.settings) = (*to, settings.clone());
                }
                Ok(())
            }
            SpecChange::RouterSettings { router_config, .. } => {
                self.restart_router(router_config.clone());
                Ok(())
            }
            SpecChange::NotApplied { .. } => Ok(()),
        }
    }

    fn change_worker_count(&mut self, model: &str, from: u32, to: u32) -> Result<(), CommandError> {
        if let Some(idle) = self.idle_models.spec_mut(model) {
            idle.workers = to;
        }
        let Some(known) = self.models.get_mut(model) else { return Ok(()) };
        known.spec.workers = to;
        let spec = known.spec.clone();
        for device in spec.devices() {
            // They all start when the copy is there.
            let waits = self.models.get(model).is_some_and(|model| {
                model.copies.lacks_workers(device) || model.room_wait.is_some() || model.unloading.is_some()
            });
            let more = if waits { 0 } else { to.saturating_sub(from) };
            for _ in 0..more {
                self.start_worker(&spec, device)?;
            }
            let is_there = |name: &Arc<str>| {
                let slot = self.children.get(name).and_then(|child| child.slot.as_ref());
                slot.is_some_and(|slot| slot.device == device)
            };
            let present: Vec<Arc<str>> = self.workers_of(model).into_iter().filter(is_there).collect();
            for worker in present.iter().rev().take(from.saturating_sub(to) as usize) {
                self.remove_drained(worker, DRAIN_GRACE, None);
            }
        }
        Ok(())
    }

    /// The workers of a model that are not being removed, by their numbers.
    pub(super) fn workers_of(&self, model: &str) -> Vec<Arc<str>> {
        let mut workers: Vec<(u32, Arc<str>)> = self
            .children
            .iter()
            .filter(|(_, child)| child.removed.is_none())
            .filter_map(|(name, child)| Some((child.slot.as_ref()?, name)))
            .filter(|(slot, _)| slot.model == model)
            .map(|(slot, name)| (slot.index, name.clone()))
            .collect();
        workers.sort_unstable();
        workers.into_iter().map(|(_, name)| name).collect()
    }

    fn restart_router(&mut self, settings: toml::Table) {
        self.spec.router = settings;
        let router = self.children.iter().find(|(_, child)| child.spec.role == ChildRole::Router);
        let Some(name) = router.map(|(name, _)| name.clone()) else { return };
        supervised_child(&mut self.children, &name).spec.config = self.spec.router.clone();
        self.apply_event(&name, ChildEvent::Restart);
    }
}
