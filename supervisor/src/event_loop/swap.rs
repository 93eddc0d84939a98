// SPDX-License-Identifier: Apache-2.0

//! Carries out the actions of [`ModelSwap`]: the file of a model is replaced while it serves.
//!
//! [`ModelSwap`]: crate::model_swap::ModelSwap

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use service::Exit;
use tokio::task::AbortHandle;

use super::copies::copy_load;
use super::{ManagedModel, SupervisedChild, SupervisorLoop, answer};
use crate::commands::{CommandError, CommandReply};
use crate::events::SupervisorEvent;
use crate::model_copies::ModelCopies;
use crate::model_swap::{ModelSwap, SwapAction, SwapEvent};
use crate::resident_models::WeightsOnDevice;
use crate::router_join;
use crate::spec::{ModelSpec, WorkerSlot};
use crate::status::{FleetEvent, ModelFailure, ModelState};

/// The swap that runs.
pub(super) struct RunningSwap {
    /// Tells late events of an earlier swap apart.
    number: u64,
    machine: ModelSwap,
    /// What the model had before, and what it is to have.
    pub(super) old: ModelSpec,
    pub(super) new: ModelSpec,
    old_digest: Option<Bytes>,
    /// Workers of the new file on each device; as many as the model had.
    workers_on: Vec<(String, usize)>,
    /// How long requests of the old file may go on.
    grace: Duration,
    task: Option<AbortHandle>,
    /// Gets the path that the configuration still names, if that is another one.
    reply: Option<CommandReply<Option<PathBuf>>>,
}

impl RunningSwap {
    fn workers(&self) -> usize {
        self.workers_on.iter().map(|(_, workers)| workers).sum()
    }

    fn is_new_worker(&self, slot: &WorkerSlot) -> bool {
        slot.model == self.new.name && self.new.weights_on(&slot.device) == Some(&slot.weights)
    }

    fn is_old_worker(&self, slot: &WorkerSlot) -> bool {
        slot.model == self.old.name && self.old.weights_on(&slot.device) == Some(&slot.weights)
    }
}

impl SupervisorLoop {
    pub(super) fn swap_model(
        &mut self,
        mut new: ModelSpec,
        grace: Duration,
        reply: CommandReply<Option<PathBuf>>,
    ) {
        let old = match self.check_swap(&new) {
            Ok(old) => old,
            Err(error) => return answer(reply, Err(error)),
        };
        self.name_weights(&mut new);
        new.workers = old.workers;
        self.last_swap += 1;
        tracing::info!(model = new.name, from = %old.path.display(), to = %new.path.display(), "swap begins");
        let loads = new.devices().map(|device| copy_load(&new, device)).collect();
        let workers_on =
            new.devices().map(|device| (device.to_owned(), self.workers_on(&old.name, device))).collect();
        let admin = self.admin.clone();
        self.swap = Some(RunningSwap {
            number: self.last_swap,
            machine: ModelSwap::begin(),
            old_digest: self.models.get(&old.name).and_then(|model| model.copies.digest()),
            workers_on,
            old,
            new,
            grace,
            task: None,
            reply: Some(reply),
        });
        self.await_swap(async move {
            match admin.load_all_once(loads).await {
                Ok(digest) => SwapEvent::Loaded { digest },
                Err(failure) => SwapEvent::Failed { failure },
            }
        });
    }

    /// The specification that the swap replaces, or why it cannot.
    fn check_swap(&self, new: &ModelSpec) -> Result<ModelSpec, CommandError> {
        self.check_not_stopping()?;
        self.check_no_swap()?;
        self.check_not_idle(&new.name)?;
        let name = || new.name.clone();
        let Some(model) = self.models.get(&new.name) else {
            return Err(CommandError::UnknownModel { name: name() });
        };
        let refused = |why: String| Err(CommandError::SwapRefused { name: name(), why });
        if !model.spec.devices().all(|device| new.copy_on(device).is_some())
            || new.copies.len() != model.spec.copies.len()
        {
            let devices = model.spec.devices().collect::<Vec<_>>().join(", ");
            return refused(format!("it is on {devices}, and its new file has to be there too"));
        }
        if model.unloading.is_some() || model.copies.state() != ModelState::Ready {
            return refused("it is not loaded, or is being unloaded".to_owned());
        }
        new.devices().try_for_each(|device| self.check_in_service(device))?;
        let drafts_for = |other: &&ManagedModel| other.spec.draft() == Some(new.name.as_str());
        if let Some(other) = self.models.values().find(drafts_for) {
            return refused(format!("it drafts for {:?}, whose workers hold it", other.spec.name));
        }
        if model.spec.has_same_copy(new) {
            return refused(format!("it already serves {}", new.path.display()));
        }
        let workers = u32::try_from(self.workers_of(&new.name).len()).unwrap_or(u32::MAX);
        self.check_worker_count(workers)?;
        Ok(model.spec.clone())
    }

