// SPDX-License-Identifier: Apache-2.0

//! The weight-server process around its real state machine. It does in the simulation what the
//! event loop, the FD store's client and the loaders do in the executable.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::time::{Duration, Instant};

use handoff::lease_record::LeaseRecord;
use memory::manifest::HOST_DEVICE;
use proto::weights::v1 as wire;
use service::RunningClock;
use weight_server::awaited_workers::first_id;
use weight_server::catalog::GenerationPhase;
use weight_server::events::{
    AdoptedGeneration, LoadParams, VerifyReport, WeightServerAction, WeightServerEvent,
};
use weight_server::ids::{CallId, ConnectionId};
use weight_server::lease_table::WorkerProcess;
use weight_server::refusal::{LoadFailure, UnloadRefusal};
use weight_server::state::{InheritedState, WeightServerLimits, WeightServerState};
use weight_server::stored_fds::{SortedFds, StoredGeneration, sort_stored};
use weight_server::waiters::WaiterId;

use crate::cures::Cure;
use crate::fd_writer::{FdJob, FdWriter};
use crate::fleet::Fleet;
use crate::messages::{
    AdminAnswer, AdminRequest, Message, Notice, ServerFrame, SimManifest, StoredItem, ToWeightServer,
    ToWorker,
};
use crate::network::{Link, MILLISECOND, SECOND, SimPid};
use crate::weights::{ALLOCATIONS, WeightCopy, contents_of, path_of, source_of};

pub(crate) const UID: u32 = 1000;
const TICK: Duration = Duration::from_secs(1);

/// The descriptors of a generation.
#[derive(Clone, Debug)]
pub(crate) struct HeldGeneration {
    pub(crate) manifest: Rc<SimManifest>,
    pub(crate) copy: Rc<WeightCopy>,
}

#[derive(Debug)]
pub(crate) struct RunningServer {
    pub(crate) state: WeightServerState,
    clock: RunningClock,
    started: Instant,
    pub(crate) generations: BTreeMap<u64, HeldGeneration>,
    pub(crate) leases: BTreeMap<u64, LeaseRecord>,
    connections: BTreeMap<u64, SimPid>,
    pub(crate) loaders: BTreeSet<u64>,
    verifiers: BTreeSet<u64>,
    calls: BTreeMap<CallId, (u64, Option<u64>)>,
    last_call: u64,
}

#[derive(Debug)]
pub(crate) struct SimWeightServer {
    pub(crate) pid: SimPid,
    inherited: Vec<(String, StoredItem)>,
    /// Absent until its sockets are bound.
    pub(crate) running: Option<RunningServer>,
    pub(crate) writer: FdWriter,
}

impl SimWeightServer {
    pub(crate) fn new(pid: SimPid, inherited: Vec<(String, StoredItem)>) -> Self {
        Self { pid, inherited, running: None, writer: FdWriter::default() }
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.running.is_some()
    }

    pub(crate) fn connections_of(&self, pid: SimPid) -> Vec<u64> {
        let connections = self.running.iter().flat_map(|server| &server.connections);
        connections.filter(|(_, of)| **of == pid).map(|(connection, _)| *connection).collect()
    }

    pub(crate) fn leases_of(&self, pid: SimPid) -> Vec<u64> {
        let leases = self.running.iter().flat_map(|server| &server.leases);
        leases.filter(|(_, record)| record.pid == pid.cast_signed()).map(|(lease, _)| *lease).collect()
    }
}

impl Fleet {
    pub(crate) fn handle_weight_server(&mut self, event: ToWeightServer) {
        match event {
            ToWeightServer::Ready => self.adopt(),
            ToWeightServer::Tick => {
                self.handle_weight_server_event(WeightServerEvent::Tick);
                if let Some(server) = &self.weight_server {
                    let tick = Message::WeightServer(ToWeightServer::Tick);
                    self.net.timer(server.pid, SECOND, tick);
                }
            }
            ToWeightServer::Event(event) => self.handle_input(*event),
            ToWeightServer::LoaderDone { generation } => self.finish_load(generation),
            ToWeightServer::Attach { connection, pid, params } => {
                self.accept(connection, pid);
                let (connection, peer) = (ConnectionId(connection), peer(pid));
                let params = *params;
                self.handle_weight_server_event(WeightServerEvent::AttachRequested {
                    connection,
                    peer,
                    params,
                });
            }
            ToWeightServer::Reclaim { connection, pid, claim } => {
                self.accept(connection, pid);
                let (connection, peer) = (ConnectionId(connection), peer(pid));
                let claim = *claim;
                self.handle_weight_server_event(WeightServerEvent::ReclaimRequested {
                    connection,
                    peer,
                    claim,
                });
            }
            ToWeightServer::Returned { connection, manifest, copy } => {
                let generation = adopted(&manifest, false);
                if let Some(server) = self.running_server() {
                    server.generations.entry(generation.id).or_insert(HeldGeneration { manifest, copy });
                }
                let connection = ConnectionId(connection);
                self.handle_weight_server_event(WeightServerEvent::GenerationReturned {
                    connection,
                    generation,
                });
            }
            ToWeightServer::Admin { call, request } => self.handle_admin(call, request),
            ToWeightServer::BarrierAnswered { number } | ToWeightServer::BarrierTimeout { number } => {
                self.end_barrier(number);
            }
        }
        self.check_weight_server();
    }

