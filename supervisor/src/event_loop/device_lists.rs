// SPDX-License-Identifier: Apache-2.0

//! Another list of devices for a model of the configuration, after a reload. Copies on devices that
//! stay serve meanwhile.

use std::sync::Arc;

use super::SupervisorLoop;
use crate::commands::DRAIN_GRACE;
use crate::resident_models::WeightsOnDevice;
use crate::shared_weights;
use crate::spec::{CopySpec, ModelSpec, WorkerSlot};
use crate::status::FleetEvent;

impl SupervisorLoop {
    pub(super) fn change_devices(&mut self, wanted: &ModelSpec) {
        let name = wanted.name.as_str();
        if let Some(idle) = self.idle_models.spec_mut(name) {
            (idle.copies, idle.settings) = (wanted.copies.clone(), wanted.settings.clone());
            return;
        }
        let Some(model) = self.models.get(name) else { return };
        let known = model.spec.clone();
        let is_waiting = model.room_wait.is_some();
        let new: Vec<String> = difference(wanted, &known);
        let old: Vec<String> = difference(&known, wanted);
        let copies = self.named_copies(&known, wanted);
        let Some(model) = self.models.get_mut(name) else { return };
        if model.unloading.is_some() {
            // It becomes idle: the next load is that of the new list.
            model.replacement = Some(wanted.clone());
            return;
        }
        (model.spec.copies, model.spec.settings) = (copies, wanted.settings.clone());
        new.iter().for_each(|device| model.copies.add(device));
        for device in &old {
            model.copies.remove(device);
            if let Some(load) = model.tasks.remove(device) {
                load.abort();
            }
        }
        let status = model.status();
        self.publish(FleetEvent::Model(status));
        for device in &old {
            self.leave_device(&known, device);
        }
        // Otherwise all copies are requested when there is room.
        if !is_waiting {
            new.iter().for_each(|device| self.request_copy(name, device));
        }
    }

    /// The wanted copies. Those on devices that stay keep their weights and settings.
    fn named_copies(&self, known: &ModelSpec, wanted: &ModelSpec) -> Vec<CopySpec> {
        let kept = |copy: &CopySpec| known.copy_on(&copy.device).unwrap_or(copy).clone();
        let mut spec = ModelSpec { copies: wanted.copies.iter().map(kept).collect(), ..known.clone() };
        for index in 0..spec.copies.len() {
            let CopySpec { device, weights, .. } = &spec.copies[index];
            if weights.is_empty() {
                let others = || self.specs().filter(|other| other.name != spec.name);
                let taken = others().flat_map(ModelSpec::weights);
                spec.copies[index].weights = shared_weights::name_for(&spec, device, others(), taken);
            }
        }
        spec.copies
    }

    /// The workers on the device finish their streams. The weights leave with the last one.
    fn leave_device(&mut self, known: &ModelSpec, device: &str) {
        let weights = known.weights_on(device).unwrap_or_default().to_owned();
        let is_here = |slot: &WorkerSlot| slot.model == known.name && slot.device == device;
        let workers = self.children.iter().filter(|(_, child)| child.slot.as_ref().is_some_and(is_here));
        let workers: Vec<Arc<str>> = workers.map(|(name, _)| name.clone()).collect();
        for worker in &workers {
            self.remove_drained(worker, DRAIN_GRACE, None);
        }
        if workers.is_empty() {
            self.unload_leftover(&WeightsOnDevice { weights, device: device.to_owned() });
        }
    }
}

/// The devices of one model that another one lacks.
fn difference(model: &ModelSpec, other: &ModelSpec) -> Vec<String> {
    model.devices().filter(|device| other.copy_on(device).is_none()).map(str::to_owned).collect()
}
