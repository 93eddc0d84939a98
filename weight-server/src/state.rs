//! The weight-server's state machine: events in, actions out, no I/O, no clock, no lock.
//!
//! It decides what is loaded, who may attach, what is reserved and what ends; `driver` owns the one instance and carries
//! the actions out. Generations move as `catalog` shows, leases as `lease_table` shows. Invariants, checked after every
//! random step by the tests: every pending or resident generation and every lease has exactly one ledger row; a device
//! has at most one loader; no lease points at a generation that is gone.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use memory::handoff::PROTOCOL;
use memory::lease_record::LeaseRecord;
use memory::manifest::FORMAT;

use crate::catalog::{Contents, Generation, LoadKey, Phase};
use crate::lease_table::{Lease, LeasePhase, LeaseTable, Peer};
use crate::ledger::{Ledger, Row, RowKey};
use crate::refusal::{LoadFailure, Refusal, UnloadRefusal};
use crate::tokens::{TokenError, Tokens, digest};

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

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ConnectionId(pub(crate) u64);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct CallId(pub(crate) u64);

/// Who is told about a load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Waiter {
    /// An admin call.
    Call(CallId),
    /// A worker that attaches as soon as the model is ready.
    Worker { connection: ConnectionId, peer: Peer, ask: Ask },
}

/// An Attach frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ask {
    pub(crate) protocol: u32,
    pub(crate) layout: u32,
    pub(crate) manifest_format: u32,
    pub(crate) device: String,
    pub(crate) model: String,
    pub(crate) token: Bytes,
    pub(crate) kv_bytes: u64,
    pub(crate) workspace_bytes: u64,
}

#[derive(Debug)]
pub(crate) struct LoadAsk {
    pub(crate) model: String,
    pub(crate) path: PathBuf,
    /// What stands at the path now, or why that cannot be told.
    pub(crate) key: Result<LoadKey, LoadFailure>,
    pub(crate) one_per_tensor: bool,
}

#[derive(Debug)]
pub(crate) enum Event {
    LoadAsked {
        call: CallId,
        ask: LoadAsk,
        available_bytes: u64,
    },
    LoadPlanned {
        generation: u64,
        contents: Contents,
        available_bytes: u64,
    },
    LoadProgressed {
        generation: u64,
        done_bytes: u64,
    },
    LoadHandedOver {
        generation: u64,
        contents: Contents,
    },
    LoadFailed {
        generation: u64,
        failure: LoadFailure,
    },
    GenerationStored {
        generation: u64,
    },
    UnloadAsked {
        call: CallId,
        model: String,
    },
    AttachAsked {
        connection: ConnectionId,
        peer: Peer,
        ask: Ask,
    },
    LeaseStored {
        lease: u64,
    },
    Delivered {
        connection: ConnectionId,
    },
    ReclaimAsked {
        connection: ConnectionId,
        peer: Peer,
        protocol: u32,
        generation: u64,
        lease: u64,
        token: Bytes,
    },
    Detached {
        connection: ConnectionId,
    },
    ConnectionEnded {
        connection: ConnectionId,
    },
    ProcessEnded {
        lease: u64,
    },
    ShutdownAsked,
    /// Time passes; comes at least every second.
    Tick,
}

