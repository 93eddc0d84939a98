// SPDX-License-Identifier: Apache-2.0

//! The event loop of the weight-server: one task that owns the state machine. It takes inputs,
//! applies them to `state`, and executes the resulting actions.
//!
//! Everything that is not a plain value lives here: descriptors, connections, child processes and
//! waiting calls. The loop makes no decisions.

#[cfg(feature = "fuzzing")]
pub mod fuzzing;

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use handoff::lease_record::LeaseRecord;
use memory::numa;
use service::{ByteSize, RunningClock};
use tokio::sync::{broadcast, mpsc, oneshot};
use tokio::task::JoinHandle;

use crate::catalog::{GenerationIntegrity, GenerationPhase, LoadKey};
use crate::config::LoaderThreads;
use crate::events::{ChangeNotice, VerifyOutcome, WeightServerAction, WeightServerEvent};
use crate::fd_store::{FdStoreClient, FdStoreRequest};
use crate::handoff_server::ProtocolViolations;
use crate::held_fds::{GenerationFds, LeaseFds};
use crate::ids::{CallId, ConnectionId};
use crate::lease_table::WorkerProcess;
use crate::load_permit::LoadPermit;
use crate::loader_child::{LoadJob, LoaderHandle, LoaderProgram, start};
use crate::messages::{ConnectionCommand, InputSender, LoadCall, LoopInput};
use crate::refusal::{UnloadRefusal, VerifyFailure};
use crate::state::WeightServerState;
use crate::status::{CatalogChange, StatusSnapshot};
use crate::stored_fds::StoredFdName;
use crate::system_limits::available_bytes_for;
use crate::verifier_child::{self, VerifierHandle};
use crate::waiters::WaiterId;

/// Changes that a slow client of WatchEvents may fall behind.
const CHANGE_QUEUE_CAPACITY: usize = 256;

const TICK: Duration = Duration::from_secs(1);

#[derive(Debug)]
struct ConnectedWorker {
    commands: mpsc::Sender<ConnectionCommand>,
    /// The pidfd of the attaching process, until a lease takes it.
    pidfd: Option<OwnedFd>,
}

#[derive(Debug)]
struct HeldLease {
    fds: LeaseFds,
    watch: JoinHandle<()>,
}

/// The task that waits for the exit of an awaited worker. Dropping it closes the pidfd.
#[derive(Debug)]
struct AwaitedWatch(JoinHandle<()>);

impl Drop for AwaitedWatch {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[derive(Debug)]
pub(crate) struct WeightServerLoop {
    state: WeightServerState,
    started: Instant,
    /// Deadlines of loads and leases do not pass while this process is stopped.
    clock: RunningClock,
    inputs: InputSender,
    loader: LoaderProgram,
    loader_threads: LoaderThreads,
    fd_store: FdStoreClient,
    violations: Arc<ProtocolViolations>,
    adoption_notes: Vec<String>,
    changes: broadcast::Sender<CatalogChange>,
    generations: HashMap<u64, Arc<GenerationFds>>,
    leases: HashMap<u64, HeldLease>,
    /// By process id, workers whose exit the state wants to know of before they have a lease.
    awaited: HashMap<i32, AwaitedWatch>,
    clients: HashMap<ConnectionId, ConnectedWorker>,
    loaders: HashMap<u64, LoaderHandle>,
    verifiers: HashMap<u64, VerifierHandle>,
    load_calls: HashMap<CallId, LoadCall>,
    unload_calls: HashMap<CallId, oneshot::Sender<Result<u32, UnloadRefusal>>>,
    verify_calls: HashMap<CallId, oneshot::Sender<Result<VerifyOutcome, VerifyFailure>>>,
    next_call: u64,
}

/// What the event loop is built from.
#[derive(Debug)]
pub(crate) struct WeightServerLoopParts {
    pub(crate) state: WeightServerState,
    pub(crate) inputs: InputSender,
    pub(crate) loader: LoaderProgram,
    pub(crate) loader_threads: LoaderThreads,
    pub(crate) fd_store: FdStoreClient,
    pub(crate) violations: Arc<ProtocolViolations>,
    pub(crate) adoption_notes: Vec<String>,
    pub(crate) generations: HashMap<u64, Arc<GenerationFds>>,
    pub(crate) leases: Vec<(u64, LeaseFds)>,
    /// Workers that may return what they hold.
    pub(crate) awaited: Vec<(WorkerProcess, OwnedFd)>,
}

impl WeightServerLoop {
    pub(crate) fn new(parts: WeightServerLoopParts, started: Instant) -> Self {
        let mut driver = Self {
            state: parts.state,
            started,
            clock: RunningClock::new(started, 2 * TICK),
            inputs: parts.inputs,
            loader: parts.loader,
            loader_threads: parts.loader_threads,
            fd_store: parts.fd_store,
            violations: parts.violations,
            adoption_notes: parts.adoption_notes,
            changes: broadcast::channel(CHANGE_QUEUE_CAPACITY).0,
            generations: parts.generations,
            leases: HashMap::new(),
            awaited: HashMap::new(),
            clients: HashMap::new(),
            loaders: HashMap::new(),
            verifiers: HashMap::new(),
            load_calls: HashMap::new(),
            unload_calls: HashMap::new(),
            verify_calls: HashMap::new(),
            next_call: 0,
        };
        for (lease, fds) in parts.leases {
            driver.watch_lease(lease, fds);
        }
        for (worker, pidfd) in parts.awaited {
            driver.watch_awaited(worker.pid, pidfd);
        }
        driver
    }

