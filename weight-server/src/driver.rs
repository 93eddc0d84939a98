//! The one task that owns the state machine: takes inputs, asks `state` what follows, does it.
//!
//! Everything that isn't a plain value lives here: descriptors, connections, children, waiting calls. Nothing here
//! decides anything.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use memory::lease_record::LeaseRecord;
use proto::weights::v1::Reclaim;
use service::ByteSize;
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio::task::JoinHandle;

use crate::catalog::{Contents, Integrity, LoadKey, Phase};
use crate::config::LoaderThreads;
use crate::events::{
    Action, Ask, CallId, ConnectionId, Event, LoadAnswer, LoadAsk, LoadProgress, Notice, VerifyAnswer,
    WaiterId,
};
use crate::holdings::{GenerationFds, LeaseFds};
use crate::lease_table::Peer;
use crate::loader_child::{LoadJob, LoaderHandle, LoaderProgram, start};
use crate::measure::available_bytes;
use crate::refusal::{LoadFailure, UnloadRefusal, VerifyFailure};
use crate::share::{Order, Violations};
use crate::snapshot::{Change, Snapshot};
use crate::state::State;
use crate::tokens::TokenError;
use crate::vault::{Vault, VaultJob};
use crate::verifier_child::{self, VerifierHandle};

/// Inputs that wait for the driver. Its work per input is far below what any sender does for it; a full queue makes
/// senders wait.
const INPUT_QUEUE: usize = 1024;

/// Changes that a slow reader of WatchEvents may fall behind.
const CHANGE_QUEUE: usize = 256;

const TICK: Duration = Duration::from_secs(1);

/// Everything that reaches the driver: plain events, and those that carry descriptors or answers.
#[derive(Debug)]
pub(crate) enum Input {
    Event(Event),
    Attach {
        connection: ConnectionId,
        peer: Peer,
        pidfd: OwnedFd,
        ask: Ask,
        orders: mpsc::Sender<Order>,
    },
    Reclaim {
        connection: ConnectionId,
        peer: Peer,
        claim: Reclaim,
        orders: mpsc::Sender<Order>,
    },
    HandedOver {
        generation: u64,
        contents: Contents,
        fds: GenerationFds,
    },
    Load {
        ask: LoadAsk,
        call: LoadCall,
    },
    Unload {
        model: String,
        answer: oneshot::Sender<Result<u32, UnloadRefusal>>,
    },
    Verify {
        model: String,
        device: String,
        answer: oneshot::Sender<Result<VerifyAnswer, VerifyFailure>>,
    },
    AllowToken {
        name: String,
        token: bytes::Bytes,
        answer: oneshot::Sender<Result<(), TokenError>>,
    },
    Status {
        answer: oneshot::Sender<Snapshot>,
    },
    /// The parent has changed, and with it the vault.
    NewVault,
}

/// The driver's ends of an admin call that waits for a load.
#[derive(Debug)]
pub(crate) struct LoadCall {
    pub(crate) progress: watch::Sender<Option<LoadProgress>>,
    pub(crate) answer: oneshot::Sender<Result<LoadAnswer, LoadFailure>>,
}

/// The way in. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Inputs(mpsc::Sender<Input>);

impl Inputs {
    pub(crate) fn channel() -> (Self, mpsc::Receiver<Input>) {
        let (sender, receiver) = mpsc::channel(INPUT_QUEUE);
        (Self(sender), receiver)
    }

    pub(crate) async fn send(&self, input: Input) {
        // The driver is gone only when the process ends.
        let _ = self.0.send(input).await;
    }

    pub(crate) fn send_blocking(&self, input: Input) {
        let _ = self.0.blocking_send(input);
    }
}

#[derive(Debug)]
struct Client {
    orders: mpsc::Sender<Order>,
    /// Of the attaching process, until its lease has it.
    pidfd: Option<OwnedFd>,
}

#[derive(Debug)]
struct HeldLease {
    fds: LeaseFds,
    watch: JoinHandle<()>,
}

#[derive(Debug)]
pub(crate) struct Driver {
    state: State,
    started: Instant,
    inputs: Inputs,
    loader: LoaderProgram,
    loader_threads: LoaderThreads,
    vault: Vault,
    violations: Arc<Violations>,
    adoption_notes: Vec<String>,
    changes: broadcast::Sender<Change>,
    generations: HashMap<u64, Arc<GenerationFds>>,
    leases: HashMap<u64, HeldLease>,
    clients: HashMap<ConnectionId, Client>,
    loaders: HashMap<u64, LoaderHandle>,
    verifiers: HashMap<u64, VerifierHandle>,
    load_calls: HashMap<CallId, LoadCall>,
    unload_calls: HashMap<CallId, oneshot::Sender<Result<u32, UnloadRefusal>>>,
    verify_calls: HashMap<CallId, oneshot::Sender<Result<VerifyAnswer, VerifyFailure>>>,
    next_call: u64,
}