    pub(super) fn check_no_swap(&self) -> Result<(), CommandError> {
        match &self.swap {
            Some(swap) => Err(CommandError::SwapRuns { name: swap.new.name.clone() }),
            None => Ok(()),
        }
    }

    /// Commands that change the workers or weights of a model wait for its swap.
    pub(super) fn check_not_swapped(&self, model: &str) -> Result<(), CommandError> {
        match self.swap.as_ref().is_some_and(|swap| swap.new.name == model) {
            true => self.check_no_swap(),
            false => Ok(()),
        }
    }

    /// Applies the result of `work` to the swap that runs now.
    fn await_swap(&mut self, work: impl Future<Output = SwapEvent> + Send + 'static) {
        let Some(swap) = &mut self.swap else { return };
        let (number, event_loop) = (swap.number, self.commands.event_loop.clone());
        let task = tokio::spawn(async move {
            let event = work.await;
            // Without an event loop the result is of no use.
            let _: Result<(), _> = event_loop.send(SupervisorEvent::SwapAdvanced { number, event }).await;
        });
        if let Some(earlier) = swap.task.replace(task.abort_handle()) {
            earlier.abort();
        }
    }

    pub(super) fn swap_advanced(&mut self, number: u64, event: SwapEvent) {
        let Some(swap) = self.swap.as_mut().filter(|swap| swap.number == number) else { return };
        let Some(action) = swap.machine.handle(event) else { return };
        match action {
            SwapAction::StartWorkers => self.start_swapped_workers(),
            SwapAction::Commit { digest } => self.commit_swap(digest),
            SwapAction::DrainOldWorkers => {
                let (old, grace) = (swap.old.clone(), swap.grace);
                for worker in self.workers_with(&old) {
                    self.remove_drained(&worker, grace, None);
                }
            }
            SwapAction::RemoveNewWorkers => {
                let new = swap.new.clone();
                // The router has sent them no request.
                for worker in self.workers_with(&new) {
                    self.remove_worker(&worker);
                }
            }
            SwapAction::UnloadOld => {
                let old = swap.old.clone();
                let unused = self.unused_copies(&old, None);
                self.unload_swapped(unused);
            }
            SwapAction::UnloadNew => {
                let new = swap.new.clone();
                let unused = self.unused_copies(&new, None);
                self.unload_swapped(unused);
            }
            SwapAction::Finish { outcome } => self.finish_swap(outcome),
        }
        self.notice_gone_workers();
    }

    fn start_swapped_workers(&mut self) {
        let Some(swap) = &self.swap else { return };
        let (new, workers, number) = (swap.new.clone(), swap.workers(), swap.number);
        let workers_on = swap.workers_on.clone();
        let Some(digest) = swap.machine.joining().cloned() else { return };
        // The same content under another path: workers of both files count as one model.
        let also = if swap.old_digest.as_ref() == Some(&digest) { workers } else { 0 };
        let devices = workers_on.iter().flat_map(|(device, workers)| std::iter::repeat_n(device, *workers));
        for device in devices {
            if let Err(error) = self.start_worker(&new, device) {
                let failure = ModelFailure { exit: Exit::OutOfResources, text: error.to_string() };
                return self.swap_advanced(number, SwapEvent::Failed { failure });
            }
        }
        let router = self.directory.directory().router_socket();
        self.await_swap(async move {
            match router_join::wait_until_serves(&router, &new.name, &digest, workers + also).await {
                true => SwapEvent::Joined,
                false => SwapEvent::Failed {
                    failure: ModelFailure {
                        exit: Exit::PeerLost,
                        text: "the router does not use the new workers: `ballast ps` shows why".to_owned(),
                    },
                },
            }
        });
    }