    pub(crate) fn changes(&self) -> broadcast::Sender<CatalogChange> {
        self.changes.clone()
    }

    /// Runs until every sender is gone or the task is aborted.
    pub(crate) async fn run(mut self, mut inputs: mpsc::Receiver<LoopInput>) {
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                input = inputs.recv() => match input {
                    Some(input) => self.handle_input(input),
                    None => return,
                },
                _ = tick.tick() => self.handle_event(WeightServerEvent::Tick),
            }
        }
    }

    fn handle_input(&mut self, input: LoopInput) {
        match input {
            LoopInput::Event(event) => {
                if let WeightServerEvent::ConnectionEnded { connection } = event {
                    self.clients.remove(&connection);
                }
                if let WeightServerEvent::LoadFailed { generation, .. }
                | WeightServerEvent::LoaderEnded { generation } = event
                {
                    self.loaders.remove(&generation);
                }
                if let WeightServerEvent::Verified { generation, .. }
                | WeightServerEvent::VerifyFailed { generation, .. } = event
                {
                    self.verifiers.remove(&generation);
                }
                self.handle_event(event);
            }
            LoopInput::Attach { connection, peer, pidfd, params, commands } => {
                self.clients.insert(connection, ConnectedWorker { commands, pidfd: Some(pidfd) });
                self.handle_event(WeightServerEvent::AttachRequested { connection, peer, params });
            }
            LoopInput::Reclaim { connection, peer, pidfd, claim, commands } => {
                self.clients.insert(connection, ConnectedWorker { commands, pidfd: Some(pidfd) });
                self.handle_event(WeightServerEvent::ReclaimRequested { connection, peer, claim });
            }
            LoopInput::Returned { connection, generation, fds } => {
                // The number is the worker's: descriptors of another generation stay.
                self.generations.entry(generation.id).or_insert(fds);
                self.handle_event(WeightServerEvent::GenerationReturned { connection, generation });
            }
            LoopInput::LoadHandedOver { generation, contents, fds } => {
                self.generations.insert(generation, Arc::new(fds));
                self.handle_event(WeightServerEvent::LoadHandedOver { generation, contents });
            }
            LoopInput::AddDevice { device } => {
                let node_bytes = numa::available_on(device.numa_node.into_iter());
                self.handle_event(WeightServerEvent::DeviceAdded { device, node_bytes });
            }
            LoopInput::Load { params, call } => {
                let id = self.next_call();
                self.load_calls.insert(id, call);
                let available_bytes = available_bytes_for(&params.device);
                self.handle_event(WeightServerEvent::LoadRequested { call: id, params, available_bytes });
            }
            LoopInput::Unload { model, generation, answer } => {
                let id = self.next_call();
                self.unload_calls.insert(id, answer);
                self.handle_event(WeightServerEvent::UnloadRequested { call: id, model, generation });
            }
            LoopInput::Verify { model, device, answer } => {
                let id = self.next_call();
                self.verify_calls.insert(id, answer);
                self.handle_event(WeightServerEvent::VerifyRequested { call: id, model, device });
            }
            LoopInput::AllowToken { name, digest, answer } => {
                // The token is set even if the caller has gone away.
                let _ = answer.send(self.state.allow_token(name, digest));
            }
            LoopInput::ForgetToken { name } => self.state.forget_token(&name),
            LoopInput::Status { answer } => {
                let fd_store = self.fd_store.is_healthy();
                let snapshot = StatusSnapshot::of(
                    &self.state,
                    fd_store,
                    self.violations.count(),
                    self.adoption_notes.clone(),
                );
                let _ = answer.send(snapshot);
            }
            LoopInput::SupervisorReplaced => {
                tracing::info!("a new supervisor runs: storing all descriptors in its FD store");
                let generations = self.generations.iter().map(|(id, fds)| (*id, Arc::clone(fds))).collect();
                let retired = self.state.generations().filter(|g| g.phase == GenerationPhase::Retiring);
                let retired = retired.map(|generation| generation.id).collect();
                let leases = self.leases.iter().map(|(id, held)| (*id, held.fds.clone())).collect();
                self.fd_store.send(FdStoreRequest::Restore { generations, retired, leases });
            }
        }
    }

    fn next_call(&mut self) -> CallId {
        self.next_call += 1;
        CallId(self.next_call)
    }

    fn handle_event(&mut self, event: WeightServerEvent) {
        let mut changed = false;
        let now = self.clock.advance(Instant::now()) - self.started;
        let mut next = VecDeque::from([event]);
        while let Some(event) = next.pop_front() {
            for action in self.state.handle(event, now) {
                changed |= matches!(
                    action,
                    WeightServerAction::Publish(_) | WeightServerAction::SendProgress { .. }
                );
                if let Some(consequence) = self.execute(action) {
                    next.push_back(consequence);
                }
            }
        }
        self.awaited.retain(|pid, _| self.state.is_awaited(*pid));
        if changed {
            self.fd_store.report_status(self.status_line());
        }
    }

    /// Executes one action. If it fails, the consequence is returned as an event.
    fn execute(&mut self, action: WeightServerAction) -> Option<WeightServerEvent> {
        match action {
            WeightServerAction::StoreLease { lease, connection, record } => {
                let stored = self.store_lease(lease, connection, &record);
                return (!stored).then_some(WeightServerEvent::ProcessEnded { lease });
            }
            WeightServerAction::StartLoader { generation } => self.start_loader(generation),
            WeightServerAction::Proceed { generation } => {
                let loader = self.loaders.get_mut(&generation);
                let loader = loader.expect("invariant: a generation whose plan is reserved has a loader");
                loader.proceed(LoadPermit::ReadFiles);
            }
            WeightServerAction::ProceedCopying { generation, source } => {
                let fds = self.generations.get(&source);
                let fds = Arc::clone(fds.expect("invariant: a resident generation has descriptors"));
                let loader = self.loaders.get_mut(&generation);
                let loader = loader.expect("invariant: a generation whose plan is reserved has a loader");
                loader.proceed(LoadPermit::Copy(fds));
            }
            WeightServerAction::StopLoader { generation } => drop(self.loaders.remove(&generation)),
            WeightServerAction::StoreGeneration { generation } => {
                let fds = self.generations.get(&generation);
                let fds = fds.expect("invariant: a generation that is stored has descriptors");
                self.fd_store.send(FdStoreRequest::StoreGeneration { generation, fds: Arc::clone(fds) });
            }
            WeightServerAction::StartVerifier { generation } => self.start_verifier(generation),
            WeightServerAction::StopVerifier { generation } => drop(self.verifiers.remove(&generation)),
            WeightServerAction::MarkRetired { generation } => {
                self.fd_store.send(FdStoreRequest::MarkRetired { generation })
            }
            WeightServerAction::UnmarkRetired { generation } => self
                .fd_store
                .send(FdStoreRequest::Remove { name: StoredFdName::Retired { generation }.to_string() }),
            WeightServerAction::RemoveGeneration { generation } => {
                if let Some(fds) = self.generations.remove(&generation) {
                    let allocations = fds.allocations().len();
                    self.fd_store.send(FdStoreRequest::RemoveGeneration { generation, allocations });
                }
            }
            WeightServerAction::RemoveLease { lease } => {
                if let Some(held) = self.leases.remove(&lease) {
                    held.watch.abort();
                    self.fd_store.send(FdStoreRequest::RemoveLease { lease });
                }
            }
            WeightServerAction::Deliver { connection, lease, generation } => {
                let fds = self.generations.get(&generation);
                let fds = Arc::clone(fds.expect("invariant: the generation of a lease has descriptors"));
                self.send_command(connection, ConnectionCommand::Deliver { lease, generation, fds });
            }
            WeightServerAction::RequestReturn { connection, fds } => {
                self.send_command(connection, ConnectionCommand::RequestReturn { fds });
            }
            WeightServerAction::Reclaimed { connection, lease, generation } => {
                // The lease has its pidfd already.
                if let Some(client) = self.clients.get_mut(&connection) {
                    client.pidfd = None;
                }
                self.send_command(connection, ConnectionCommand::Reclaimed { lease, generation });
            }
            WeightServerAction::Refuse { connection, refusal } => {
                self.send_command(connection, ConnectionCommand::Refuse(refusal))
            }
            WeightServerAction::Close { connection } => {
                self.send_command(connection, ConnectionCommand::Close)
            }
            WeightServerAction::Publish(notice) => self.publish(notice),
            other => self.execute_reply(other),
        }
        None
    }

    /// Executes the actions that only answer or inform a caller.
    fn execute_reply(&mut self, action: WeightServerAction) {
        match action {
            WeightServerAction::ReplyVerify { call, result } => {
                if let Err(failure) = &result {
                    tracing::warn!(%failure, "cannot verify a model");
                }
                if let Some(answer) = self.verify_calls.remove(&call) {
                    let _ = answer.send(result);
                }
            }
            WeightServerAction::ReportReloadFailure { model, failure } => {
                tracing::error!(model, %failure, "cannot reload a damaged model");
            }
            WeightServerAction::ReportCopyFailure { generation, source, failure } => {
                tracing::warn!(
                    generation,
                    source,
                    %failure,
                    "cannot copy the weights from another device: reading the file"
                );
            }
            WeightServerAction::SendProgress { waiter: WaiterId::Worker(connection), progress } => {
                // A worker that does not read loses progress reports, nothing else.
                if let Some(client) = self.clients.get(&connection) {
                    let _ = client.commands.try_send(ConnectionCommand::Waiting(progress));
                }
            }
            WeightServerAction::SendProgress { waiter: WaiterId::Call(call), progress } => {
                if let Some(call) = self.load_calls.get(&call) {
                    call.progress.send_replace(Some(progress));
                }
            }
            WeightServerAction::ReplyLoad { call, result } => {
                if let Err(failure) = &result {
                    tracing::warn!(%failure, "load failed");
                }
                if let Some(call) = self.load_calls.remove(&call) {
                    // The caller may have gone away; the load stays valid.
                    let _ = call.answer.send(result);
                }
            }
            WeightServerAction::ReplyUnload { call, result } => {
                if let Some(answer) = self.unload_calls.remove(&call) {
                    let _ = answer.send(result);
                }
            }
            other => unreachable!("invariant: `execute` handles every action that is not a reply: {other:?}"),
        }
    }

    /// Sends a command to a connection. If its queue is full, the peer does not read, and the
    /// connection is closed.
    fn send_command(&mut self, connection: ConnectionId, order: ConnectionCommand) {
        if let Some(client) = self.clients.get(&connection)
            && client.commands.try_send(order).is_err()
        {
            // The connection's task ends when it sees the closed channel.
            self.clients.remove(&connection);
        }
    }

    fn start_loader(&mut self, generation: u64) {
        // A later action of the same event may have removed the generation again.
        let Some(found) = self.state.generation(generation) else { return };
        tracing::info!(generation, model = found.model, path = %found.path().display(), "loading");
        let job = LoadJob {
            generation,
            model: found.model.clone(),
            key: LoadKey::clone(&found.key),
            threads: self.loader_threads.onto(&found.key.device),
            unified_memory: self.state.ledger().is_unified(&found.key.device),
        };
        self.loaders.insert(generation, start(job, self.loader.clone(), self.inputs.clone()));
    }

    fn start_verifier(&mut self, generation: u64) {
        let (Some(found), Some(fds)) = (self.state.generation(generation), self.generations.get(&generation))
        else {
            return;
        };
        tracing::info!(generation, model = found.model, "verifying checksums");
        let (device, fds) = (found.key.device.clone(), Arc::clone(fds));
        let handle = verifier_child::start(generation, device, fds, self.loader.clone(), self.inputs.clone());
        self.verifiers.insert(generation, handle);
    }

    /// Stores a lease and starts to watch its process. On failure the lease ends as if the process
    /// had exited: the worker has received nothing and never will.
    fn store_lease(&mut self, lease: u64, connection: ConnectionId, record: &LeaseRecord) -> bool {
        let pidfd = self.clients.get_mut(&connection).and_then(|client| client.pidfd.take());
        // The pidfd is missing if the connection was closed because its peer did not read.
        let Some(pidfd) = pidfd else { return false };
        match record.to_memfd() {
            Ok(record) => {
                let fds = LeaseFds { record: Arc::new(record), pidfd: Arc::new(pidfd) };
                self.watch_lease(lease, fds.clone());
                self.fd_store.send(FdStoreRequest::StoreLease { lease, fds });
                true
            }
            Err(error) => {
                let cause = service::exit::one_line(&error);
                tracing::error!(lease, cause, "cannot store a lease record: closing the worker's connection");
                self.clients.remove(&connection);
                false
            }
        }
    }

    /// Waits for the exit of a worker that may return what it holds.
    fn watch_awaited(&mut self, pid: i32, pidfd: OwnedFd) {
        let inputs = self.inputs.clone();
        let watch = tokio::spawn(async move {
            // If the process cannot be watched, the state stops waiting for it after a while.
            if handoff::event_loop::wait_for_process_end(Arc::new(pidfd)).await.is_ok() {
                inputs.send(LoopInput::Event(WeightServerEvent::AwaitedProcessEnded { pid })).await;
            }
        });
        self.awaited.insert(pid, AwaitedWatch(watch));
    }

    /// Keeps a lease's descriptors and waits for the exit of its process.
    fn watch_lease(&mut self, lease: u64, fds: LeaseFds) {
        let inputs = self.inputs.clone();
        let pidfd = Arc::clone(&fds.pidfd);
        let watch = tokio::spawn(async move {
            match handoff::event_loop::wait_for_process_end(pidfd).await {
                Ok(()) => inputs.send(LoopInput::Event(WeightServerEvent::ProcessEnded { lease })).await,
                Err(error) => {
                    tracing::error!(lease, %error, "cannot watch a worker's process: its lease ends only with a Detach frame");
                }
            }
        });
        self.leases.insert(lease, HeldLease { fds, watch });
    }

    fn publish(&self, notice: ChangeNotice) {
        match notice {
            ChangeNotice::GenerationRemoved(generation) => tracing::info!(generation, "generation removed"),
            ChangeNotice::LeaseEnded(lease) => tracing::info!(lease, "lease ended"),
            ChangeNotice::Generation(generation) => {
                if let Some(found) = self.state.generation(generation) {
                    let (phase, integrity) = (found.phase, found.integrity);
                    if integrity == GenerationIntegrity::Quarantined {
                        tracing::error!(
                            generation,
                            model = found.model,
                            "weights are damaged: generation quarantined"
                        );
                    }
                    tracing::info!(generation, model = found.model, ?phase, ?integrity, "generation");
                }
            }
            ChangeNotice::Lease(lease) => {
                if let Some(found) = self.state.lease(lease) {
                    tracing::info!(lease, pid = found.worker.pid, phase = ?found.phase, "lease");
                }
            }
        }
        if let Some(change) = CatalogChange::of(&self.state, notice) {
            // A change without subscribers is dropped.
            let _ = self.changes.send(change);
        }
    }

    /// The status text for `ballast ps` and `systemctl status`.
    fn status_line(&self) -> String {
        let loading = self.state.generations().find(|g| g.is_pending());
        let held = self.state.generations().filter(|g| !g.is_pending());
        let bytes: u64 = held.map(|g| g.contents.allocation_bytes).sum();
        let leases = self.state.leases().count();
        match loading {
            Some(g) => format!(
                "loading {}: {} of {}",
                g.model,
                ByteSize(g.done_bytes).rounded(),
                ByteSize(g.contents.tensor_bytes).rounded()
            ),
            None => format!("holding {} for {leases} leases", ByteSize(bytes).rounded()),
        }
    }
}