/// What a driver is made of beside its state.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) state: State,
    pub(crate) inputs: Inputs,
    pub(crate) loader: LoaderProgram,
    pub(crate) loader_threads: LoaderThreads,
    pub(crate) vault: Vault,
    pub(crate) violations: Arc<Violations>,
    pub(crate) adoption_notes: Vec<String>,
    pub(crate) generations: HashMap<u64, Arc<GenerationFds>>,
    pub(crate) leases: Vec<(u64, LeaseFds)>,
}

impl Driver {
    pub(crate) fn new(parts: Parts, started: Instant) -> Self {
        let mut driver = Self {
            state: parts.state,
            started,
            inputs: parts.inputs,
            loader: parts.loader,
            loader_threads: parts.loader_threads,
            vault: parts.vault,
            violations: parts.violations,
            adoption_notes: parts.adoption_notes,
            changes: broadcast::channel(CHANGE_QUEUE).0,
            generations: parts.generations,
            leases: HashMap::new(),
            clients: HashMap::new(),
            loaders: HashMap::new(),
            verifiers: HashMap::new(),
            load_calls: HashMap::new(),
            unload_calls: HashMap::new(),
            verify_calls: HashMap::new(),
            next_call: 0,
        };
        for (lease, fds) in parts.leases {
            driver.hold_lease(lease, fds);
        }
        driver
    }

    pub(crate) fn changes(&self) -> broadcast::Sender<Change> {
        self.changes.clone()
    }