#[derive(Debug, PartialEq)]
pub(crate) enum Action {
    StartLoader {
        generation: u64,
    },
    /// What the loader planned is reserved.
    Proceed {
        generation: u64,
    },
    StopLoader {
        generation: u64,
    },
    StoreGeneration {
        generation: u64,
    },
    /// A successor must not give it its name back.
    MarkRetired {
        generation: u64,
    },
    /// Out of the vault, and its descriptors closed.
    ForgetGeneration {
        generation: u64,
    },
    /// Into the vault, and watch its process.
    StoreLease {
        lease: u64,
        connection: ConnectionId,
        record: LeaseRecord,
    },
    ForgetLease {
        lease: u64,
    },
    Deliver {
        connection: ConnectionId,
        lease: u64,
        generation: u64,
    },
    Reclaimed {
        connection: ConnectionId,
        lease: u64,
        generation: u64,
    },
    Refuse {
        connection: ConnectionId,
        refusal: Refusal,
    },
    Close {
        connection: ConnectionId,
    },
    TellWaiting {
        waiter: WaiterId,
        progress: LoadProgress,
    },
    AnswerLoad {
        call: CallId,
        result: Result<LoadAnswer, LoadFailure>,
    },
    AnswerUnload {
        call: CallId,
        result: Result<u32, UnloadRefusal>,
    },
    Publish(Notice),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaiterId {
    Call(CallId),
    Worker(ConnectionId),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LoadProgress {
    pub(crate) done_bytes: u64,
    pub(crate) total_bytes: u64,
    pub(crate) jobs_ahead: u32,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct LoadAnswer {
    pub(crate) generation: u64,
    pub(crate) read_from_file: bool,
    pub(crate) elapsed: Duration,
}

/// Something changed that an operator may want to see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Notice {
    Generation(u64),
    GenerationGone(u64),
    Lease(u64),
    LeaseEnded(u64),
}

/// A generation found in the vault.
#[derive(Debug)]
pub(crate) struct AdoptedGeneration {
    pub(crate) id: u64,
    pub(crate) model: String,
    pub(crate) key: LoadKey,
    pub(crate) contents: Contents,
    /// It had lost its name already.
    pub(crate) retired: bool,
}

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
        let (bytes, fds) = contents.holds();
        self.ledger.adopt(RowKey::Weights(id), Row { device: key.device.clone(), bytes, fds });
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

    /// Of several ready generations of one model only the newest keeps the name.
    fn retire_replaced(&mut self) {
        let mut newest: BTreeMap<&str, u64> = BTreeMap::new();
        for generation in self.generations.values().filter(|g| g.phase == Phase::Ready) {
            newest.insert(&generation.model, generation.id);
        }
        let replaced: Vec<u64> = self
            .generations
            .values()
            .filter(|g| g.phase == Phase::Ready && newest.get(g.model.as_str()) != Some(&g.id))
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

    // ---- loading -------------------------------------------------------------------------------------------------

    fn load_asked(&mut self, call: CallId, ask: LoadAsk, available_bytes: u64) {
        match self.join_or_create(call, ask, available_bytes) {
            Ok(()) => {}
            Err(failure) => self.actions.push(Action::AnswerLoad { call, result: Err(failure) }),
        }
    }

    fn join_or_create(
        &mut self,
        call: CallId,
        ask: LoadAsk,
        available_bytes: u64,
    ) -> Result<(), LoadFailure> {
        if self.shutting_down {
            return Err(LoadFailure::ShuttingDown);
        }
        let key = match ask.key {
            Ok(key) => key,
            // The file may be gone: what is resident under this name and path does not need it.
            Err(failure) => {
                let resident = self.ready(&ask.model).filter(|generation| generation.path() == ask.path);
                let id = resident.ok_or(failure)?.id;
                self.answer_resident(call, id);
                return Ok(());
            }
        };
        let same = self.generations.values_mut().find(|g| g.phase != Phase::Retiring && g.key.is_same(&key));
        match same {
            Some(generation) if generation.model != ask.model => {
                return Err(LoadFailure::LoadedAs { model: generation.model.clone() });
            }
            Some(generation) if generation.is_pending() => {
                generation.waiters.push(Waiter::Call(call));
                return Ok(());
            }
            Some(generation) => {
                let id = generation.id;
                self.answer_resident(call, id);
                return Ok(());
            }
            None => {}
        }
        match self.leases.unsettled() {
            0 => self.create(call, ask.model, key, ask.one_per_tensor, available_bytes),
            workers => Err(LoadFailure::Settling { workers }),
        }
    }

    fn answer_resident(&mut self, call: CallId, generation: u64) {
        let answer = LoadAnswer { generation, read_from_file: false, elapsed: Duration::ZERO };
        self.actions.push(Action::AnswerLoad { call, result: Ok(answer) });
    }

    fn create(
        &mut self,
        call: CallId,
        model: String,
        key: LoadKey,
        one_per_tensor: bool,
        available_bytes: u64,
    ) -> Result<(), LoadFailure> {
        let pending = self.generations.values().filter(|g| g.is_pending()).count();
        if pending >= MAX_PENDING_LOADS {
            return Err(LoadFailure::TooManyJobs { jobs: pending });
        }
        let id = self.next_generation;
        let file_bytes: u64 = key.files.iter().fold(0, |sum, file| file.bytes.saturating_add(sum));
        self.check_machine(id, file_bytes, available_bytes)?;
        // A first bound; the loader's plan says it exactly, before anything is allocated.
        let row = Row { device: key.device.clone(), bytes: file_bytes, fds: 1 };
        self.ledger.reserve(RowKey::Loading(id), row)?;
        self.next_generation += 1;
        let generation = Generation {
            id,
            model,
            key,
            one_per_tensor,
            phase: Phase::Queued,
            contents: Contents { tensor_bytes: file_bytes, ..Contents::default() },
            done_bytes: 0,
            requested_at: self.now,
            progressed_at: self.now,
            waiters: vec![Waiter::Call(call)],
            adopted: false,
        };
        self.generations.insert(id, generation);
        self.start_loaders();
        Ok(())
    }

    /// Holds what a load needs against what the machine has, less what other loads are about to take.
    fn check_machine(&self, id: u64, needed: u64, available_bytes: u64) -> Result<(), LoadFailure> {
        let promised: u64 = self
            .ledger
            .rows()
            .filter_map(|(key, row)| match key {
                RowKey::Loading(other) if other != id => Some((self.generations.get(&other)?, row.bytes)),
                _ => None,
            })
            .map(|(generation, reserved)| generation.outstanding_bytes(reserved))
            .sum();
        let available = available_bytes.saturating_sub(promised);
        if needed > available { Err(LoadFailure::Machine { needed, available }) } else { Ok(()) }
    }

    /// Starts the next load of every device that has none running.
    fn start_loaders(&mut self) {
        if self.shutting_down {
            return;
        }
        let mut busy: BTreeSet<String> =
            self.generations.values().filter(|g| g.occupies_loader()).map(|g| g.key.device.clone()).collect();
        for generation in self.generations.values_mut().filter(|g| g.phase == Phase::Queued) {
            if busy.insert(generation.key.device.clone()) {
                generation.phase = Phase::Starting;
                generation.progressed_at = self.now;
                self.actions.push(Action::StartLoader { generation: generation.id });
            }
        }
    }

    fn load_planned(&mut self, id: u64, contents: Contents, available_bytes: u64) {
        let Some(generation) = self.generations.get_mut(&id).filter(|g| g.phase == Phase::Starting) else {
            return;
        };
        let (bytes, fds) = contents.holds();
        let device = generation.key.device.clone();
        generation.contents = contents;
        generation.phase = Phase::Loading;
        generation.progressed_at = self.now;
        let reserved = self
            .ledger
            .reserve(RowKey::Loading(id), Row { device, bytes, fds })
            .map_err(LoadFailure::from)
            .and_then(|()| self.check_machine(id, bytes, available_bytes));
        match reserved {
            Ok(()) => {
                self.actions.push(Action::Proceed { generation: id });
                self.actions.push(Action::Publish(Notice::Generation(id)));
            }
            Err(failure) => {
                self.actions.push(Action::StopLoader { generation: id });
                self.load_failed(id, failure);
            }
        }
    }

    fn load_progressed(&mut self, id: u64, done_bytes: u64) {
        let Some(generation) = self.generations.get_mut(&id) else { return };
        if done_bytes > generation.done_bytes {
            generation.done_bytes = done_bytes;
            generation.progressed_at = self.now;
            self.tell_waiters(id, |waiter| matches!(waiter, Waiter::Call(_)));
        }
    }

    fn handed_over(&mut self, id: u64, contents: Contents) {
        let Some(generation) = self.generations.get_mut(&id).filter(|g| g.phase == Phase::Loading) else {
            // Unloaded meanwhile: what came is dropped with the loader.
            return self.actions.push(Action::ForgetGeneration { generation: id });
        };
        generation.done_bytes = contents.tensor_bytes;
        generation.phase = Phase::Storing;
        let (bytes, fds) = contents.holds();
        let row = Row { device: generation.key.device.clone(), bytes, fds };
        generation.contents = contents;
        // The plan was exact but for the manifest's size, and the memory is there: book it as it is.
        self.ledger.adopt(RowKey::Loading(id), row);
        self.actions.push(Action::StoreGeneration { generation: id });
    }

    fn load_failed(&mut self, id: u64, failure: LoadFailure) {
        let Some(generation) = self.generations.remove(&id) else { return };
        self.ledger.release(RowKey::Loading(id));
        for waiter in generation.waiters {
            self.actions.push(match waiter {
                Waiter::Call(call) => Action::AnswerLoad { call, result: Err(failure.clone()) },
                Waiter::Worker { connection, .. } => {
                    let (model, failure) = (generation.model.clone(), failure.clone());
                    Action::Refuse { connection, refusal: Refusal::LoadFailed { model, failure } }
                }
            });
        }
        self.actions.push(Action::Publish(Notice::GenerationGone(id)));
        self.start_loaders();
    }

    fn generation_stored(&mut self, id: u64) {
        let Some(generation) = self.generations.get_mut(&id).filter(|g| g.phase == Phase::Storing) else {
            return;
        };
        generation.phase = Phase::Ready;
        let waiters = std::mem::take(&mut generation.waiters);
        let answer =
            LoadAnswer { generation: id, read_from_file: true, elapsed: self.now - generation.requested_at };
        self.ledger.settle(id);
        self.actions.push(Action::Publish(Notice::Generation(id)));
        self.retire_replaced();
        for waiter in waiters {
            match waiter {
                Waiter::Call(call) => {
                    self.actions.push(Action::AnswerLoad { call, result: Ok(answer.clone()) });
                }
                Waiter::Worker { connection, peer, ask } => self.attach_asked(connection, peer, ask),
            }
        }
        self.start_loaders();
    }

    fn tell_waiters(&mut self, id: u64, which: impl Fn(&Waiter) -> bool) {
        let Some(generation) = self.generations.get(&id) else { return };
        let ahead = self.generations.range(..id).filter(|(_, other)| {
            other.key.device == generation.key.device
                && (other.phase == Phase::Queued || other.occupies_loader())
        });
        let progress = LoadProgress {
            done_bytes: generation.done_bytes,
            total_bytes: generation.contents.tensor_bytes,
            jobs_ahead: ahead.count() as u32,
        };
        for waiter in generation.waiters.iter().filter(|waiter| which(waiter)) {
            let waiter = match waiter {
                Waiter::Call(call) => WaiterId::Call(*call),
                Waiter::Worker { connection, .. } => WaiterId::Worker(*connection),
            };
            self.actions.push(Action::TellWaiting { waiter, progress });
        }
    }

    // ---- unloading -----------------------------------------------------------------------------------------------

    fn unload_asked(&mut self, call: CallId, model: &str) {
        let result = self.unload(model);
        self.actions.push(Action::AnswerUnload { call, result });
    }

    fn unload(&mut self, model: &str) -> Result<u32, UnloadRefusal> {
        let ids: Vec<u64> = self
            .generations
            .values()
            .filter(|g| g.model == model && g.phase != Phase::Retiring)
            .map(|g| g.id)
            .collect();
        if ids.is_empty() {
            return Err(UnloadRefusal::UnknownModel { model: model.to_owned(), known: self.known_models() });
        }
        match self.leases.unsettled() {
            0 => {}
            workers => return Err(UnloadRefusal::Settling { workers }),
        }
        let mut leases = 0;
        for id in ids {
            leases += self.leases.of_generation(id);
            match self.generations.get(&id).map(|generation| generation.phase) {
                Some(Phase::Ready) => self.retire(id),
                Some(phase) => {
                    self.actions.push(match phase {
                        // Its descriptors are here already, and perhaps in the vault.
                        Phase::Storing => Action::ForgetGeneration { generation: id },
                        _ => Action::StopLoader { generation: id },
                    });
                    self.load_failed(id, LoadFailure::Unloaded);
                }
                None => {}
            }
        }
        Ok(leases as u32)
    }

    /// Takes the name from a ready generation; the memory goes at once if nobody holds it.
    fn retire(&mut self, id: u64) {
        if let Some(generation) = self.generations.get_mut(&id) {
            generation.phase = Phase::Retiring;
            self.actions.push(Action::Publish(Notice::Generation(id)));
            if self.leases.of_generation(id) > 0 {
                self.actions.push(Action::MarkRetired { generation: id });
            }
            self.drop_if_unused(id);
        }
    }

    fn drop_if_unused(&mut self, id: u64) {
        let retiring = self.generations.get(&id).is_some_and(|g| g.phase == Phase::Retiring);
        if retiring && self.leases.of_generation(id) == 0 {
            self.generations.remove(&id);
            self.ledger.release(RowKey::Weights(id));
            self.actions.push(Action::ForgetGeneration { generation: id });
            self.actions.push(Action::Publish(Notice::GenerationGone(id)));
        }
    }

    // ---- attaching -----------------------------------------------------------------------------------------------

    fn attach_asked(&mut self, connection: ConnectionId, peer: Peer, ask: Ask) {
        if let Err(refusal) = self.attach(connection, peer, ask) {
            self.actions.push(Action::Refuse { connection, refusal });
        }
    }

    fn attach(&mut self, connection: ConnectionId, peer: Peer, ask: Ask) -> Result<(), Refusal> {
        let token = self.admit(&peer, &ask)?;
        let Some(generation) = self.ready(&ask.model) else {
            return self.wait_for_load(connection, peer, ask);
        };
        if ask.device != generation.key.device {
            let held = generation.key.device.clone();
            return Err(Refusal::Device { model: ask.model, wanted: ask.device, held });
        }
        if ask.layout != generation.key.layout {
            return Err(Refusal::Layout {
                model: ask.model,
                wanted: ask.layout,
                held: generation.key.layout,
            });
        }
        let lease = Lease {
            id: self.next_lease,
            generation: generation.id,
            worker: peer,
            device: ask.device,
            kv_bytes: ask.kv_bytes,
            workspace_bytes: ask.workspace_bytes,
            token,
            phase: LeasePhase::Storing { connection },
            unsettled: false,
        };
        self.ledger.reserve(RowKey::Lease(lease.id), lease_row(&lease))?;
        self.next_lease += 1;
        self.actions.push(Action::StoreLease { lease: lease.id, connection, record: lease.record() });
        self.actions.push(Action::Publish(Notice::Lease(lease.id)));
        self.leases.insert(lease);
        Ok(())
    }

    /// Checks that do not depend on the model; the token's name and digest where tokens are in use.
    fn admit(&self, peer: &Peer, ask: &Ask) -> Result<Option<(String, [u8; 32])>, Refusal> {
        if self.shutting_down {
            return Err(Refusal::ShuttingDown);
        }
        if !self.uids.contains(&peer.uid) {
            return Err(Refusal::PeerUid { uid: peer.uid });
        }
        if ask.protocol != PROTOCOL {
            return Err(Refusal::Protocol { found: ask.protocol });
        }
        let token = if self.tokens.required() {
            let digest = digest(&ask.token);
            let name = self.tokens.name_of(&digest).ok_or(Refusal::Token)?;
            Some((name.to_owned(), digest))
        } else {
            None
        };
        // A worker reads its own format and the one before.
        if !(FORMAT..=FORMAT + 1).contains(&ask.manifest_format) {
            return Err(Refusal::ManifestFormat { found: ask.manifest_format });
        }
        let leases = self.leases.of_process(peer);
        if leases >= MAX_LEASES_PER_PROCESS {
            return Err(Refusal::LeasesOfProcess { pid: peer.pid, leases });
        }
        let waiting: usize = self.generations.values().map(|generation| generation.waiters.len()).sum();
        if self.leases.len() + waiting >= MAX_CLIENTS {
            return Err(Refusal::Busy { clients: MAX_CLIENTS });
        }
        Ok(token)
    }

    fn wait_for_load(&mut self, connection: ConnectionId, peer: Peer, ask: Ask) -> Result<(), Refusal> {
        let pending = self.generations.values_mut().rfind(|g| g.model == ask.model && g.is_pending());
        let Some(generation) = pending else {
            return Err(Refusal::UnknownModel { model: ask.model, known: self.known_models() });
        };
        let id = generation.id;
        generation.waiters.push(Waiter::Worker { connection, peer, ask });
        self.tell_waiters(
            id,
            |waiter| matches!(waiter, Waiter::Worker { connection: c, .. } if *c == connection),
        );
        Ok(())
    }

    fn lease_stored(&mut self, id: u64) {
        let Some(lease) = self.leases.get_mut(id) else { return };
        // A connection that broke meanwhile has moved the lease on.
        if let LeasePhase::Storing { connection } = lease.phase {
            lease.phase = LeasePhase::Granting { connection };
            self.actions.push(Action::Deliver { connection, lease: id, generation: lease.generation });
        }
    }

    fn delivered(&mut self, connection: ConnectionId) {
        let Some(id) = self.leases.by_connection(connection).map(|lease| lease.id) else { return };
        if let Some(lease) = self.leases.get_mut(id) {
            lease.phase = LeasePhase::Held { connection };
            self.actions.push(Action::Publish(Notice::Lease(id)));
        }
    }

    fn reclaim(
        &mut self,
        connection: ConnectionId,
        peer: &Peer,
        protocol: u32,
        generation: u64,
        lease: u64,
        token: &[u8],
    ) -> Result<(), Refusal> {
        if self.shutting_down {
            return Err(Refusal::ShuttingDown);
        }
        if protocol != PROTOCOL {
            return Err(Refusal::Protocol { found: protocol });
        }
        let digest = digest(token);
        let unknown = Refusal::UnknownLease { lease, generation };
        let Some(held) = self.leases.get_mut(lease).filter(|held| held.generation == generation) else {
            return Err(unknown);
        };
        // Who it belongs to is nobody else's business: the same answer.
        if !held.belongs_to(peer, &digest) {
            return Err(unknown);
        }
        // The worker knows better than we do that the old connection is gone.
        if let Some(old) = held.connection() {
            self.actions.push(Action::Close { connection: old });
        }
        held.phase = LeasePhase::Held { connection };
        held.unsettled = false;
        self.actions.push(Action::Reclaimed { connection, lease, generation });
        self.actions.push(Action::Publish(Notice::Lease(lease)));
        Ok(())
    }

    // ---- ending --------------------------------------------------------------------------------------------------

    fn connection_ended(&mut self, connection: ConnectionId) {
        for generation in self.generations.values_mut() {
            generation
                .waiters
                .retain(|waiter| !matches!(waiter, Waiter::Worker { connection: c, .. } if *c == connection));
        }
        let Some(id) = self.leases.by_connection(connection).map(|lease| lease.id) else { return };
        if let Some(lease) = self.leases.get_mut(id) {
            lease.phase = LeasePhase::Disconnected { since: self.now };
            self.actions.push(Action::Publish(Notice::Lease(id)));
        }
    }

    fn end_lease(&mut self, id: u64) {
        let Some(lease) = self.leases.remove(id) else { return };
        self.ledger.release(RowKey::Lease(id));
        if let Some(connection) = lease.connection() {
            self.actions.push(Action::Close { connection });
        }
        self.actions.push(Action::ForgetLease { lease: id });
        self.actions.push(Action::Publish(Notice::LeaseEnded(id)));
        self.drop_if_unused(lease.generation);
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

    // ---- look-ups ------------------------------------------------------------------------------------------------

    /// The newest generation of a model that can be attached.
    fn ready(&self, model: &str) -> Option<&Generation> {
        self.generations.values().rfind(|g| g.model == model && g.phase == Phase::Ready)
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

fn lease_row(lease: &Lease) -> Row {
    /// The connection, the record and the worker's pidfd.
    const FDS: u64 = 3;
    Row {
        device: lease.device.clone(),
        bytes: lease.kv_bytes.saturating_add(lease.workspace_bytes),
        fds: FDS,
    }
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
