// SPDX-License-Identifier: Apache-2.0

//! Carries out what [`ModelCopies`] decides: loads of single copies, and the workers that leave or
//! start with them.
//!
//! [`ModelCopies`]: crate::model_copies::ModelCopies

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;

use super::room::RoomWait;
use super::{ManagedModel, SupervisedChild, SupervisorLoop};
use crate::events::ResidentCopy;
use crate::fleet::CommandSender;
use crate::model_copies::{CopyAction, ModelCopies};
use crate::model_use::ModelUse;
use crate::resident_models::WeightsOnDevice;
use crate::spec::{CopySpec, ModelSpec};
use crate::status::{FleetEvent, ModelState, ModelStatus};
use crate::weight_server_admin::{CopyLoad, WeightServerAdmin};

impl ManagedModel {
    pub(super) fn new(spec: ModelSpec, by_command: bool, room_wait: Option<RoomWait>) -> Self {
        let copies = ModelCopies::loading(spec.devices());
        Self {
            spec,
            by_command,
            copies,
            tasks: Default::default(),
            unloading: None,
            is_waking: false,
            model_use: ModelUse::default(),
            room_wait,
            replacement: None,
        }
    }

    pub(super) fn status(&self) -> ModelStatus {
        let ModelSpec { name, path, files, settings, fallback, .. } = self.spec.clone();
        // What the next requests get.
        let (files, digest) = match &self.replacement {
            Some(next) => (next.files.clone(), Bytes::new()),
            None => (files, self.copies.digest().unwrap_or_default()),
        };
        let weights = |device: &str| self.spec.weights_on(device).unwrap_or_default().to_owned();
        let (state, copies) = (self.copies.state(), self.copies.status(weights));
        let is_unloading = self.unloading.is_some();
        let becomes_idle = self.unloading.as_ref().is_some_and(|unload| unload.keep_idle);
        let wakes_after = self.unloading.as_ref().is_some_and(|unload| unload.wake_after);
        let aliases = self.spec.aliases().map(str::to_owned).collect();
        ModelStatus {
            name,
            files,
            aliases,
            path,
            state,
            copies,
            digest,
            settings,
            is_unloading,
            becomes_idle,
            wakes_after,
            fallback,
        }
    }

    pub(super) fn load_copy(
        &mut self,
        device: &str,
        rejected: Option<u64>,
        admin: &WeightServerAdmin,
        commands: &CommandSender,
    ) {
        let load = CopyLoad {
            known: self.copies.digest_on(device),
            repeats: self.copies.repeats_load(device),
            rejected,
            ..copy_load(&self.spec, device)
        };
        let task = tokio::spawn(admin.clone().load(load, commands.event_loop.clone()));
        if let Some(earlier) = self.tasks.insert(device.to_owned(), task.abort_handle()) {
            earlier.abort();
        }
    }

    pub(super) fn abort(&self) {
        self.tasks.values().for_each(tokio::task::AbortHandle::abort);
    }
}

/// The first load of a copy.
pub(super) fn copy_load(spec: &ModelSpec, device: &str) -> CopyLoad {
    CopyLoad {
        model: spec.name.clone(),
        copy: WeightsOnDevice {
            weights: spec.weights_on(device).unwrap_or_default().to_owned(),
            device: device.to_owned(),
        },
        path: spec.path.clone(),
        pack: spec.pack,
        known: None,
        repeats: false,
        rejected: None,
    }
}

/// Every copy of a model.
pub(super) fn weights_on_devices(spec: &ModelSpec) -> impl Iterator<Item = WeightsOnDevice> {
    let copy =
        |copy: &CopySpec| WeightsOnDevice { weights: copy.weights.clone(), device: copy.device.clone() };
    spec.copies.iter().map(copy)
}

impl SupervisorLoop {
    pub(super) fn copy_state_changed(&mut self, name: &str, device: &str, state: ModelState) {
        let Some(model) = self.models.get_mut(name) else { return };
        if let ModelState::Failed(failure) = &state {
            tracing::warn!(model = name, device, why = failure.text, "cannot load the model");
        }
        let action = model.copies.set_state(device, state);
        let status = model.status();
        self.publish(FleetEvent::Model(status));
        self.apply_copy_action(name, device, action, None);
    }

