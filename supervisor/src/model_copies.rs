// SPDX-License-Identifier: Apache-2.0

//! The copies of one model: the state of each, what follows for the model, and what the event loop
//! has to do. A plain value: events in, at most one action out.
//!
//! ```text
//! model m  --  copy on GPU-a: Ready    workers 0, 1
//!          \-  copy on GPU-b: Failed   no workers, the load is repeated
//! ```
//! Invariants:
//! 1. All copies that this weight-server has confirmed have one digest.
//! 2. The workers of a copy that was never ready leave when its load fails, and no others do.
//! 3. If every copy has failed and none was ever ready, the model has failed: no load is repeated.

use bytes::Bytes;
use service::Exit;

use crate::status::{CopyStatus, ModelFailure, ModelState};

#[derive(Clone, Debug)]
struct ModelCopy {
    device: String,
    state: ModelState,
    /// Digest of the resident weights. A weight-server that restarts has to hold these, whatever
    /// has become of the file.
    digest: Option<Bytes>,
    /// The weight-server that runs now has told the digest.
    is_confirmed: bool,
    /// The copy was ready before: its workers stay, and a failed load is repeated for ever.
    was_served: bool,
    /// Its workers have left because its load failed.
    lacks_workers: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CopyAction {
    /// The copy could not be loaded: its workers leave.
    RemoveWorkers,
    /// No copy can be loaded: all workers of the model leave, and no load is repeated.
    GiveUp,
    /// The copy has come after its workers have left.
    StartWorkers,
    /// The copy has other content than the others: it is unloaded and loaded again later. If it
    /// lacks workers, those that it has leave.
    Reject,
}

#[derive(Clone, Debug)]
pub(crate) struct ModelCopies {
    copies: Vec<ModelCopy>,
}

impl ModelCopy {
    fn loading(device: &str) -> Self {
        Self {
            device: device.to_owned(),
            state: ModelState::Loading { done_bytes: 0, total_bytes: 0 },
            digest: None,
            is_confirmed: false,
            was_served: false,
            lacks_workers: false,
        }
    }
}

impl ModelCopies {
    /// Copies on these devices that are being loaded.
    pub(crate) fn loading<'a>(devices: impl Iterator<Item = &'a str>) -> Self {
        Self { copies: devices.map(ModelCopy::loading).collect() }
    }

    /// One more copy, which is being loaded. Its workers start when it is ready.
    pub(crate) fn add(&mut self, device: &str) {
        self.copies.push(ModelCopy { lacks_workers: true, ..ModelCopy::loading(device) });
    }

    /// The model leaves the device.
    pub(crate) fn remove(&mut self, device: &str) {
        self.copies.retain(|copy| copy.device != device);
    }