    /// Works until every sender of inputs is gone or the task is aborted.
    pub(crate) async fn run(mut self, mut inputs: mpsc::Receiver<Input>) {
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                input = inputs.recv() => match input {
                    Some(input) => self.take(input),
                    None => return,
                },
                _ = tick.tick() => self.handle(Event::Tick),
            }
        }
    }

    fn take(&mut self, input: Input) {
        match input {
            Input::Event(event) => {
                if let Event::ConnectionEnded { connection } = event {
                    self.clients.remove(&connection);
                }
                if let Event::LoadFailed { generation, .. } = event {
                    self.loaders.remove(&generation);
                }
                if let Event::Verified { generation, .. } | Event::VerifyFailed { generation, .. } = event {
                    self.verifiers.remove(&generation);
                }
                self.handle(event);
            }
            Input::Attach { connection, peer, pidfd, ask, orders } => {
                self.clients.insert(connection, Client { orders, pidfd: Some(pidfd) });
                self.handle(Event::AttachAsked { connection, peer, ask });
            }
            Input::Reclaim { connection, peer, claim, orders } => {
                self.clients.insert(connection, Client { orders, pidfd: None });
                let Reclaim { protocol, generation, lease, token } = claim;
                self.handle(Event::ReclaimAsked { connection, peer, protocol, generation, lease, token });
            }
            Input::HandedOver { generation, contents, fds } => {
                self.loaders.remove(&generation);
                self.generations.insert(generation, Arc::new(fds));
                self.handle(Event::LoadHandedOver { generation, contents });
            }
            Input::Load { ask, call } => {
                let id = self.next_call();
                self.load_calls.insert(id, call);
                let available_bytes = available_bytes();
                self.handle(Event::LoadAsked { call: id, ask, available_bytes });
            }
            Input::Unload { model, answer } => {
                let id = self.next_call();
                self.unload_calls.insert(id, answer);
                self.handle(Event::UnloadAsked { call: id, model });
            }
            Input::Verify { model, device, answer } => {
                let id = self.next_call();
                self.verify_calls.insert(id, answer);
                self.handle(Event::VerifyAsked { call: id, model, device });
            }
            Input::AllowToken { name, token, answer } => {
                // A caller that has gone away has its token set all the same.
                let _ = answer.send(self.state.allow_token(name, &token));
            }
            Input::Status { answer } => {
                let vault = self.vault.is_sound();
                let snapshot =
                    Snapshot::of(&self.state, vault, self.violations.count(), self.adoption_notes.clone());
                let _ = answer.send(snapshot);
            }
            Input::NewVault => {
                tracing::info!("a new supervisor: storing everything in its vault");
                let generations = self.generations.iter().map(|(id, fds)| (*id, Arc::clone(fds))).collect();
                let retired = self.state.generations().filter(|g| g.phase == Phase::Retiring);
                let retired = retired.map(|generation| generation.id).collect();
                let leases = self.leases.iter().map(|(id, held)| (*id, held.fds.clone())).collect();
                self.vault.send(VaultJob::Restore { generations, retired, leases });
            }
        }
    }

    fn next_call(&mut self) -> CallId {
        self.next_call += 1;
        CallId(self.next_call)
    }

    fn handle(&mut self, event: Event) {
        let mut changed = false;
        let mut next = VecDeque::from([event]);
        while let Some(event) = next.pop_front() {
            for action in self.state.handle(event, self.started.elapsed()) {
                changed |= matches!(action, Action::Publish(_) | Action::TellWaiting { .. });
                if let Some(consequence) = self.act(action) {
                    next.push_back(consequence);
                }
            }
        }
        if changed {
            self.vault.report(self.status_line());
        }
    }

    /// Does one thing; what follows from its failure is an event again.
    fn act(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::StoreLease { lease, connection, record } => {
                let stored = self.store_lease(lease, connection, &record);
                return (!stored).then_some(Event::ProcessEnded { lease });
            }
            Action::StartLoader { generation } => self.start_loader(generation),
            Action::Proceed { generation } => {
                if let Some(loader) = self.loaders.get_mut(&generation) {
                    loader.proceed();
                }
            }
            Action::StopLoader { generation } => drop(self.loaders.remove(&generation)),
            Action::StoreGeneration { generation } => {
                if let Some(fds) = self.generations.get(&generation) {
                    self.vault.send(VaultJob::StoreGeneration { generation, fds: Arc::clone(fds) });
                }
            }
            Action::StartVerifier { generation } => self.start_verifier(generation),
            Action::StopVerifier { generation } => drop(self.verifiers.remove(&generation)),
            Action::AnswerVerify { call, result } => {
                if let Err(failure) = &result {
                    tracing::warn!(%failure, "a model was not verified");
                }
                if let Some(answer) = self.verify_calls.remove(&call) {
                    let _ = answer.send(result);
                }
            }
            Action::ReportReload { model, failure } => {
                tracing::error!(model, %failure, "a damaged model could not be loaded anew");
            }
            Action::MarkRetired { generation } => self.vault.send(VaultJob::MarkRetired { generation }),
            Action::ForgetGeneration { generation } => {
                if let Some(fds) = self.generations.remove(&generation) {
                    let allocations = fds.allocations().len();
                    self.vault.send(VaultJob::ForgetGeneration { generation, allocations });
                }
            }
            Action::ForgetLease { lease } => {
                if let Some(held) = self.leases.remove(&lease) {
                    held.watch.abort();
                    self.vault.send(VaultJob::ForgetLease { lease });
                }
            }
            Action::Deliver { connection, lease, generation } => {
                if let Some(fds) = self.generations.get(&generation) {
                    let fds = Arc::clone(fds);
                    self.order(connection, Order::Deliver { lease, generation, fds });
                }
            }
            Action::Reclaimed { connection, lease, generation } => {
                self.order(connection, Order::Reclaimed { lease, generation });
            }
            Action::Refuse { connection, refusal } => self.order(connection, Order::Refuse(refusal)),
            Action::Close { connection } => self.order(connection, Order::Close),
            Action::TellWaiting { waiter: WaiterId::Worker(connection), progress } => {
                // A worker that doesn't read loses reports, nothing else.
                if let Some(client) = self.clients.get(&connection) {
                    let _ = client.orders.try_send(Order::Waiting(progress));
                }
            }
            Action::TellWaiting { waiter: WaiterId::Call(call), progress } => {
                if let Some(call) = self.load_calls.get(&call) {
                    call.progress.send_replace(Some(progress));
                }
            }
            Action::AnswerLoad { call, result } => {
                if let Err(failure) = &result {
                    tracing::warn!(%failure, "a load failed");
                }
                if let Some(call) = self.load_calls.remove(&call) {
                    // The caller may have hung up; the load counts all the same.
                    let _ = call.answer.send(result);
                }
            }
            Action::AnswerUnload { call, result } => {
                if let Some(answer) = self.unload_calls.remove(&call) {
                    let _ = answer.send(result);
                }
            }
            Action::Publish(notice) => self.publish(notice),
        }
        None
    }

    /// Gives a connection its order. One that has so many waiting is not read by its peer: it is cut off.
    fn order(&mut self, connection: ConnectionId, order: Order) {
        if let Some(client) = self.clients.get(&connection)
            && client.orders.try_send(order).is_err()
        {
            // Its task sees the closed channel and ends.
            self.clients.remove(&connection);
        }
    }

    fn start_loader(&mut self, generation: u64) {
        let Some(found) = self.state.generation(generation) else { return };
        tracing::info!(generation, model = found.model, path = %found.path().display(), "loading");
        let job = LoadJob {
            generation,
            model: found.model.clone(),
            key: LoadKey::clone(&found.key),
            one_per_tensor: found.one_per_tensor,
            threads: self.loader_threads.onto(&found.key.device),
        };
        self.loaders.insert(generation, start(job, self.loader.clone(), self.inputs.clone()));
    }

    fn start_verifier(&mut self, generation: u64) {
        let (Some(found), Some(fds)) = (self.state.generation(generation), self.generations.get(&generation))
        else {
            return;
        };
        tracing::info!(generation, model = found.model, "verifying");
        let (device, fds) = (found.key.device.clone(), Arc::clone(fds));
        let handle = verifier_child::start(generation, device, fds, self.loader.clone(), self.inputs.clone());
        self.verifiers.insert(generation, handle);
    }

    /// Records a lease and starts to watch its process. If that fails the worker has got nothing and never will: the
    /// lease is over as if its process were.
    fn store_lease(&mut self, lease: u64, connection: ConnectionId, record: &LeaseRecord) -> bool {
        let pidfd = self.clients.get_mut(&connection).and_then(|client| client.pidfd.take());
        // Without one the client was cut off for not reading.
        let Some(pidfd) = pidfd else { return false };
        match record.to_memfd() {
            Ok(record) => {
                let fds = LeaseFds { record: Arc::new(record), pidfd: Arc::new(pidfd) };
                self.hold_lease(lease, fds.clone());
                self.vault.send(VaultJob::StoreLease { lease, fds });
                true
            }
            Err(error) => {
                let cause = service::exit::one_line(&error);
                tracing::error!(lease, cause, "cannot record a lease: cutting its worker off");
                self.clients.remove(&connection);
                false
            }
        }
    }

    /// Keeps a lease's descriptors and watches for the end of its process.
    fn hold_lease(&mut self, lease: u64, fds: LeaseFds) {
        let inputs = self.inputs.clone();
        let pidfd = Arc::clone(&fds.pidfd);
        let watch = tokio::spawn(async move {
            match memory::event_loop::process_end(pidfd).await {
                Ok(()) => inputs.send(Input::Event(Event::ProcessEnded { lease })).await,
                Err(error) => {
                    tracing::error!(lease, %error, "cannot watch a worker's process: its lease ends by a detach only");
                }
            }
        });
        self.leases.insert(lease, HeldLease { fds, watch });
    }

    fn publish(&self, notice: Notice) {
        match notice {
            Notice::GenerationGone(generation) => tracing::info!(generation, "gone"),
            Notice::LeaseEnded(lease) => tracing::info!(lease, "lease ended"),
            Notice::Generation(generation) => {
                if let Some(found) = self.state.generation(generation) {
                    let (phase, integrity) = (found.phase, found.integrity);
                    if integrity == Integrity::Quarantined {
                        tracing::error!(
                            generation,
                            model = found.model,
                            "its weights are damaged: quarantined"
                        );
                    }
                    tracing::info!(generation, model = found.model, ?phase, ?integrity, "generation");
                }
            }
            Notice::Lease(lease) => {
                if let Some(found) = self.state.lease(lease) {
                    tracing::info!(lease, pid = found.worker.pid, phase = ?found.phase, "lease");
                }
            }
        }
        if let Some(change) = Change::of(&self.state, notice) {
            // Nobody has to watch.
            let _ = self.changes.send(change);
        }
    }

    /// For `ballast ps` and `systemctl status`.
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

/// Asks for a load, from wherever.
pub(crate) async fn ask_load(
    inputs: &Inputs,
    model: String,
    path: PathBuf,
    device: String,
    one_per_tensor: bool,
) -> (watch::Receiver<Option<LoadProgress>>, oneshot::Receiver<Result<LoadAnswer, LoadFailure>>) {
    let asked = path.clone();
    let opened = crate::loader_child::blocking(move || crate::loader_child::open_model(&asked)).await;
    let key = opened.map(|files| LoadKey {
        files: files.into_iter().map(|(identity, _)| identity).collect(),
        layout: crate::loader::layout_of(&device),
        device: device.clone(),
    });
    let (progress, watch) = watch::channel(None);
    let (answer, answered) = oneshot::channel();
    let ask = LoadAsk { model, path, device, key, one_per_tensor };
    inputs.send(Input::Load { ask, call: LoadCall { progress, answer } }).await;
    (watch, answered)
}
