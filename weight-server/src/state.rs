//! The weight-server's state machine: events in, actions out, no I/O, no clock, no lock.
//!
//! It decides what is loaded, who may attach, what is reserved and what ends; `driver` owns the one instance and carries
//! the actions out. Generations move as `catalog` shows, leases as `lease_table` shows. Invariants, checked after every
//! random step by the tests: every pending or resident generation, every lease and every running verifier has exactly one
//! ledger row; a device has at most one loader; no lease points at a generation that is gone; a quarantined one has no name.

mod leasing;
mod loading;
mod verifying;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use memory::lease_record::LeaseRecord;
use memory::manifest::HOST_DEVICE;

use crate::catalog::{Generation, Integrity, Phase, Verification};
use crate::events::{Action, AdoptedGeneration, Event, Notice};
use crate::lease_table::{Lease, LeasePhase, LeaseTable};
use crate::ledger::{Ledger, RowKey};
use crate::refusal::{LoadFailure, VerifyFailure};
use crate::tokens::{TokenError, Tokens};
use leasing::lease_row;

/// A disk that gives nothing for this long will not help whoever waits.
pub(crate) const PROGRESS_PATIENCE: Duration = Duration::from_secs(30);

/// How long a worker may take to come back after its connection broke, before its row is called orphaned. Workers retry
/// every second.
pub(crate) const RECLAIM_PATIENCE: Duration = Duration::from_secs(30);

/// Loads that run or wait; each is a model of gigabytes.
pub(crate) const MAX_PENDING_LOADS: usize = 64;

/// Leases and attaches that wait; above any fleet on one machine.
pub(crate) const MAX_CLIENTS: usize = 4096;

/// A worker holds one lease per model it uses (target, draft, adapters).
pub(crate) const MAX_LEASES_PER_PROCESS: usize = 64;

/// What never changes while the process lives.
#[derive(Debug)]
pub(crate) struct Limits {
    pub(crate) device_bytes: BTreeMap<String, u64>,
    pub(crate) fds: u64,
    pub(crate) uids: BTreeSet<u32>,
}

#[derive(Debug)]
pub(crate) struct State {
    generations: BTreeMap<u64, Generation>,
    leases: LeaseTable,
    ledger: Ledger,
    tokens: Tokens,
    uids: BTreeSet<u32>,
    next_generation: u64,
    next_lease: u64,
    shutting_down: bool,
    /// Of the event that is being handled.
    now: Duration,
    actions: Vec<Action>,
}

impl State {
    /// Starts with what an earlier incarnation left in the vault. What follows from that comes with the first event.
    pub(crate) fn new(
        limits: Limits,
        generations: Vec<AdoptedGeneration>,
        leases: Vec<LeaseRecord>,
        now: Duration,
    ) -> Self {
        let mut state = Self {
            generations: BTreeMap::new(),
            leases: LeaseTable::default(),
            ledger: Ledger::new(limits.device_bytes, limits.fds),
            tokens: Tokens::default(),
            uids: limits.uids,
            next_generation: 1,
            next_lease: 1,
            shutting_down: false,
            now,
            actions: Vec::new(),
        };
        for adopted in generations {
            state.adopt_generation(adopted);
        }
        for record in leases {
            state.adopt_lease(record);
        }
        state.retire_replaced();
        let ids: Vec<u64> = state.generations.keys().copied().collect();
        for id in ids {
            state.drop_if_unused(id);
        }
        state
    }

    fn adopt_generation(&mut self, adopted: AdoptedGeneration) {
        let AdoptedGeneration { id, model, key, contents, retired } = adopted;
        self.next_generation = self.next_generation.max(id + 1);
        self.ledger.adopt(RowKey::Weights(id), contents.holds(&key.device));
        // The kernel's seals speak for host memory.
        let integrity = if key.device == HOST_DEVICE { Integrity::Loaded } else { Integrity::Unverified };
        let done_bytes = contents.tensor_bytes;
        let generation = Generation {
            id,
            model,
            key,
            one_per_tensor: false,
            phase: if retired { Phase::Retiring } else { Phase::Ready },
            contents,
            done_bytes,
            requested_at: self.now,
            progressed_at: self.now,
            waiters: Vec::new(),
            adopted: true,
            integrity,
            verification: Verification::default(),
            reload: false,
        };
        self.generations.insert(id, generation);
    }

    fn adopt_lease(&mut self, record: LeaseRecord) {
        self.next_lease = self.next_lease.max(record.lease + 1);
        if record.token_digest.is_some() {
            self.tokens.expect();
        }
        let lease = Lease::adopted(record, self.now);
        self.ledger.adopt(RowKey::Lease(lease.id), lease_row(&lease));
        self.leases.insert(lease);
    }

    /// Of several ready generations of one model on one device only the newest keeps the name.
    fn retire_replaced(&mut self) {
        let name = |g: &Generation| (g.model.clone(), g.key.device.clone());
        let mut newest: BTreeMap<(String, String), u64> = BTreeMap::new();
        for generation in self.generations.values().filter(|g| g.phase == Phase::Ready) {
            newest.insert(name(generation), generation.id);
        }
        let replaced: Vec<u64> = self
            .generations
            .values()
            .filter(|g| g.phase == Phase::Ready && newest.get(&name(g)) != Some(&g.id))
            .map(|g| g.id)
            .collect();
        for id in replaced {
            self.retire(id);
        }
    }

