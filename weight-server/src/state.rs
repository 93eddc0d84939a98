// SPDX-License-Identifier: Apache-2.0

//! The state machine of the weight-server. It takes events and returns actions, without I/O, clock
//! or lock. `event_loop` owns the one instance and executes the actions.
//!
//! It decides what is loaded, which workers may attach, what is reserved, and when leases end.
//!
//! ```text
//! events                             module and its table            actions
//! DeviceAdded                    --> added_devices.rs, ledger.rs
//! LoadRequested, UnloadRequested --> loading.rs, copying.rs,     --> StartLoader, Proceed,
//! LoadPlanned, LoadProgressed,         catalog.rs                    ProceedCopying, StopLoader,
//! LoadHandedOver, LoadFailed,            | Queued ... Retiring       ReplyLoad, StoreGeneration,
//! LoaderEnded, GenerationStored          |                           RemoveGeneration
//!                                        v
//!                                    ledger.rs (reservations)
//!                                        ^
//! AttachRequested, LeaseStored   --> leasing.rs, lease_table.rs  --> StoreLease, Deliver,
//! Delivered, Detached,                   ^ Storing ... Orphaned      Reclaimed, Refuse, Close,
//! ReclaimRequested,                      |                           RemoveLease
//! ConnectionEnded, ProcessEnded          |
//!                                        |
//! GenerationReturned,            --> returning.rs                --> RequestReturn
//! AwaitedProcessEnded                    |
//!                                        |
//! VerifyRequested, Verified      --> verifying.rs                --> StartVerifier, StopVerifier,
//! VerifyFailed, Tick                       Unverified ...            ReplyVerify
//!                                          Quarantined
//! ```
//! `catalog` draws the phases of a generation, `lease_table` those of a lease, `verifying` those of
//! an integrity check.
//!
//! Invariants, which the tests check after every random event:
//! 1. Every generation, lease, running verifier and running copy has exactly one reservation.
//! 2. A device has at most one loader.
//! 3. The generation of a lease exists.
//! 4. No model name resolves to a quarantined generation.
//! 5. The source of a running copy exists. A load waits only for a loader that works.

mod added_devices;
mod copying;
mod ending_loaders;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod invariants;
mod leasing;
mod loading;
mod returning;
mod verifying;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use handoff::lease_record::LeaseRecord;
use memory::numa::is_host_device;

use crate::catalog::{BytesSource, Generation, GenerationIntegrity, GenerationPhase, VerificationState};
use crate::events::{AdoptedGeneration, ChangeNotice, WeightServerAction, WeightServerEvent};
use crate::lease_table::{LeaseEntry, LeasePhase, LeaseTable, WorkerProcess};
use crate::ledger::{Ledger, ReservationKey};
use crate::refusal::{LoadFailure, VerifyFailure};
use crate::state::ending_loaders::EndingLoaders;
use crate::state::returning::GenerationReturns;
use crate::tokens::{TokenDigest, TokenError, TokenRegistry};

/// A disk that delivers nothing for this long is unlikely to recover.
pub const PROGRESS_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a lease waits for its worker after the connection ended, before it counts as orphaned.
/// Workers retry every second.
pub const RECLAIM_TIMEOUT: Duration = Duration::from_secs(30);

/// How long new leases wait for workers whose reservations are not known. A worker that runs claims
/// its leases within two seconds. One that is stopped delays others no longer than this, which is
/// less than the 30 s for which a worker repeats its attach request.
pub const UNKNOWN_RESERVATIONS_WAIT: Duration = Duration::from_secs(10);

/// Loads that run or wait. Each is a model of gigabytes.
pub const MAX_PENDING_LOADS: usize = 64;

/// Leases and waiting attaches; above any fleet on one machine.
pub const MAX_CLIENTS: usize = 4096;

/// A worker holds one lease per model that it uses (target, draft, adapters).
pub const MAX_LEASES_PER_PROCESS: usize = 64;