    pub(super) fn copy_loaded(&mut self, name: &str, device: &str, loaded: ResidentCopy) {
        let now = self.deadlines.advance(Instant::now());
        // It was loaded before the device was quarantined.
        if self.health.reason(device).is_some() {
            return self.unload_copies_on(device);
        }
        let Some(model) = self.models.get_mut(name) else { return };
        let action = model.copies.set_loaded(device, loaded.digest);
        model.is_waking = false;
        model.model_use.loaded(now);
        let status = model.status();
        self.publish(FleetEvent::Model(status));
        self.apply_copy_action(name, device, action, Some(loaded.generation));
        self.restart_processes(&loaded.outdated);
    }

    fn apply_copy_action(
        &mut self,
        name: &str,
        device: &str,
        action: Option<CopyAction>,
        generation: Option<u64>,
    ) {
        match action {
            None => {}
            Some(CopyAction::RemoveWorkers) => self.remove_workers_on(name, Some(device)),
            Some(CopyAction::GiveUp) => {
                if let Some(model) = self.models.get(name) {
                    model.abort();
                }
                self.remove_workers_on(name, None);
                self.wake_failed(name);
            }
            Some(CopyAction::StartWorkers) => self.start_missing_workers(name, device),
            Some(CopyAction::Reject) => {
                tracing::error!(model = name, device, "the file has other content than the other copies");
                let Some(model) = self.models.get_mut(name) else { return };
                model.load_copy(device, generation, &self.admin, &self.commands);
                if model.copies.lacks_workers(device) {
                    self.remove_workers_on(name, Some(device));
                }
            }
        }
    }

    /// Removes workers that serve nothing: those of one copy, or all of the model.
    pub(super) fn remove_workers_on(&mut self, model: &str, device: Option<&str>) {
        let is_meant = |child: &SupervisedChild| {
            child
                .slot
                .as_ref()
                .is_some_and(|slot| slot.model == model && device.is_none_or(|device| slot.device == device))
        };
        let workers = self.children.iter().filter(|(_, child)| is_meant(child));
        let workers: Vec<Arc<str>> = workers.map(|(name, _)| name.clone()).collect();
        for worker in workers {
            self.remove_worker(&worker);
        }
    }

    /// Starts workers for a copy until it has as many as the model is to have on each device.
    fn start_missing_workers(&mut self, name: &str, device: &str) {
        let Some(spec) = self.models.get(name).map(|model| model.spec.clone()) else { return };
        let present = self.workers_on(name, device);
        for _ in present..spec.workers as usize {
            if let Err(error) = self.start_worker(&spec, device) {
                return tracing::error!(model = name, device, %error, "cannot start a worker of a copy");
            }
        }
    }

    /// The workers of a copy that are not being removed.
    pub(super) fn workers_on(&self, model: &str, device: &str) -> usize {
        let is_meant = |child: &&SupervisedChild| {
            let slot = child.slot.as_ref();
            child.removed.is_none() && slot.is_some_and(|slot| slot.model == model && slot.device == device)
        };
        self.children.values().filter(is_meant).count()
    }

    /// The copies that no model of the fleet uses, but perhaps the one named `except`.
    pub(super) fn unused_copies(&self, spec: &ModelSpec, except: Option<&str>) -> Vec<WeightsOnDevice> {
        let others = || self.models.values().filter(|model| Some(model.spec.name.as_str()) != except);
        let is_used = |copy: &WeightsOnDevice| {
            let uses =
                |other: &ManagedModel| other.spec.weights_on(&copy.device) == Some(copy.weights.as_str());
            others().any(uses)
        };
        weights_on_devices(spec).filter(|copy| !is_used(copy)).collect()
    }

    /// Whether a model of the fleet, or a swap, has the copy.
    pub(super) fn has_copy(&self, copy: &WeightsOnDevice) -> bool {
        self.specs().any(|spec| spec.weights_on(&copy.device) == Some(copy.weights.as_str()))
    }
}