    pub(crate) fn running_server(&mut self) -> Option<&mut RunningServer> {
        self.weight_server.as_mut()?.running.as_mut()
    }

    fn accept(&mut self, connection: u64, pid: SimPid) {
        let is_alive = self.is_alive(pid);
        let Some(server) = self.weight_server.as_mut() else { return };
        let to = server.pid;
        if let Some(running) = server.running.as_mut() {
            running.connections.insert(connection, pid);
            if !is_alive {
                let ended = WeightServerEvent::ConnectionEnded { connection: ConnectionId(connection) };
                let message = Message::WeightServer(ToWeightServer::Event(Box::new(ended)));
                self.net.send(Link::Handoff(connection), to, message);
            }
        }
    }

    /// Adopts what the FD store holds, and binds the sockets.
    fn adopt(&mut self) {
        let Some(server) = self.weight_server.as_mut() else { return };
        let (pid, inherited) = (server.pid, std::mem::take(&mut server.inherited));
        let SortedFds { generations, leases, unrecognized } = sort_stored(inherited);
        let mut removed = unrecognized;
        let mut held = BTreeMap::new();
        let mut adopted_generations = Vec::new();
        for (id, stored) in generations {
            let (is_retired, names) = (stored.is_retired, stored.names(id));
            match read_generation(id, stored) {
                Some(generation) => {
                    adopted_generations.push(adopted(&generation.manifest, is_retired));
                    held.insert(id, generation);
                }
                None => removed.extend(names),
            }
        }
        let mut records = BTreeMap::new();
        for (id, stored) in leases {
            if let StoredItem::Record(record) = stored.record
                && held.contains_key(&record.generation)
                && self.processes.contains_key(&record.pid.cast_unsigned())
            {
                records.insert(id, record);
            } else {
                removed.extend([format!("l{id}.record"), format!("l{id}.pidfd")]);
            }
        }
        let is_adopted = |pid: i32| records.values().any(|record: &LeaseRecord| record.pid == pid);
        let recorded = self.recorded.iter().filter(|(name, _)| name.starts_with("worker-"));
        let alive = recorded.map(|(_, (pid, _))| *pid).filter(|pid| self.processes.contains_key(pid));
        let mut awaited: Vec<WorkerProcess> =
            alive.filter(|pid| !is_adopted(pid.cast_signed())).map(peer).collect();
        if self.missing == Some(Cure::ReturnedWeights) {
            awaited.clear();
        }
        let has_lost_generation = removed.iter().any(|name| name.starts_with('g'));
        let inherited = InheritedState {
            first_id: first_id(!has_lost_generation && awaited.is_empty(), pid),
            generations: adopted_generations,
            leases: records.values().cloned().collect(),
            awaited,
        };
        let limits = WeightServerLimits {
            device_bytes: BTreeMap::from([(HOST_DEVICE.to_owned(), self.plan.host_bytes)]),
            unified_devices: BTreeSet::new(),
            fds: 1000,
            uids: BTreeSet::from([UID]),
            host_capacity_is_measured: false,
            tokens_required: true,
        };
        self.counts.adopted_generations += held.len();
        let now = self.instant();
        let running = RunningServer {
            state: WeightServerState::new(limits, inherited, Duration::ZERO),
            clock: RunningClock::new(now, 2 * TICK),
            started: now,
            generations: held,
            leases: records,
            connections: BTreeMap::new(),
            loaders: BTreeSet::new(),
            verifiers: BTreeSet::new(),
            calls: BTreeMap::new(),
            last_call: 0,
        };
        let server = self.weight_server.as_mut().expect("it starts");
        server.running = Some(running);
        removed.into_iter().for_each(|name| self.write_fds(FdJob::RemoveName(name)));
        self.notify(pid, Notice::Ready);
        self.net.timer(pid, SECOND, Message::WeightServer(ToWeightServer::Tick));
    }