    fn commit_swap(&mut self, digest: Bytes) {
        let Some(swap) = &self.swap else { return };
        let (new, grace, has_workers) = (swap.new.clone(), swap.grace, swap.workers() > 0);
        let is_other = swap.old_digest.as_ref() != Some(&digest);
        let Some(model) = self.models.get_mut(&new.name) else { return };
        model.abort();
        let configured = model.spec.configured_path.clone();
        model.spec = ModelSpec { configured_path: configured, workers: model.spec.workers, ..new.clone() };
        model.copies = ModelCopies::ready(new.devices(), &digest);
        let status = model.status();
        self.record_models();
        self.publish(FleetEvent::Model(status));
        tracing::info!(model = new.name, file = %new.path.display(), "swap: new requests go to the new file");
        let router = self.directory.directory().router_socket();
        self.await_swap(async move {
            if has_workers && is_other {
                router_join::wait_until_moved(&router, &new.name, &digest, grace).await;
            }
            SwapEvent::Moved
        });
    }

    fn unload_swapped(&mut self, unused: Vec<WeightsOnDevice>) {
        let admin = self.admin.clone();
        self.await_swap(async move {
            if let Err(status) = admin.unload_all(unused).await {
                tracing::error!(%status, "cannot unload the weights of a swap");
            }
            SwapEvent::Unloaded
        });
    }

    fn finish_swap(&mut self, outcome: Result<(), ModelFailure>) {
        let Some(mut swap) = self.swap.take() else { return };
        let name = swap.new.name.clone();
        let outcome = match outcome {
            Ok(()) => {
                tracing::info!(model = name, "swap is complete");
                let configured = self.models.get(&name).map(|model| model.spec.configured_path.clone());
                Ok(configured.filter(|path| !path.as_os_str().is_empty() && *path != swap.new.path))
            }
            Err(failure) => {
                tracing::error!(model = name, why = failure.text, "swap failed: the old file goes on");
                Err(CommandError::SwapFailed { old: swap.old.path.clone(), failure })
            }
        };
        if let Some(reply) = swap.reply.take() {
            answer(reply, outcome);
        }
    }

    fn workers_with(&self, spec: &ModelSpec) -> Vec<Arc<str>> {
        let serves = |child: &SupervisedChild| {
            let slot = child.slot.as_ref();
            slot.is_some_and(|slot| {
                slot.model == spec.name && spec.weights_on(&slot.device) == Some(&slot.weights)
            })
        };
        self.children.iter().filter(|(_, child)| serves(child)).map(|(name, _)| name.clone()).collect()
    }

    /// The workers that a swap removes may have gone, or a new one that it needs.
    pub(super) fn notice_gone_workers(&mut self) {
        let Some(swap) = &self.swap else { return };
        let (number, machine) = (swap.number, &swap.machine);
        let left = |is_meant: &dyn Fn(&WorkerSlot) -> bool| {
            self.children.values().filter(|child| child.slot.as_ref().is_some_and(is_meant)).count()
        };
        let new = left(&|slot| swap.is_new_worker(slot));
        let event = if machine.is_draining() && left(&|slot| swap.is_old_worker(slot)) == 0
            || machine.is_undoing() && new == 0
        {
            SwapEvent::WorkersGone
        } else if machine.joining().is_some() && new < swap.workers() {
            let text = "a worker of the new file was removed".to_owned();
            SwapEvent::Failed { failure: ModelFailure { exit: Exit::PeerLost, text } }
        } else {
            return;
        };
        self.swap_advanced(number, event);
    }

    /// A worker has crashed twice in a row, or with an error that a restart does not cure.
    /// A device is quarantined. Before the new file serves, the old one goes on elsewhere.
    pub(super) fn fail_swap_on(&mut self, device: &str, failure: &ModelFailure) {
        let is_here = |swap: &&RunningSwap| swap.new.copy_on(device).is_some();
        if let Some(number) = self.swap.as_ref().filter(is_here).map(|swap| swap.number) {
            self.swap_advanced(number, SwapEvent::Failed { failure: failure.clone() });
        }
    }

    pub(super) fn swapped_worker_failed(&mut self, name: &Arc<str>) {
        let Some((child, swap)) = self.children.get(name).zip(self.swap.as_ref()) else { return };
        if !child.slot.as_ref().is_some_and(|slot| swap.is_new_worker(slot)) {
            return;
        }
        let end = child.last_termination.as_ref();
        let failure = ModelFailure {
            exit: end.and_then(|end| end.exit()).unwrap_or(Exit::PeerLost),
            text: match end {
                Some(end) => format!("{name} of the new file does not start: {end}"),
                None => format!("{name} of the new file does not start"),
            },
        };
        let number = swap.number;
        self.swap_advanced(number, SwapEvent::Failed { failure });
    }
}
