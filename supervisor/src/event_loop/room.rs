// SPDX-License-Identifier: Apache-2.0

//! Loads models when the memory has room for them, and lets idle models leave for those that
//! requests or commands want. `memory_room` decides.
//!
//! ```text
//! load, wake, or start of the fleet
//!   |  the model waits for room; what does the ledger say?
//!   v
//! LedgerRead -- has room ---------------------> load, workers start
//!   ^  |-- others may leave for it --> they become idle --.
//!   |  '-- no room: refused; at the start, it is idle     |
//!   '-----------------------------------------------------'
//! ```

use std::time::{Duration, Instant};

use service::Exit;
use tokio::sync::oneshot;

use super::{ManagedModel, SupervisorLoop};
use crate::commands::DRAIN_GRACE;
use crate::events::SupervisorEvent;
use crate::idle_models::IdleModel;
use crate::memory_room::{DeviceLedger, MemoryClaim, RoomDecision, find_room};
use crate::model_use::in_leaving_order;
use crate::status::{ModelFailure, ModelState};

/// How often the ledger is read again while memory is being released.
const RELEASE_POLL: Duration = Duration::from_millis(100);
/// How long a released model may keep its memory: its workers have exited, and the weight-server
/// hears of that. Then the load begins nevertheless, and the weight-server decides.
const RELEASE_WAIT: Duration = Duration::from_secs(10);
/// A model that requests use gives way to one that is wanted for this long. So models that share
/// too little memory serve in turn, and each serves for a while.
const TURN: Duration = Duration::from_secs(10);

/// A model that is not loaded yet because the memory may lack room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RoomWait {
    /// A request or a command wants the model: others may leave for it. At the start of the fleet
    /// none does.
    pub(super) may_replace: bool,
    since: Instant,
    /// Since when it waits only for memory that is being released.
    releasing_since: Option<Instant>,
}

impl RoomWait {
    pub(super) fn new(may_replace: bool, now: Instant) -> Self {
        Self { may_replace, since: now, releasing_since: None }
    }
}

impl SupervisorLoop {
    /// Reads the ledger for the models that wait for room, after `pause`.
    pub(super) fn request_room(&mut self, pause: Duration) {
        let waits = |model: &ManagedModel| model.room_wait.is_some() && model.unloading.is_none();
        if !self.models.values().any(waits) {
            return;
        }
        let (admin, event_loop) = (self.admin.clone(), self.commands.event_loop.clone());
        let task = tokio::spawn(async move {
            tokio::time::sleep(pause).await;
            let ledger = admin.device_ledger().await;
            // Without an event loop the result is of no use.
            let _: Result<(), _> = event_loop.send(SupervisorEvent::LedgerRead { ledger }).await;
        });
        if let Some(earlier) = self.room_task.replace(task.abort_handle()) {
            earlier.abort();
        }
    }

    pub(super) fn ledger_read(&mut self, ledger: &DeviceLedger) {
        if self.stopping {
            return;
        }
        let now = self.deadlines.advance(Instant::now());
        let waiting = self.models.iter().filter(|(_, model)| model.unloading.is_none());
        let waiting = waiting.filter_map(|(name, model)| Some((model, name.clone(), model.room_wait?)));
        // Models that always stay come first.
        let mut ordered: Vec<(bool, Instant, String)> =
            waiting.map(|(model, name, wait)| (model.spec.idle_unload.is_some(), wait.since, name)).collect();
        ordered.sort_unstable();
        for (_, _, name) in ordered {
            self.place(&name, ledger, now);
        }
    }

    /// Decides about one model that waits for room.
    fn place(&mut self, name: &str, ledger: &DeviceLedger, now: Instant) {
        let Some(model) = self.models.get(name) else { return };
        let Some(wait) = model.room_wait else { return };
        let (new, present) = (self.claim(model), self.present_claims());
        let waited = now.saturating_duration_since(wait.since);
        let unused = if wait.may_replace { self.may_leave_for(name, false, now) } else { Vec::new() };
        let mut decision = find_room(&new, &present, &unused, ledger);
        if wait.may_replace && matches!(decision, RoomDecision::Lacks(_)) {
            let all = self.may_leave_for(name, true, now);
            decision = match find_room(&new, &present, &all, ledger) {
                RoomDecision::Replaces(_) if waited < TURN => return self.request_room(RELEASE_POLL),
                decision => decision,
            };
        }
        match decision {
            RoomDecision::Fits => self.begin_load(name),
            RoomDecision::FitsSoon => self.await_release(name, now),
            RoomDecision::Replaces(leaving) => {
                for other in leaving {
                    tracing::info!(
                        model = other,
                        wanted = name,
                        "becomes idle: another model needs its memory"
                    );
                    // No caller waits for the end.
                    self.unload_model(other, DRAIN_GRACE, true, oneshot::channel().0);
                }
            }
            RoomDecision::Lacks(shortage) => self.no_room(name, &shortage.to_string()),
        }
    }

