// SPDX-License-Identifier: Apache-2.0

//! Carries out what [`DeviceHealth`] decides: takes a device out of service, and returns it.
//!
//! ```text
//! quarantine: workers are killed --> the router resumes their streams on other devices
//!             copies are unloaded: nothing that a faulty device holds is trusted
//! its end:    copies are loaded --> workers start
//! ```
//!
//! [`DeviceHealth`]: crate::device_health::DeviceHealth

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use service::Exit;

use super::SupervisorLoop;
use crate::commands::CommandError;
use crate::device_health::{DeviceReport, DeviceStatus};
use crate::device_record::store_quarantines;
use crate::process::ChildProcess;
use crate::resident_models::WeightsOnDevice;
use crate::spec::{ModelSpec, WorkerSlot};
use crate::state::Termination;
use crate::status::{FleetEvent, ModelFailure, ModelState};

impl SupervisorLoop {
    pub(super) fn devices_reported(&mut self, reports: Vec<DeviceReport>) {
        let now = self.deadlines.advance(Instant::now());
        let used: BTreeSet<String> = self.devices_in_use().map(str::to_owned).collect();
        for report in reports.into_iter().filter(|report| used.contains(&report.device)) {
            let device = report.device.clone();
            if self.health.reported(now, report) {
                self.take_out_of_service(&device);
            }
        }
    }

    /// A worker has ended. If its step hung on a GPU, that may be the fault of the GPU.
    pub(super) fn note_hung_step(&mut self, worker: &Arc<str>, end: &Termination) {
        if *end != Termination::ExitCode(Exit::DeviceHangs.code().into()) {
            return;
        }
        let slot = self.children.get(worker).and_then(|child| child.slot.as_ref());
        let Some(device) = slot.map(|slot| slot.device.clone()) else { return };
        let now = self.deadlines.advance(Instant::now());
        if self.health.step_hung(now, &device) {
            self.take_out_of_service(&device);
        }
    }

    pub(super) fn quarantine_device(&mut self, device: &str, reason: String) -> Result<(), CommandError> {
        self.check_not_stopping()?;
        if !self.devices_in_use().any(|used| used == device) {
            return Err(CommandError::UnknownDevice { device: device.to_owned() });
        }
        let now = self.deadlines.advance(Instant::now());
        match self.health.quarantine(now, device, reason, true) {
            true => self.take_out_of_service(device),
            false => self.record_quarantines(),
        }
        Ok(())
    }

    pub(super) fn end_quarantine(&mut self, device: &str) -> Result<(), CommandError> {
        self.check_not_stopping()?;
        if self.health.reason(device).is_none() {
            return Err(CommandError::NotQuarantined { device: device.to_owned() });
        }
        self.return_to_service(device);
        Ok(())
    }

    pub(super) fn check_in_service(&self, device: &str) -> Result<(), CommandError> {
        match self.health.reason(device) {
            None => Ok(()),
            Some(reason) => {
                Err(CommandError::DeviceQuarantined { device: device.to_owned(), reason: reason.to_owned() })
            }
        }
    }

    /// Returns devices to service whose time is over.
    pub(super) fn return_due_devices(&mut self, now: Instant) {
        for device in self.health.due(now) {
            self.return_to_service(&device);
        }
    }

    /// What the predecessor has quarantined stays so.
    pub(super) fn restore_quarantines(&mut self) {
        let now = self.deadlines.running_time();
        for known in crate::device_record::recorded_quarantines(self.directory.directory()) {
            if self.health.quarantine(now, &known.device, known.reason, known.by_command) {
                self.take_out_of_service(&known.device);
            }
        }
    }

    fn take_out_of_service(&mut self, device: &str) {
        let reason = self.health.reason(device).unwrap_or_default().to_owned();
        tracing::error!(device, reason, "device quarantined: its workers are killed, its weights unloaded");
        self.record_quarantines();
        let is_here = |spec: &ModelSpec| spec.copy_on(device).is_some();
        let models: Vec<String> =
            self.models.iter().filter(|(_, m)| is_here(&m.spec)).map(|(name, _)| name.clone()).collect();
        for name in &models {
            let failure = quarantine_failure(device, &reason);
            let Some(model) = self.models.get_mut(name) else { continue };
            if let Some(load) = model.tasks.remove(device) {
                load.abort();
            }
            model.copies.set_quarantined(device, failure);
            let status = model.status();
            self.publish(FleetEvent::Model(status));
        }
        self.fail_swap_on(device, &quarantine_failure(device, &reason));
        self.kill_workers_on(device);
        for name in &models {
            let has_given_up = self.models.get(name).is_some_and(|model| model.copies.has_given_up());
            if has_given_up {
                self.wake_failed(name);
            }
        }
        self.unload_copies_on(device);
    }