    /// Copies that are resident with this digest.
    pub(crate) fn ready<'a>(devices: impl Iterator<Item = &'a str>, digest: &Bytes) -> Self {
        let mut copies = Self::loading(devices);
        for copy in &mut copies.copies {
            (copy.state, copy.digest) = (ModelState::Ready, Some(digest.clone()));
            (copy.is_confirmed, copy.was_served) = (true, true);
        }
        copies
    }

    /// The fleet of a dead supervisor goes on. The copies that have workers count as served. If
    /// none has, all do, since their workers may have died with the supervisor.
    pub(crate) fn set_served(&mut self, has_workers: impl Fn(&str) -> bool) {
        let any = self.copies.iter().any(|copy| has_workers(&copy.device));
        for copy in &mut self.copies {
            copy.was_served = !any || has_workers(&copy.device);
        }
    }

    /// A copy was ready before, perhaps in the fleet of a dead supervisor.
    pub(crate) fn was_served(&self) -> bool {
        self.copies.iter().any(|copy| copy.was_served)
    }

    /// The load of the copy has failed.
    pub(crate) fn has_failed_on(&self, device: &str) -> bool {
        self.find(device).is_some_and(|copy| matches!(copy.state, ModelState::Failed(_)))
    }

    /// Every copy has failed and none was ever ready.
    pub(crate) fn has_given_up(&self) -> bool {
        let is_lost = |copy: &ModelCopy| matches!(copy.state, ModelState::Failed(_)) && !copy.was_served;
        self.copies.iter().all(is_lost)
    }

    /// Whether the workers of the copy start only when its load succeeds.
    pub(crate) fn lacks_workers(&self, device: &str) -> bool {
        self.find(device).is_some_and(|copy| copy.lacks_workers)
    }

    /// Another weight-server runs: what it holds is not known yet.
    pub(crate) fn forget_confirmations(&mut self) {
        self.copies.iter_mut().for_each(|copy| copy.is_confirmed = false);
    }

    /// Whether a load that fails on the device is repeated.
    pub(crate) fn repeats_load(&self, device: &str) -> bool {
        self.copies.len() > 1 || self.find(device).is_some_and(|copy| copy.was_served)
    }

    /// The digest that the copy is known to have.
    pub(crate) fn digest_on(&self, device: &str) -> Option<Bytes> {
        self.find(device).and_then(|copy| copy.digest.clone())
    }

    /// The digest of the model: that of a copy that is ready, else one that was.
    pub(crate) fn digest(&self) -> Option<Bytes> {
        let ready = self.copies.iter().find(|copy| copy.is_confirmed && copy.state == ModelState::Ready);
        ready.or(self.copies.iter().find(|copy| copy.digest.is_some())).and_then(|copy| copy.digest.clone())
    }

    /// A load advances or has failed.
    pub(crate) fn set_state(&mut self, device: &str, state: ModelState) -> Option<CopyAction> {
        let has_failed = matches!(state, ModelState::Failed(_));
        let copy = self.find_mut(device)?;
        copy.state = state;
        copy.is_confirmed &= !has_failed;
        if !has_failed || copy.was_served {
            return None;
        }
        copy.lacks_workers = true;
        Some(if self.has_given_up() { CopyAction::GiveUp } else { CopyAction::RemoveWorkers })
    }

    /// The device of the copy is quarantined: its workers leave, and the copy is unloaded until the
    /// device is in service again.
    pub(crate) fn set_quarantined(&mut self, device: &str, failure: ModelFailure) {
        if let Some(copy) = self.find_mut(device) {
            copy.state = ModelState::Failed(failure);
            (copy.is_confirmed, copy.lacks_workers) = (false, true);
        }
    }

    /// The copy is resident.
    pub(crate) fn set_loaded(&mut self, device: &str, digest: Bytes) -> Option<CopyAction> {
        let differs = |other: &&ModelCopy| {
            other.is_confirmed && other.device != device && other.digest.as_ref() != Some(&digest)
        };
        let other = self.copies.iter().find(differs).map(|other| other.device.clone());
        let copy = self.find_mut(device)?;
        if let Some(other) = other {
            let text = format!(
                "the file has other content than the copy on {other}, which goes on: swap or reload the model"
            );
            copy.state = ModelState::Failed(ModelFailure { exit: Exit::ModelRefused, text });
            (copy.digest, copy.is_confirmed) = (None, false);
            // Workers of a copy that was served hold the content that is wanted.
            copy.lacks_workers |= !copy.was_served;
            return Some(CopyAction::Reject);
        }
        (copy.state, copy.digest) = (ModelState::Ready, Some(digest));
        (copy.is_confirmed, copy.was_served) = (true, true);
        let starts = std::mem::take(&mut copy.lacks_workers);
        starts.then_some(CopyAction::StartWorkers)
    }

    /// The state of the model. It serves while one copy is ready.
    pub(crate) fn state(&self) -> ModelState {
        let states = || self.copies.iter().map(|copy| &copy.state);
        let (mut done, mut total) = (0, 0);
        let mut is_loading = false;
        for state in states() {
            if let ModelState::Loading { done_bytes, total_bytes } = state {
                (done, total, is_loading) = (done + done_bytes, total + total_bytes, true);
            }
        }
        let is_ready = states().any(|state| *state == ModelState::Ready);
        match (is_ready, is_loading) {
            (true, false) => ModelState::Ready,
            // A copy that comes back beside others that serve does not make the model wait.
            (true, true) if self.is_settled() => ModelState::Ready,
            (_, true) => ModelState::Loading { done_bytes: done, total_bytes: total },
            (false, false) => states().next().cloned().unwrap_or(ModelState::Ready),
        }
    }

    /// Every copy that loads now was ready, or has failed, before.
    fn is_settled(&self) -> bool {
        let is_first = |copy: &ModelCopy| {
            matches!(copy.state, ModelState::Loading { .. }) && !copy.was_served && !copy.lacks_workers
        };
        !self.copies.iter().any(is_first)
    }

    /// The device for one more worker: where the model has the fewest, a copy that has not failed
    /// before one that has, then the first.
    pub(crate) fn device_for_worker(&self, workers_on: impl Fn(&str) -> usize) -> Option<String> {
        let has_failed = |copy: &ModelCopy| matches!(copy.state, ModelState::Failed(_));
        let order = |copy: &&ModelCopy| (has_failed(copy), workers_on(&copy.device));
        self.copies.iter().min_by_key(order).map(|copy| copy.device.clone())
    }

    /// `weights` returns the name of the weights on a device.
    pub(crate) fn status(&self, weights: impl Fn(&str) -> String) -> Vec<CopyStatus> {
        let status = |copy: &ModelCopy| CopyStatus {
            device: copy.device.clone(),
            weights: weights(&copy.device),
            state: copy.state.clone(),
        };
        self.copies.iter().map(status).collect()
    }

    fn find(&self, device: &str) -> Option<&ModelCopy> {
        self.copies.iter().find(|copy| copy.device == device)
    }

    fn find_mut(&mut self, device: &str) -> Option<&mut ModelCopy> {
        self.copies.iter_mut().find(|copy| copy.device == device)
    }
}

#[cfg(test)]
mod tests;