    fn claim(&self, model: &ManagedModel) -> MemoryClaim {
        MemoryClaim::of(&model.spec, |device| self.workers_on(&model.spec.name, device))
    }

    /// The claims of the models that are in memory or come into it, and do not leave.
    fn present_claims(&self) -> Vec<MemoryClaim> {
        let is_present = |model: &&ManagedModel| {
            model.room_wait.is_none() && model.unloading.is_none() && !model.copies.has_given_up()
        };
        let present = self.models.values().filter(is_present).map(|model| self.claim(model));
        let swapped = self.swap.iter().map(|swap| MemoryClaim::of(&swap.new, |_| 0));
        present.chain(swapped).collect()
    }

    /// The models that may leave for this one, in that order.
    fn may_leave_for(&self, wanted: &str, with_used: bool, now: Instant) -> Vec<String> {
        let drafts_for_it = self.models.get(wanted).and_then(|model| model.spec.draft());
        let may_leave = |(name, model): &(&String, &ManagedModel)| {
            model.spec.idle_unload.is_some()
                && model.room_wait.is_none()
                && model.unloading.is_none()
                && model.copies.state() == ModelState::Ready
                && Some(name.as_str()) != drafts_for_it
                && self.may_become_idle(name)
        };
        let models = self.models.iter().filter(may_leave);
        in_leaving_order(models.map(|(name, model)| (name.as_str(), model.model_use)), with_used, now)
    }

    fn await_release(&mut self, name: &str, now: Instant) {
        let wait = self.models.get_mut(name).and_then(|model| model.room_wait.as_mut());
        let since = wait.map_or(now, |wait| *wait.releasing_since.get_or_insert(now));
        match now.saturating_duration_since(since) < RELEASE_WAIT {
            true => self.request_room(RELEASE_POLL),
            false => self.begin_load(name),
        }
    }

    /// The memory has room: the weights are requested, and the workers start that wait for them.
    pub(super) fn begin_load(&mut self, name: &str) {
        let Some(model) = self.models.get_mut(name) else { return };
        model.room_wait = None;
        model.load(&self.admin, &self.commands);
        let spec = model.spec.clone();
        for device in spec.devices() {
            // At the start of the fleet they run already.
            for _ in self.workers_on(name, device)..spec.workers as usize {
                if let Err(error) = self.start_worker(&spec, device) {
                    return self.load_failed(name, &error.to_string());
                }
            }
        }
    }

    /// At the start of the fleet, a model that may be idle is. Others fail, with two exceptions,
    /// which are loaded nevertheless: the copies of a model on several devices fail alone, and if a
    /// fleet has one model, the weight-server says what would fit.
    fn no_room(&mut self, name: &str, why: &str) {
        let Some(model) = self.models.get(name) else { return };
        let is_at_start = model.room_wait.is_some_and(|wait| !wait.may_replace);
        if is_at_start && model.spec.idle_unload.is_some() {
            tracing::info!(model = name, why, "idle from the start: the memory has no room for it");
            self.remove_workers_on(name, None);
            let Some(model) = self.models.remove(name) else { return };
            let digest = model.copies.digest().unwrap_or_default();
            self.insert_idle(IdleModel::new(model.spec, model.by_command, digest));
        } else if model.spec.copies.len() > 1 || self.models.len() == 1 {
            self.begin_load(name);
        } else {
            self.load_failed(name, why);
        }
    }

    fn load_failed(&mut self, name: &str, why: &str) {
        let Some(model) = self.models.get_mut(name) else { return };
        model.room_wait = None;
        model.abort();
        let devices: Vec<String> = model.spec.devices().map(str::to_owned).collect();
        let failure = ModelFailure { exit: Exit::OutOfResources, text: why.to_owned() };
        for device in devices {
            self.copy_state_changed(name, &device, ModelState::Failed(failure.clone()));
        }
    }
}
