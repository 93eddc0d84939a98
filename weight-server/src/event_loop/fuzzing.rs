// SPDX-License-Identifier: Apache-2.0

//! What the fuzz target in `weight-server/fuzz` drives: the event loop and the connections of a
//! weight-server, without FD store and loader. Behind the feature `fuzzing`.
//!
//! The caller holds the workers' ends of the connections and says which process each belongs to.
//! The invariants are checked after every input of the event loop.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use handoff::pidfd;
use handoff::seqpacket::Connection;
use memory::manifest::HOST_DEVICE;
use service::Notify;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use super::{WeightServerLoop, WeightServerLoopParts};
use crate::adoption;
use crate::config::LoaderThreads;
use crate::events::WeightServerEvent;
use crate::fd_store::FdStoreClient;
use crate::handoff_server::{ProtocolViolations, WorkerConnection};
use crate::ids::ConnectionId;
use crate::lease_table::WorkerProcess;
use crate::loader_child::LoaderProgram;
use crate::messages::{InputSender, LoopInput};
use crate::state::{InheritedState, RECLAIM_TIMEOUT, WeightServerLimits, WeightServerState, invariants};
use crate::tokens::token_digest;

/// Host memory that the ledger may reserve.
pub const HOST_BYTES: u64 = 1 << 30;
const FDS: u64 = 10_000;
const UID: u32 = 1000;
/// Rounds without input after which nothing is under way, and the pause of each. The FD store's
/// thread and the check of returned descriptors need some time.
const IDLE_ROUNDS: u32 = 4;
const IDLE_PAUSE: Duration = Duration::from_micros(20);
/// For a connection whose client has gone away. It ends at once.
const END_TIMEOUT: Duration = Duration::from_secs(8);

/// A weight-server in the caller's thread.
#[derive(Debug)]
pub struct FuzzedServer {
    runtime: Runtime,
    driver: WeightServerLoop,
    inputs: InputSender,
    queue: mpsc::Receiver<LoopInput>,
    connections: Vec<JoinHandle<()>>,
    fd_store: std::thread::JoinHandle<()>,
}

fn worker(pid: i32) -> WorkerProcess {
    WorkerProcess { pid, uid: UID, start_ticks: 7 }
}

/// A process that does not end.
fn own_pidfd() -> OwnedFd {
    pidfd::open(std::process::id().cast_signed()).expect("a process can open a pidfd of itself")
}

impl FuzzedServer {
    /// Starts with one resident generation: its manifest first, then every allocation.
    pub fn start(resident: Vec<OwnedFd>, tokens_required: bool, awaited: &[i32]) -> Self {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime can be made");
        let (inputs, queue) = InputSender::channel();
        let (generation, fds) = adoption::read_returned(resident).expect("the generation is whole");
        let generations = [(generation.id, fds)].into();
        let limits = WeightServerLimits {
            device_bytes: BTreeMap::from([(HOST_DEVICE.to_owned(), HOST_BYTES)]),
            unified_devices: BTreeSet::new(),
            fds: FDS,
            uids: BTreeSet::from([UID]),
            host_capacity_is_measured: false,
            tokens_required,
        };
        let inherited = InheritedState {
            generations: vec![generation],
            leases: Vec::new(),
            awaited: awaited.iter().map(|pid| worker(*pid)).collect(),
            first_id: 1,
        };
        let (fd_store, fd_store_thread) =
            FdStoreClient::start_thread(Notify::disabled(), inputs.clone()).expect("a thread starts");
        let parts = WeightServerLoopParts {
            state: WeightServerState::new(limits, inherited, Duration::ZERO),
            inputs: inputs.clone(),
            // A verifier cannot be started.
            loader: LoaderProgram {
                program: "/nonexistent".into(),
                arguments: Vec::new(),
                environment: Vec::new(),
            },
            loader_threads: LoaderThreads { host: 1, gpu: 1 },
            fd_store,
            violations: Arc::new(ProtocolViolations::default()),
            adoption_notes: Vec::new(),
            generations,
            leases: Vec::new(),
            awaited: awaited.iter().map(|pid| (worker(*pid), own_pidfd())).collect(),
        };
        let entered = runtime.enter();
        let driver = WeightServerLoop::new(parts, Instant::now());
        drop(entered);
        Self { runtime, driver, inputs, queue, connections: Vec::new(), fd_store: fd_store_thread }
    }

    /// Connects a worker. Returns its end of the connection.
    pub fn connect(&mut self, pid: i32) -> Connection {
        let (client, server) = Connection::pair().expect("a socket pair can be made");
        let connection = WorkerConnection {
            id: ConnectionId(self.connections.len() as u64 + 1),
            inputs: self.inputs.clone(),
            violations: Arc::clone(&self.driver.violations),
        };
        let served = connection.serve_peer(server, Ok((worker(pid), own_pidfd())));
        self.connections.push(self.runtime.spawn(served));
        client
    }

