// SPDX-License-Identifier: Apache-2.0

//! Verifies the checksums of generations: those that were adopted on a GPU or returned by a worker
//! without a request, others on a GPU on request.
//!
//! ```text
//! Unverified ------> Verified          checksums equal those in the manifest
//!     |                 |
//!     +-----------------+-----> Quarantined
//! ```
//! A quarantined generation loses its model name, its leases are revoked, and its model is loaded
//! again. An unverified generation serves workers while it waits for its check.

use std::time::Duration;

use memory::numa::is_host_device;

use super::WeightServerState;
use super::loading::context_bytes;
use crate::catalog::{Generation, GenerationIntegrity, GenerationPhase, LoadKey};
use crate::events::{ChangeNotice, VerifyOutcome, VerifyReport, WeightServerAction};
use crate::ids::CallId;
use crate::ledger::{LedgerReservation, ReservationKey};
use crate::refusal::{AttachRefusal, LoadFailure, VerifyFailure};

/// The wait before a check without a request is repeated: memory may become free, or the driver may
/// recover.
const RETRY: Duration = Duration::from_secs(60);

impl WeightServerState {
    pub(super) fn handle_verify_request(&mut self, call: CallId, model: String, device: String) {
        let asked = |g: &&mut Generation| {
            g.model == model
                && g.phase == GenerationPhase::Ready
                && !is_host_device(&g.key.device)
                && (device.is_empty() || g.key.device == device)
        };
        match self.generations.values_mut().rfind(asked) {
            _ if self.shutting_down => self.reply_verify(call, Err(VerifyFailure::ShuttingDown)),
            Some(generation) => {
                generation.verification.calls.push(call);
                generation.verification.not_before = Duration::ZERO;
                self.start_verifiers();
            }
            None => {
                let known = self.list_models();
                self.reply_verify(call, Err(VerifyFailure::UnknownModel { model, device, known }));
            }
        }
    }

    /// Starts every check that is due and whose context fits. If it does not fit, callers get the
    /// error.
    pub(super) fn start_verifiers(&mut self) {
        if self.shutting_down {
            return;
        }
        let due = |g: &&Generation| {
            let wanted = !g.verification.calls.is_empty() || g.integrity == GenerationIntegrity::Unverified;
            let resident = matches!(g.phase, GenerationPhase::Ready | GenerationPhase::Retiring);
            wanted && resident && !g.verification.running && self.now >= g.verification.not_before
        };
        let due: Vec<u64> = self.generations.values().filter(due).map(|g| g.id).collect();
        for id in due {
            let generation = self.generations.get_mut(&id);
            let generation = generation.expect("invariant: a due check belongs to a generation that exists");
            // The verifier's context, and its socket.
            let device = generation.key.device.clone();
            let row = LedgerReservation { bytes: context_bytes(&device), device, fds: 1 };
            match self.ledger.reserve(ReservationKey::Verifying(id), row) {
                Ok(()) => {
                    generation.verification.running = true;
                    self.actions.push(WeightServerAction::StartVerifier { generation: id });
                }
                Err(shortage) => self.fail_verification(id, shortage.into()),
            }
        }
    }

    pub(super) fn handle_verified(&mut self, id: u64, report: VerifyReport) {
        self.ledger.release(ReservationKey::Verifying(id));
        let Some(generation) = self.generations.get_mut(&id) else { return };
        generation.verification.running = false;
        let calls = std::mem::take(&mut generation.verification.calls);
        for call in calls {
            let answer = VerifyOutcome { generation: id, report: report.clone() };
            self.reply_verify(call, Ok(answer));
        }
        if report.damaged_count > 0 {
            return self.quarantine(id);
        }
        let generation = self.generations.get_mut(&id);
        let generation = generation.expect("invariant: replies do not remove a generation");
        generation.integrity = GenerationIntegrity::Verified;
        self.actions.push(WeightServerAction::Publish(ChangeNotice::Generation(id)));
    }

    pub(super) fn fail_verification(&mut self, id: u64, failure: VerifyFailure) {
        self.ledger.release(ReservationKey::Verifying(id));
        let Some(generation) = self.generations.get_mut(&id) else { return };
        generation.verification.running = false;
        generation.verification.not_before = self.now.saturating_add(RETRY);
        for call in std::mem::take(&mut generation.verification.calls) {
            self.reply_verify(call, Err(failure.clone()));
        }
    }

    /// Cancels the check of a generation that is removed, or of a server that shuts down.
    pub(super) fn cancel_verification(&mut self, id: u64, why: &VerifyFailure) {
        let Some(generation) = self.generations.get_mut(&id) else { return };
        let was_running = generation.verification.running;
        if was_running || !generation.verification.calls.is_empty() {
            self.fail_verification(id, why.clone());
        }
        if was_running {
            self.actions.push(WeightServerAction::StopVerifier { generation: id });
        }
    }

    fn quarantine(&mut self, id: u64) {
        let generation = self.generations.get_mut(&id);
        let generation = generation.expect("invariant: only a generation that exists is quarantined");
        generation.integrity = GenerationIntegrity::Quarantined;
        let had_name = generation.phase == GenerationPhase::Ready;
        generation.reload = had_name;
        let (model, key) = (generation.model.clone(), generation.key.clone());
        let readers: Vec<_> =
            self.leases.iter().filter(|l| l.generation == id).filter_map(|l| l.connection()).collect();
        for connection in readers {
            let refusal = AttachRefusal::Quarantined { model: model.clone(), generation: id };
            self.actions.push(WeightServerAction::Refuse { connection, refusal });
        }
        if had_name {
            // If both generations fit, the reload starts at once, so workers that attach again find
            // a load to wait for. Otherwise it starts after this generation is removed.
            let reloading = self.create_generation(Vec::new(), model, key, u64::MAX).is_ok();
            if let Some(generation) = self.generations.get_mut(&id) {
                generation.reload = !reloading;
            }
            self.retire(id);
        } else {
            self.actions.push(WeightServerAction::Publish(ChangeNotice::Generation(id)));
        }
    }

    /// Loads a quarantined model again after its memory is free.
    pub(super) fn reload_model(&mut self, model: String, key: LoadKey) {
        let loading = |g: &Generation| {
            g.model == model && g.key.device == key.device && g.phase != GenerationPhase::Retiring
        };
        if self.shutting_down || self.generations.values().any(loading) {
            return;
        }
        let reload = self.create_generation(Vec::new(), model.clone(), key, u64::MAX);
        self.actions.extend(
            reload
                .err()
                .map(|failure: LoadFailure| WeightServerAction::ReportReloadFailure { model, failure }),
        );
    }

    fn reply_verify(&mut self, call: CallId, result: Result<VerifyOutcome, VerifyFailure>) {
        self.actions.push(WeightServerAction::ReplyVerify { call, result });
    }
}