    pub(crate) fn allow_token(&mut self, name: String, token: &[u8]) -> Result<(), TokenError> {
        self.tokens.allow(name, token)
    }

    pub(crate) fn generations(&self) -> impl Iterator<Item = &Generation> {
        self.generations.values()
    }

    pub(crate) fn generation(&self, id: u64) -> Option<&Generation> {
        self.generations.get(&id)
    }

    pub(crate) fn leases(&self) -> impl Iterator<Item = &Lease> {
        self.leases.iter()
    }

    pub(crate) fn lease(&self, id: u64) -> Option<&Lease> {
        self.leases.get(id)
    }

    pub(crate) fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    pub(crate) fn tokens_required(&self) -> bool {
        self.tokens.required()
    }

    /// What follows from one event, in the order in which it must happen.
    pub(crate) fn handle(&mut self, event: Event, now: Duration) -> Vec<Action> {
        self.now = now;
        match event {
            Event::LoadAsked { call, ask, available_bytes } => self.load_asked(call, ask, available_bytes),
            Event::LoadPlanned { generation, contents, available_bytes } => {
                self.load_planned(generation, contents, available_bytes);
            }
            Event::LoadProgressed { generation, done_bytes } => self.load_progressed(generation, done_bytes),
            Event::LoadHandedOver { generation, contents } => self.handed_over(generation, contents),
            Event::LoadFailed { generation, failure } => self.load_failed(generation, failure),
            Event::GenerationStored { generation } => self.generation_stored(generation),
            Event::VerifyAsked { call, model, device } => self.verify_asked(call, model, device),
            Event::Verified { generation, report } => self.verified(generation, report),
            Event::VerifyFailed { generation, failure } => self.verify_failed(generation, failure),
            Event::UnloadAsked { call, model } => self.unload_asked(call, &model),
            Event::AttachAsked { connection, peer, ask } => self.attach_asked(connection, peer, ask),
            Event::LeaseStored { lease } => self.lease_stored(lease),
            Event::Delivered { connection } => self.delivered(connection),
            Event::ReclaimAsked { connection, peer, protocol, generation, lease, token } => {
                let answer = self.reclaim(connection, &peer, protocol, generation, lease, &token);
                self.actions.extend(answer.err().map(|refusal| Action::Refuse { connection, refusal }));
            }
            Event::Detached { connection } => {
                if let Some(id) = self.leases.by_connection(connection).map(|lease| lease.id) {
                    self.end_lease(id);
                }
            }
            Event::ConnectionEnded { connection } => self.connection_ended(connection),
            Event::ProcessEnded { lease } => self.end_lease(lease),
            Event::ShutdownAsked => self.shut_down(),
            Event::Tick => self.tick(),
        }
        std::mem::take(&mut self.actions)
    }

    fn shut_down(&mut self) {
        self.shutting_down = true;
        let pending: Vec<(u64, bool)> = self
            .generations
            .values()
            .filter(|g| g.is_pending() && g.phase != Phase::Storing)
            .map(|g| (g.id, g.occupies_loader()))
            .collect();
        for (id, running) in pending {
            if running {
                self.actions.push(Action::StopLoader { generation: id });
            }
            self.load_failed(id, LoadFailure::ShuttingDown);
        }
        let checked: Vec<u64> = self.generations.keys().copied().collect();
        for id in checked {
            self.stop_verifying(id, &VerifyFailure::ShuttingDown);
        }
    }

    fn tick(&mut self) {
        let now = self.now;
        let stalled: Vec<u64> = self
            .generations
            .values()
            .filter(|g| g.occupies_loader() && now.saturating_sub(g.progressed_at) > PROGRESS_PATIENCE)
            .map(|g| g.id)
            .collect();
        for id in stalled {
            self.actions.push(Action::StopLoader { generation: id });
            self.load_failed(id, LoadFailure::NoProgress { seconds: PROGRESS_PATIENCE.as_secs() });
        }
        let pending: Vec<u64> = self.generations.values().filter(|g| g.is_pending()).map(|g| g.id).collect();
        for id in pending {
            self.tell_waiters(id, |_| true);
        }
        self.start_verifiers();
        for lease in self.leases.iter_mut() {
            if let LeasePhase::Disconnected { since } = lease.phase
                && now.saturating_sub(since) > RECLAIM_PATIENCE
            {
                lease.phase = LeasePhase::Orphaned;
                lease.unsettled = false;
                self.actions.push(Action::Publish(Notice::Lease(lease.id)));
            }
        }
    }

    /// The newest generation of a model on a device that can be attached.
    fn ready(&self, model: &str, device: &str) -> Option<&Generation> {
        let ready = |g: &&Generation| g.model == model && g.key.device == device && g.phase == Phase::Ready;
        self.generations.values().rfind(ready)
    }

    fn known_models(&self) -> String {
        let names: BTreeSet<&str> = self
            .generations
            .values()
            .filter(|g| g.phase != Phase::Retiring)
            .map(|g| g.model.as_str())
            .collect();
        if names.is_empty() { "none".to_owned() } else { names.into_iter().collect::<Vec<_>>().join(", ") }
    }
}

#[cfg(test)]
mod tests;