    /// SIGTERM would let a worker go on for a while, with a device that may compute wrong results.
    fn kill_workers_on(&mut self, device: &str) {
        let is_here = |slot: &WorkerSlot| slot.device == device;
        let workers = self.children.iter().filter(|(_, child)| child.slot.as_ref().is_some_and(is_here));
        let workers: Vec<Arc<str>> = workers.map(|(name, _)| name.clone()).collect();
        for name in workers {
            self.remove_worker(&name);
            // One without a process is gone.
            if self.children.contains_key(&name) {
                self.signal(&name, ChildProcess::kill);
            }
        }
    }

    pub(super) fn unload_copies_on(&mut self, device: &str) {
        let copies: BTreeSet<String> =
            self.specs().filter_map(|spec| spec.weights_on(device)).map(str::to_owned).collect();
        let copies = copies.into_iter().map(|weights| WeightsOnDevice { weights, device: device.to_owned() });
        let (admin, copies, of) = (self.admin.clone(), copies.collect(), device.to_owned());
        let task = tokio::spawn(async move {
            if let Err(status) = admin.unload_all(copies).await {
                tracing::warn!(device = of, %status, "cannot unload the weights on a quarantined device");
            }
        });
        self.quarantine_unloads.insert(device.to_owned(), task.abort_handle());
    }

    fn return_to_service(&mut self, device: &str) {
        let now = self.deadlines.advance(Instant::now());
        if !self.health.end(now, device) {
            return;
        }
        tracing::info!(device, "the quarantine of the device is over: its weights are loaded");
        self.record_quarantines();
        // It would unload what is loaded now.
        if let Some(unload) = self.quarantine_unloads.remove(device) {
            unload.abort();
        }
        for name in self.idle_models.forget_failures_on(device) {
            self.publish_idle(&name);
        }
        for model in self.models.values_mut() {
            let is_wanted = model.unloading.is_none() && model.room_wait.is_none();
            if is_wanted && model.spec.copy_on(device).is_some() {
                model.load_copy(device, None, &self.admin, &self.commands);
            }
        }
    }

    /// Requests the copies of a model. Those on quarantined devices fail.
    pub(super) fn load_copies(&mut self, name: &str) {
        let Some(model) = self.models.get_mut(name) else { return };
        model.copies.forget_confirmations();
        let devices: Vec<String> = model.spec.devices().map(str::to_owned).collect();
        devices.iter().for_each(|device| self.request_copy(name, device));
    }

    /// Requests a copy of a model. It fails if the device is quarantined.
    pub(super) fn request_copy(&mut self, name: &str, device: &str) {
        match self.health.reason(device).map(str::to_owned) {
            None => {
                if let Some(model) = self.models.get_mut(name) {
                    model.load_copy(device, None, &self.admin, &self.commands);
                }
            }
            Some(reason) => {
                let failure = quarantine_failure(device, &reason);
                self.copy_state_changed(name, device, ModelState::Failed(failure));
            }
        }
    }

    pub(super) fn device_status(&self, now: Instant) -> Vec<DeviceStatus> {
        self.health.status(now, self.devices_in_use())
    }

    /// The devices of all models, also of idle ones.
    fn devices_in_use(&self) -> impl Iterator<Item = &str> {
        let idle = self.idle_models.iter().map(|model| &model.spec);
        self.specs().chain(idle).flat_map(ModelSpec::devices)
    }

    fn record_quarantines(&self) {
        let quarantines = self.health.quarantines();
        if let Err(error) = store_quarantines(self.directory.directory(), quarantines) {
            let cause = service::exit::one_line(&error);
            tracing::error!(cause, "cannot record the quarantined devices: a successor would use them");
        }
    }
}

fn quarantine_failure(device: &str, reason: &str) -> ModelFailure {
    ModelFailure { exit: Exit::OutOfResources, text: format!("{device} is quarantined: {reason}") }
}