    /// An event of a connection, a loader, a verifier or a process.
    fn handle_input(&mut self, event: WeightServerEvent) {
        let Some(server) = self.running_server() else { return };
        match &event {
            WeightServerEvent::ConnectionEnded { connection } => {
                server.connections.remove(&connection.0);
            }
            WeightServerEvent::LoadPlanned { generation, .. } if !server.loaders.contains(generation) => {
                return;
            }
            WeightServerEvent::LoadFailed { generation, .. } if !server.loaders.remove(generation) => return,
            WeightServerEvent::Verified { generation, .. } if !server.verifiers.remove(generation) => return,
            _ => {}
        }
        self.handle_weight_server_event(event);
    }

    pub(crate) fn handle_weight_server_event(&mut self, event: WeightServerEvent) {
        let now = self.instant();
        let mut next = VecDeque::from([event]);
        while let Some(event) = next.pop_front() {
            let Some(server) = self.running_server() else { return };
            let now = server.clock.advance(now) - server.started;
            for action in server.state.handle(event, now) {
                next.extend(self.execute(action));
            }
        }
    }

    fn execute(&mut self, action: WeightServerAction) -> Option<WeightServerEvent> {
        use WeightServerAction as Action;
        match action {
            Action::StoreLease { lease, record, .. } => {
                self.check_new_lease(lease);
                let is_alive = self.is_alive(record.pid.cast_unsigned());
                self.running_server()?.leases.insert(lease, record.clone());
                self.write_fds(FdJob::StoreLease { record });
                return (!is_alive).then_some(WeightServerEvent::ProcessEnded { lease });
            }
            Action::StartLoader { generation } => {
                let now = self.net.now;
                let server = self.running_server()?;
                server.loaders.insert(generation);
                let source = source_of(&server.state.generation(generation)?.key);
                let contents = contents_of(source, 0, now);
                let planned =
                    WeightServerEvent::LoadPlanned { generation, contents, available_bytes: u64::MAX };
                self.post_to_server(10, 200, planned);
            }
            // The simulated models have one copy each, so no load is a copy; it would take as long.
            Action::Proceed { generation } | Action::ProceedCopying { generation, .. } => {
                let after = self.net.random.between(50 * MILLISECOND, 2 * SECOND);
                let done = Message::WeightServer(ToWeightServer::LoaderDone { generation });
                self.net.timer(self.weight_server.as_ref()?.pid, after, done);
            }
            Action::StopLoader { generation } => {
                self.running_server()?.loaders.remove(&generation);
            }
            Action::StoreGeneration { generation } => {
                let held = self.running_server()?.generations.get(&generation)?.clone();
                self.write_fds(FdJob::StoreGeneration { held, is_new: true });
            }
            Action::StartVerifier { generation } => {
                self.running_server()?.verifiers.insert(generation);
                let took = Duration::from_secs(1);
                let report =
                    VerifyReport { damaged: Vec::new(), damaged_count: 0, checked_bytes: 1000, took };
                self.post_to_server(500, 1500, WeightServerEvent::Verified { generation, report });
            }
            Action::StopVerifier { generation } => {
                self.running_server()?.verifiers.remove(&generation);
            }
            Action::MarkRetired { generation } => self.write_fds(FdJob::MarkRetired(generation)),
            Action::UnmarkRetired { generation } => {
                self.write_fds(FdJob::RemoveName(format!("g{generation}.retired")));
            }
            Action::RemoveGeneration { generation } => {
                self.running_server()?.generations.remove(&generation)?;
                self.write_fds(FdJob::RemoveGeneration(generation));
            }
            Action::RemoveLease { lease } => {
                self.running_server()?.leases.remove(&lease)?;
                self.write_fds(FdJob::RemoveLease(lease));
            }
            reply => self.execute_reply(reply),
        }
        None
    }