    /// Lets everything that is under way go on until nothing happens.
    pub fn settle(&mut self) {
        let Self { runtime, driver, queue, .. } = self;
        runtime.block_on(async {
            let mut idle = 0;
            while idle < IDLE_ROUNDS {
                tokio::task::yield_now().await;
                match queue.try_recv() {
                    Ok(input) => {
                        handle_checked(driver, input);
                        idle = 0;
                    }
                    Err(_) => {
                        std::thread::sleep(IDLE_PAUSE);
                        idle += 1;
                    }
                }
            }
        });
    }

    fn handle(&mut self, input: LoopInput) {
        let _entered = self.runtime.enter();
        handle_checked(&mut self.driver, input);
    }

    /// The process ends.
    pub fn end_process(&mut self, pid: i32) {
        let of_process = self.driver.state.leases().filter(|lease| lease.worker.pid == pid);
        let leases: Vec<u64> = of_process.map(|lease| lease.id).collect();
        for lease in leases {
            self.handle(LoopInput::Event(WeightServerEvent::ProcessEnded { lease }));
        }
        self.handle(LoopInput::Event(WeightServerEvent::AwaitedProcessEnded { pid }));
    }

    pub fn unload(&mut self, model: &str) {
        let (answer, _) = oneshot::channel();
        self.handle(LoopInput::Unload { model: model.to_owned(), generation: None, answer });
    }

    pub fn allow_token(&mut self, name: &str, token: &[u8]) {
        let (answer, _) = oneshot::channel();
        let digest = token_digest(token);
        self.handle(LoopInput::AllowToken { name: name.to_owned(), digest, answer });
    }

    pub fn forget_token(&mut self, name: &str) {
        self.handle(LoopInput::ForgetToken { name: name.to_owned() });
    }

    pub fn replace_supervisor(&mut self) {
        self.handle(LoopInput::SupervisorReplaced);
    }

    /// Time passes for the deadlines of leases and loads.
    pub fn elapse(&mut self, time: Duration) {
        if let Some(started) = self.driver.started.checked_sub(time) {
            self.driver.started = started;
        }
        self.handle(LoopInput::Event(WeightServerEvent::Tick));
    }

    /// Ends all processes and unloads all models, after the caller has closed its connections.
    /// Nothing is left then.
    pub fn finish(mut self) {
        let deadline = Instant::now() + END_TIMEOUT;
        while self.connections.iter().any(|connection| !connection.is_finished()) {
            assert!(Instant::now() < deadline, "a connection without client does not end");
            self.settle();
        }
        self.settle();
        self.elapse(2 * RECLAIM_TIMEOUT);
        let leases: Vec<u64> = self.driver.state.leases().map(|lease| lease.id).collect();
        for lease in leases {
            self.handle(LoopInput::Event(WeightServerEvent::ProcessEnded { lease }));
        }
        let models: Vec<String> = self.driver.state.generations().map(|g| g.model.clone()).collect();
        for model in models {
            self.unload(&model);
        }
        self.settle();
        let Self { runtime, driver, queue, fd_store, .. } = self;
        assert_eq!(driver.state.ledger().reservations().count(), 0, "reservations are left");
        assert_eq!(driver.state.generations().count(), 0, "generations are left");
        assert!(driver.generations.is_empty(), "descriptors of generations are left");
        assert!(driver.clients.is_empty(), "clients are left");
        drop((driver, queue));
        runtime.shutdown_timeout(END_TIMEOUT);
        // A thread that still ends looks like a leak to the sanitizer.
        fd_store.join().expect("the FD store's thread does not panic");
    }
}

fn handle_checked(driver: &mut WeightServerLoop, input: LoopInput) {
    let workers = |driver: &WeightServerLoop| -> BTreeMap<u64, WorkerProcess> {
        driver.state.leases().map(|lease| (lease.id, lease.worker)).collect()
    };
    let before = workers(driver);
    driver.handle_input(input);
    invariants::check(&driver.state);
    for (lease, worker) in workers(driver) {
        assert_eq!(*before.get(&lease).unwrap_or(&worker), worker, "lease {lease} has another process");
        assert!(driver.leases.contains_key(&lease), "lease {lease} has no descriptors");
    }
    assert_eq!(driver.leases.len(), driver.state.leases().count(), "descriptors of ended leases are left");
    for generation in driver.generations.keys() {
        let found = driver.state.generation(*generation);
        assert!(found.is_some(), "descriptors of generation {generation} are left");
    }
}