/// Limits that do not change while the process lives.
#[derive(Debug)]
pub struct WeightServerLimits {
    pub device_bytes: BTreeMap<String, u64>,
    /// The GPUs whose memory is the host's. They have no entry in `device_bytes`.
    pub unified_devices: BTreeSet<String>,
    pub fds: u64,
    pub uids: BTreeSet<u32>,
    /// The host's capacity is the memory that was available at the start. What is returned later
    /// was in use then.
    pub host_capacity_is_measured: bool,
    /// A supervisor runs, which registers the token of every worker.
    pub tokens_required: bool,
}

/// What is left of earlier incarnations.
#[derive(Debug, Default)]
pub struct InheritedState {
    pub generations: Vec<AdoptedGeneration>,
    pub leases: Vec<LeaseRecord>,
    /// Living workers without a lease here, which may hold generations of an incarnation whose
    /// descriptors were lost.
    pub awaited: Vec<WorkerProcess>,
    /// The first number of new generations and leases, above those that awaited workers may name.
    pub first_id: u64,
}

#[derive(Debug)]
pub struct WeightServerState {
    generations: BTreeMap<u64, Generation>,
    ending_loaders: EndingLoaders,
    leases: LeaseTable,
    ledger: Ledger,
    tokens: TokenRegistry,
    uids: BTreeSet<u32>,
    returns: GenerationReturns,
    host_capacity_is_measured: bool,
    next_generation: u64,
    next_lease: u64,
    shutting_down: bool,
    /// The time of the current event.
    now: Duration,
    actions: Vec<WeightServerAction>,
}

impl WeightServerState {
    /// Starts with what was inherited. Actions that follow from it come with the first event.
    pub fn new(limits: WeightServerLimits, inherited: InheritedState, now: Duration) -> Self {
        let InheritedState { generations, leases, awaited, first_id } = inherited;
        let mut state = Self {
            generations: BTreeMap::new(),
            ending_loaders: EndingLoaders::default(),
            leases: LeaseTable::default(),
            ledger: Ledger::new(limits.device_bytes, limits.unified_devices, limits.fds),
            tokens: TokenRegistry::default(),
            uids: limits.uids,
            host_capacity_is_measured: limits.host_capacity_is_measured,
            returns: GenerationReturns::awaiting(&awaited, now),
            next_generation: first_id.max(1),
            next_lease: first_id.max(1),
            shutting_down: false,
            now,
            actions: Vec::new(),
        };
        if limits.tokens_required {
            state.tokens.expect();
        }
        for adopted in generations {
            state.adopt_generation(adopted);
        }
        for record in leases {
            state.adopt_lease(record);
        }
        state.retire_replaced_generations();
        let ids: Vec<u64> = state.generations.keys().copied().collect();
        for id in ids {
            state.drop_if_unused(id);
        }
        state
    }

    fn adopt_generation(&mut self, adopted: AdoptedGeneration) {
        let AdoptedGeneration { id, model, key, contents, retired } = adopted;
        self.next_generation = self.next_generation.max(id + 1);
        self.ledger.reserve_unchecked(ReservationKey::Weights(id), contents.reservation(&key.device));
        // The kernel's seals protect host memory.
        let integrity = if is_host_device(&key.device) {
            GenerationIntegrity::Loaded
        } else {
            GenerationIntegrity::Unverified
        };
        let done_bytes = contents.tensor_bytes;
        let generation = Generation {
            id,
            model,
            key,
            phase: if retired { GenerationPhase::Retiring } else { GenerationPhase::Ready },
            source: BytesSource::default(),
            reads_files: false,
            contents,
            done_bytes,
            requested_at: self.now,
            progressed_at: self.now,
            waiters: Vec::new(),
            adopted: true,
            integrity,
            verification: VerificationState::default(),
            reload: false,
        };
        self.generations.insert(id, generation);
    }