    /// Executes the actions that only answer or inform a peer.
    fn execute_reply(&mut self, action: WeightServerAction) {
        use WeightServerAction as Action;
        match action {
            Action::Deliver { connection, lease, generation } => {
                let held = self.running_server().and_then(|server| server.generations.get(&generation));
                let held = held.expect("invariant: the generation of a lease has descriptors");
                let HeldGeneration { manifest, copy } = held.clone();
                self.send_frame(connection, ServerFrame::Granted { lease, manifest, copy });
            }
            Action::RequestReturn { connection, .. } => {
                self.counts.returns += 1;
                self.send_frame(connection, ServerFrame::ReturnRequested);
            }
            Action::Reclaimed { connection, .. } => {
                self.counts.reclaims += 1;
                self.send_frame(connection, ServerFrame::Reclaimed);
            }
            Action::Refuse { connection, refusal } => {
                self.send_frame(connection, ServerFrame::Refused(refusal.reason()));
            }
            Action::Close { connection } => self.send_frame(connection, ServerFrame::Closed),
            Action::ReplyLoad { call, result } => self.reply_load(call, result.map(|done| done.generation)),
            Action::ReplyUnload { call, result } => {
                let known = self.running_server().and_then(|server| server.calls.remove(&call));
                let Some((call, _)) = known else { return };
                self.answer_admin(
                    call,
                    match result {
                        Err(UnloadRefusal::AwaitingReclaim { .. }) => AdminAnswer::Unavailable,
                        Ok(_) | Err(UnloadRefusal::UnknownModel { .. }) => AdminAnswer::Done,
                    },
                );
            }
            Action::SendProgress { waiter: WaiterId::Worker(connection), .. } => {
                self.send_frame(connection, ServerFrame::Waiting);
            }
            Action::SendProgress { waiter: WaiterId::Call(_), .. }
            | Action::ReplyVerify { .. }
            | Action::ReportReloadFailure { .. }
            | Action::ReportCopyFailure { .. }
            | Action::Publish(_) => {}
            other => unreachable!("invariant: `execute` handles every action that is no reply: {other:?}"),
        }
    }

    pub(crate) fn post_to_server(&mut self, from_ms: u64, to_ms: u64, event: WeightServerEvent) {
        let after = self.net.random.between(from_ms * MILLISECOND, to_ms * MILLISECOND);
        if let Some(server) = &self.weight_server {
            let message = Message::WeightServer(ToWeightServer::Event(Box::new(event)));
            self.net.timer(server.pid, after, message);
        }
    }

    fn send_frame(&mut self, connection: ConnectionId, frame: ServerFrame) {
        let Some(server) = self.running_server() else { return };
        let Some(&pid) = server.connections.get(&connection.0) else { return };
        if matches!(frame, ServerFrame::Closed) {
            server.connections.remove(&connection.0);
        }
        let message = Message::Worker(ToWorker::Frame { connection: connection.0, frame });
        self.net.send(Link::Handoff(connection.0), pid, message);
    }

    fn reply_load(&mut self, call: CallId, result: Result<u64, LoadFailure>) {
        let Some(server) = self.running_server() else { return };
        let Some((call, requested)) = server.calls.remove(&call) else { return };
        let found = result.as_ref().ok().and_then(|id| server.state.generation(*id));
        let source = found.map(|generation| source_of(&generation.key));
        let answer = match (result, source) {
            (Ok(generation), Some(source)) => {
                self.check_load_answer(requested, source);
                AdminAnswer::Loaded { generation, digest: crate::weights::digest_of(source) }
            }
            (Err(LoadFailure::AwaitingReclaim { .. } | LoadFailure::ShuttingDown), _) => {
                AdminAnswer::Unavailable
            }
            (Err(LoadFailure::Reservation(_) | LoadFailure::InsufficientMemory { .. }), _) => {
                AdminAnswer::Failed { is_memory_short: true }
            }
            _ => AdminAnswer::Failed { is_memory_short: false },
        };
        self.answer_admin(call, answer);
    }

    fn handle_admin(&mut self, call: u64, request: AdminRequest) {
        if self.running_server().is_none() {
            return self.answer_admin(call, AdminAnswer::Unavailable);
        }
        let key = match &request {
            AdminRequest::Load { model } => Some(self.files.key(model)),
            _ => None,
        };
        let missing = self.missing;
        let server = self.running_server().expect("it runs");
        match request {
            AdminRequest::AllowToken { name, digest } => {
                let _: Result<(), _> = server.state.allow_token(name, digest);
                self.answer_admin(call, AdminAnswer::Done);
            }
            AdminRequest::ForgetToken { name } => {
                server.state.forget_token(&name);
                self.answer_admin(call, AdminAnswer::Done);
            }
            AdminRequest::Status => {
                let status = status(&server.state);
                self.answer_admin(call, AdminAnswer::Status(Box::new(status)));
            }
            AdminRequest::Load { model } => {
                let named = server.state.generations().find(|g| g.model == model).map(|g| g.id);
                let id = server.next_call(call, key.as_ref().map(source_of));
                if let Some(named) = named.filter(|_| missing == Some(Cure::FileIdentity)) {
                    return self.reply_load(id, Ok(named));
                }
                let key = key.ok_or(LoadFailure::ShuttingDown);
                let path = path_of(&model).into();
                let params = LoadParams { model, path, device: HOST_DEVICE.to_owned(), key };
                let event = WeightServerEvent::LoadRequested { call: id, params, available_bytes: u64::MAX };
                self.handle_weight_server_event(event);
            }
            AdminRequest::Unload { model, generation } => {
                let id = server.next_call(call, None);
                let event = WeightServerEvent::UnloadRequested { call: id, model, generation };
                self.handle_weight_server_event(event);
            }
        }
    }

