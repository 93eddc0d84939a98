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
/// The same for a model that waits for its turn.
const TURN_POLL: Duration = Duration::from_millis(500);
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

/// Which models may leave for another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LeavingModels {
    /// Those that no request uses now.
    Unused,
    /// Those that requests use too.
    Used,
    /// Those too that cannot leave yet: they load, a swap runs, or they draft for others.
    Later,
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

    pub(super) fn ledger_read(&mut self, mut ledger: DeviceLedger) {
        if self.stopping {
            return;
        }
        ledger.add_unknown(&self.spec.devices);
        let now = self.deadlines.advance(Instant::now());
        let waiting = self.models.iter().filter(|(_, model)| model.unloading.is_none());
        let waiting = waiting.filter_map(|(name, model)| Some((model, name.clone(), model.room_wait?)));
        // Models that always stay come first.
        let mut ordered: Vec<(bool, Instant, String)> =
            waiting.map(|(model, name, wait)| (model.spec.idle_unload.is_some(), wait.since, name)).collect();
        ordered.sort_unstable();
        // What leaves for an earlier model is not there for a later one.
        let mut promised = Vec::new();
        for (_, _, name) in ordered {
            promised.extend(self.place(&name, &ledger, &promised, now));
        }
    }

    /// Decides about one model that waits for room. Returns its claim if memory is being released
    /// for it.
    fn place(
        &mut self,
        name: &str,
        ledger: &DeviceLedger,
        promised: &[MemoryClaim],
        now: Instant,
    ) -> Option<MemoryClaim> {
        let model = self.models.get(name)?;
        let wait = model.room_wait?;
        let new = self.claim(model);
        let present = [self.present_claims(), promised.to_vec()].concat();
        let without = |leaving: &[String]| find_room(&new, &present, leaving, ledger);
        let mut decision = without(&[]);
        if wait.may_replace && matches!(decision, RoomDecision::Lacks(_)) {
            let may_turn = now.saturating_duration_since(wait.since) >= TURN;
            decision = without(&self.may_leave_for(name, LeavingModels::Unused, now));
            if matches!(decision, RoomDecision::Lacks(_)) && may_turn {
                decision = without(&self.may_leave_for(name, LeavingModels::Used, now));
            }
            let later = || without(&self.may_leave_for(name, LeavingModels::Later, now));
            if matches!(decision, RoomDecision::Lacks(_)) && matches!(later(), RoomDecision::Replaces(_)) {
                self.set_releasing(name, None);
                self.request_room(TURN_POLL);
                return None;
            }
        }
        if decision != RoomDecision::FitsSoon {
            self.set_releasing(name, None);
        }
        match decision {
            RoomDecision::Fits => self.begin_load(name),
            RoomDecision::FitsSoon => {
                self.await_release(name, ledger, now);
                return Some(new);
            }
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
                return Some(new);
            }
            RoomDecision::Lacks(shortage) => self.no_room(name, &shortage.to_string()),
        }
        None
    }

    fn set_releasing(&mut self, name: &str, since: Option<Instant>) {
        if let Some(wait) = self.models.get_mut(name).and_then(|model| model.room_wait.as_mut()) {
            wait.releasing_since = since;
        }
    }

    /// A copy that cannot be loaded and has no workers holds nothing.
    fn claim(&self, model: &ManagedModel) -> MemoryClaim {
        let name = &model.spec.name;
        let workers_on =
            |device: &str| match (self.workers_on(name, device), model.copies.has_failed_on(device)) {
                (0, true) => None,
                (workers, _) => Some(workers),
            };
        MemoryClaim::of(&model.spec, workers_on)
    }

    /// The claims of the models that are in memory or come into it, and do not leave.
    fn present_claims(&self) -> Vec<MemoryClaim> {
        let is_present = |model: &&ManagedModel| {
            model.room_wait.is_none() && model.unloading.is_none() && !model.copies.has_given_up()
        };
        let present = self.models.values().filter(is_present).map(|model| self.claim(model));
        let swapped = self.swap.iter().map(|swap| MemoryClaim::of(&swap.new, |_| Some(0)));
        present.chain(swapped).collect()
    }

    /// The models that may leave for this one, in that order.
    fn may_leave_for(&self, wanted: &str, which: LeavingModels, now: Instant) -> Vec<String> {
        let drafts_for_it = self.models.get(wanted).and_then(|model| model.spec.draft());
        let may_leave = |(name, model): &(&String, &ManagedModel)| {
            let can_leave = || model.copies.state() == ModelState::Ready && self.may_become_idle(name);
            model.spec.idle_unload.is_some()
                && model.room_wait.is_none()
                && model.unloading.is_none()
                && name.as_str() != wanted
                && Some(name.as_str()) != drafts_for_it
                && (which == LeavingModels::Later || can_leave())
        };
        let models = self.models.iter().filter(may_leave);
        let uses = models.map(|(name, model)| (name.as_str(), model.model_use));
        in_leaving_order(uses, which != LeavingModels::Unused, now)
    }

    /// While streams of a leaving model finish, its end is waited for. Then the memory is free in a
    /// moment.
    fn await_release(&mut self, name: &str, ledger: &DeviceLedger, now: Instant) {
        let Some(spec) = self.models.get(name).map(|model| &model.spec) else { return };
        let is_beside = |other: &&ManagedModel| {
            other.spec.devices().any(|device| spec.devices().any(|own| ledger.share_memory(own, device)))
        };
        if self.models.values().filter(is_beside).any(|model| model.unloading.is_some()) {
            // `model_unloaded` looks again.
            return self.set_releasing(name, None);
        }
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
        let spec = model.spec.clone();
        self.load_copies(name);
        // All its devices are quarantined, and it is idle again.
        if !self.models.contains_key(name) {
            return;
        }
        // The workers ask for the weights of the draft model too.
        if let Some(draft) = self.draft_in_fleet(&spec)
            && let Err(error) = self.wake(&draft, false)
        {
            tracing::error!(model = name, draft, %error, "cannot wake the model that drafts for another one");
        }
        let is_usable = |device: &&str| self.health.reason(device).is_none();
        let devices: Vec<String> = spec.devices().filter(is_usable).map(str::to_owned).collect();
        for device in &devices {
            // At the start of the fleet they run already.
            for _ in self.workers_on(name, device)..spec.workers as usize {
                if let Err(error) = self.start_worker(&spec, device) {
                    return self.load_failed(name, &error.to_string());
                }
            }
        }
    }

    /// At the start of the fleet, a model that may be idle is. Others fail, with some exceptions,
    /// which are loaded nevertheless: a model that was served before is tried for ever, the copies
    /// of a model on several devices fail alone, and if a fleet has one model, the weight-server
    /// says what would fit.
    fn no_room(&mut self, name: &str, why: &str) {
        let Some(model) = self.models.get(name) else { return };
        let is_at_start = model.room_wait.is_some_and(|wait| !wait.may_replace);
        let may_be_idle = model.spec.idle_unload.is_some() && self.check_not_drafting(name).is_ok();
        let is_only_one = self.models.len() == 1 && !model.is_waking;
        if is_at_start && may_be_idle {
            tracing::info!(model = name, why, "idle from the start: the memory has no room for it");
            self.remove_workers_on(name, None);
            let Some(model) = self.models.remove(name) else { return };
            let digest = model.copies.digest().unwrap_or_default();
            self.insert_idle(IdleModel::new(model.spec, model.by_command, digest));
        } else if is_only_one || model.spec.copies.len() > 1 || model.copies.was_served() {
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