    fn adopt_lease(&mut self, record: LeaseRecord) {
        self.next_lease = self.next_lease.max(record.lease + 1);
        if record.token_digest.is_some() {
            self.tokens.expect();
        }
        let lease = LeaseEntry::adopted(record, self.now);
        self.ledger.reserve_unchecked(ReservationKey::Lease(lease.id), lease.reservation());
        self.leases.insert(lease);
    }

    /// If a model has several ready generations on one device, all but the newest retire. The
    /// numbers of a returned generation and of one that was loaded here have no common order.
    fn retire_replaced_generations(&mut self) {
        let name = |g: &Generation| (g.model.clone(), g.key.device.clone());
        let mut ready: Vec<&Generation> =
            self.generations.values().filter(|g| g.phase == GenerationPhase::Ready).collect();
        ready.sort_by_key(|g| (g.contents.created_unix_seconds, g.id));
        let newest: BTreeMap<(String, String), u64> =
            ready.into_iter().map(|generation| (name(generation), generation.id)).collect();
        let replaced: Vec<u64> = self
            .generations
            .values()
            .filter(|g| g.phase == GenerationPhase::Ready && newest.get(&name(g)) != Some(&g.id))
            .map(|g| g.id)
            .collect();
        for id in replaced {
            self.retire(id);
        }
    }

    pub fn allow_token(&mut self, name: String, digest: TokenDigest) -> Result<(), TokenError> {
        self.tokens.allow(name, digest)
    }

    pub fn forget_token(&mut self, name: &str) {
        self.tokens.forget(name);
    }

    pub fn generations(&self) -> impl Iterator<Item = &Generation> {
        self.generations.values()
    }

    pub fn generation(&self, id: u64) -> Option<&Generation> {
        self.generations.get(&id)
    }

    pub fn leases(&self) -> impl Iterator<Item = &LeaseEntry> {
        self.leases.iter()
    }

    pub fn lease(&self, id: u64) -> Option<&LeaseEntry> {
        self.leases.get(id)
    }

    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    pub fn registered_tokens(&self) -> usize {
        self.tokens.len()
    }

    pub fn tokens_required(&self) -> bool {
        self.tokens.required()
    }

    /// Whether the worker may still return what it holds.
    pub fn is_awaited(&self, pid: i32) -> bool {
        self.returns.is_awaited(pid)
    }

    /// Applies one event. Returns the actions in the order in which they must be executed.
    pub fn handle(&mut self, event: WeightServerEvent, now: Duration) -> Vec<WeightServerAction> {
        self.now = now;
        match event {
            WeightServerEvent::DeviceAdded { device, node_bytes } => self.add_device(&device, node_bytes),
            WeightServerEvent::LoadRequested { call, params, available_bytes } => {
                self.handle_load_request(call, params, available_bytes)
            }
            WeightServerEvent::LoadPlanned { generation, contents, available_bytes } => {
                self.handle_load_plan(generation, contents, available_bytes);
            }
            WeightServerEvent::LoadProgressed { generation, done_bytes } => {
                self.handle_load_progress(generation, done_bytes)
            }
            WeightServerEvent::LoadHandedOver { generation, contents } => {
                self.handle_load_handed_over(generation, contents)
            }
            WeightServerEvent::LoaderEnded { generation } => self.handle_loader_ended(generation),
            WeightServerEvent::LoadFailed { generation, failure } => {
                self.handle_load_failed(generation, failure)
            }
            WeightServerEvent::GenerationStored { generation } => self.handle_generation_stored(generation),
            WeightServerEvent::VerifyRequested { call, model, device } => {
                self.handle_verify_request(call, model, device)
            }
            WeightServerEvent::Verified { generation, report } => self.handle_verified(generation, report),
            WeightServerEvent::VerifyFailed { generation, failure } => {
                self.fail_verification(generation, failure)
            }
            WeightServerEvent::UnloadRequested { call, model, generation } => {
                self.handle_unload_request(call, &model, generation)
            }
            WeightServerEvent::AttachRequested { connection, peer, params } => {
                self.handle_attach_request(connection, peer, params)
            }
            WeightServerEvent::LeaseStored { lease } => self.handle_lease_stored(lease),
            WeightServerEvent::Delivered { connection } => self.handle_delivered(connection),
            WeightServerEvent::GenerationReturned { connection, generation } => {
                self.handle_generation_returned(connection, generation);
            }
            WeightServerEvent::AwaitedProcessEnded { pid } => self.returns.settle(pid),
            WeightServerEvent::ReclaimRequested { connection, peer, claim } => {
                let answer = self.reclaim(connection, peer, claim);
                self.actions
                    .extend(answer.err().map(|refusal| WeightServerAction::Refuse { connection, refusal }));
            }
            WeightServerEvent::Detached { connection } => {
                if let Some(id) = self.leases.find_by_connection(connection).map(|lease| lease.id) {
                    self.end_lease(id);
                }
            }
            WeightServerEvent::ConnectionEnded { connection } => self.handle_connection_ended(connection),
            WeightServerEvent::ProcessEnded { lease } => self.end_lease(lease),
            WeightServerEvent::ShutdownRequested => self.shut_down(),
            WeightServerEvent::Tick => self.handle_tick(),
        }
        self.resume_waiting_loads();
        std::mem::take(&mut self.actions)
    }