    /// The loader has filled the memory and hands it over.
    fn finish_load(&mut self, id: u64) {
        let now = self.net.now;
        let Some(server) = self.running_server() else { return };
        let Some(generation) = server.state.generation(id).filter(|_| server.loaders.contains(&id)) else {
            return;
        };
        let (key, model) = (generation.key.clone(), generation.model.clone());
        self.check_one_copy(source_of(&key));
        let copy = self.files.load(source_of(&key));
        self.counts.loads += 1;
        let contents = contents_of(copy.source, copy.inode, now);
        let manifest = Rc::new(SimManifest { generation: id, model, key, contents: contents.clone() });
        let server = self.running_server().expect("it runs");
        server.loaders.remove(&id);
        server.generations.insert(id, HeldGeneration { manifest, copy });
        self.handle_weight_server_event(WeightServerEvent::LoadHandedOver { generation: id, contents });
        // The exit of the loader. One that does not exit is killed after 5 s.
        self.post_to_server(1, 5000, WeightServerEvent::LoaderEnded { generation: id });
    }
}

impl RunningServer {
    fn next_call(&mut self, call: u64, source: Option<u64>) -> CallId {
        self.last_call += 1;
        let id = CallId(self.last_call);
        self.calls.insert(id, (call, source));
        id
    }

    /// How long this process has run, without its pauses.
    pub(crate) fn uptime(&self) -> Duration {
        self.clock.now() - self.started
    }
}

pub(crate) fn peer(pid: SimPid) -> WorkerProcess {
    WorkerProcess { pid: pid.cast_signed(), uid: UID, start_ticks: u64::from(pid) }
}

fn adopted(manifest: &SimManifest, retired: bool) -> AdoptedGeneration {
    let SimManifest { generation, model, key, contents } = manifest;
    let (key, contents) = (key.clone(), contents.clone());
    AdoptedGeneration { id: *generation, model: model.clone(), key, contents, retired }
}

/// The descriptors of a generation, if they are complete.
fn read_generation(id: u64, stored: StoredGeneration<StoredItem>) -> Option<HeldGeneration> {
    let mut items = stored.into_ordered().ok()?.into_iter();
    let Some(StoredItem::Manifest(manifest)) = items.next() else { return None };
    let copies: Vec<Rc<WeightCopy>> = items
        .filter_map(|item| match item {
            StoredItem::Allocation { copy, .. } => Some(copy),
            _ => None,
        })
        .collect();
    let is_complete = copies.len() == ALLOCATIONS && manifest.generation == id;
    let copy = copies.into_iter().next().filter(|_| is_complete)?;
    Some(HeldGeneration { manifest, copy })
}

fn status(state: &WeightServerState) -> wire::Status {
    let generations = state.generations().map(|generation| wire::Generation {
        generation: generation.id,
        model: generation.model.clone(),
        device: generation.key.device.clone(),
        digest: generation.contents.digest.map(|digest| digest.to_vec().into()).unwrap_or_default(),
        state: match generation.phase {
            GenerationPhase::Queued => wire::GenerationState::Queued,
            GenerationPhase::Starting | GenerationPhase::AwaitingSource | GenerationPhase::Loading => {
                wire::GenerationState::Loading
            }
            GenerationPhase::Storing => wire::GenerationState::Storing,
            GenerationPhase::Ready => wire::GenerationState::Ready,
            GenerationPhase::Retiring => wire::GenerationState::Retiring,
        }
        .into(),
        ..Default::default()
    });
    let leases = state.leases().map(|lease| wire::Lease {
        lease: lease.id,
        generation: lease.generation,
        pid: lease.worker.pid,
        ..Default::default()
    });
    wire::Status { generations: generations.collect(), leases: leases.collect(), ..Default::default() }
}