    fn shut_down(&mut self) {
        self.shutting_down = true;
        let pending: Vec<(u64, bool)> = self
            .generations
            .values()
            .filter(|g| g.is_pending() && g.phase != GenerationPhase::Storing)
            .map(|g| (g.id, g.occupies_loader()))
            .collect();
        for (id, running) in pending {
            if running {
                self.actions.push(WeightServerAction::StopLoader { generation: id });
            }
            self.fail_load(id, LoadFailure::ShuttingDown);
        }
        let checked: Vec<u64> = self.generations.keys().copied().collect();
        for id in checked {
            self.cancel_verification(id, &VerifyFailure::ShuttingDown);
        }
    }

    fn handle_tick(&mut self) {
        let now = self.now;
        let stalled: Vec<u64> = self
            .generations
            .values()
            .filter(|g| g.is_loader_busy() && now.saturating_sub(g.progressed_at) > PROGRESS_TIMEOUT)
            .map(|g| g.id)
            .collect();
        for id in stalled {
            self.actions.push(WeightServerAction::StopLoader { generation: id });
            self.handle_load_failed(id, LoadFailure::NoProgress { seconds: PROGRESS_TIMEOUT.as_secs() });
        }
        let pending: Vec<u64> = self.generations.values().filter(|g| g.is_pending()).map(|g| g.id).collect();
        for id in pending {
            self.report_progress(id, |_| true);
        }
        self.start_verifiers();
        self.returns.expire(now);
        for lease in self.leases.iter_mut() {
            if let LeasePhase::Disconnected { since } = lease.phase
                && now.saturating_sub(since) > RECLAIM_TIMEOUT
            {
                lease.phase = LeasePhase::Orphaned;
                lease.awaiting_reclaim = false;
                self.actions.push(WeightServerAction::Publish(ChangeNotice::Lease(lease.id)));
            }
        }
    }

    /// The newest generation of a model on a device that workers can attach to.
    fn find_ready(&self, model: &str, device: &str) -> Option<&Generation> {
        let ready =
            |g: &&Generation| g.model == model && g.key.device == device && g.phase == GenerationPhase::Ready;
        self.generations.values().rfind(ready)
    }

    fn list_models(&self) -> String {
        let names: BTreeSet<&str> = self
            .generations
            .values()
            .filter(|g| g.phase != GenerationPhase::Retiring)
            .map(|g| g.model.as_str())
            .collect();
        if names.is_empty() { "none".to_owned() } else { names.into_iter().collect::<Vec<_>>().join(", ") }
    }
}

#[cfg(test)]
mod tests;
