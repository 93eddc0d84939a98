// SPDX-License-Identifier: Apache-2.0

//! All processes of one simulated fleet, their life and death, and the delivery of events.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use service::supervision::{OFFER_PERIOD, SuccessorWait};
use supervisor::{ChildRole, Termination};
use weight_server::events::WeightServerEvent;
use weight_server::ids::ConnectionId;

use crate::cures::Cure;
use crate::faults::{FaultPlan, PoisonRequests};
use crate::messages::{
    Message, Notice, ServerFrame, StreamFrame, ToChild, ToRouter, ToSupervisor, ToWeightServer, ToWorker,
    ToWorld,
};
use crate::network::{Entry, Link, MILLISECOND, Micros, Network, SECOND, SimPid, WORLD};
use crate::router_process::SimRouter;
use crate::summary::SimulationCounts;
use crate::supervisor_process::SimSupervisor;
use crate::weight_server_process::SimWeightServer;
use crate::weights::WeightFiles;
use crate::worker_process::SimWorker;

/// A third of the watchdog's time, as children send it.
const PING_PERIOD: Micros = 10 * SECOND;
/// How long a child waits for the answer to an offer.
const ANSWER_WAIT: Micros = SECOND;

#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) name: Arc<str>,
    /// `None`: the supervisor.
    pub(crate) role: Option<ChildRole>,
    /// Stopped (SIGSTOP) since this time.
    pub(crate) stopped_since: Option<Micros>,
    /// When the last stop ended.
    pub(crate) last_stop: Micros,
    pub(crate) is_exiting: bool,
    /// The supervisor at the other end of the liveness socket.
    pub(crate) supervisor: Option<SimPid>,
    wait: Option<SuccessorWait>,
    offer: u64,
}

#[derive(Debug)]
pub(crate) struct Fleet {
    pub(crate) net: Network,
    pub(crate) base: Instant,
    pub(crate) processes: BTreeMap<SimPid, Process>,
    last_pid: SimPid,
    last_number: u64,
    pub(crate) supervisor: Option<SimSupervisor>,
    pub(crate) weight_server: Option<SimWeightServer>,
    pub(crate) router: Option<SimRouter>,
    pub(crate) workers: BTreeMap<SimPid, SimWorker>,
    /// The children's records in the runtime directory.
    pub(crate) recorded: BTreeMap<String, (SimPid, toml::Table)>,
    pub(crate) files: WeightFiles,
    pub(crate) plan: FaultPlan,
    /// The cure that this fleet lacks.
    pub(crate) missing: Option<Cure>,
    pub(crate) poison: PoisonRequests,
    /// Until then, every process of this name crashes at its start.
    pub(crate) crash_loop: (String, Micros),
    pub(crate) counts: SimulationCounts,
    pub(crate) violation: Option<String>,
}

impl Fleet {
    pub(crate) fn new(seed: u64, missing: Option<Cure>) -> Self {
        let mut net = Network::new(seed);
        let plan = FaultPlan::draw(&mut net.random);
        let poison = PoisonRequests::draw(&mut net.random);
        net.timer(WORLD, 0, Message::World(ToWorld::StartSupervisor));
        net.timer(WORLD, 3 * SECOND, Message::World(ToWorld::Arrival));
        net.timer(WORLD, 8 * SECOND, Message::World(ToWorld::Fault));
        Self {
            net,
            base: Instant::now(),
            processes: BTreeMap::new(),
            last_pid: 100,
            last_number: 0,
            supervisor: None,
            weight_server: None,
            router: None,
            workers: BTreeMap::new(),
            recorded: BTreeMap::new(),
            files: WeightFiles::new(),
            plan,
            missing,
            poison,
            crash_loop: (String::new(), 0),
            counts: SimulationCounts::default(),
            violation: None,
        }
    }

    /// The monotonic clock of all processes.
    pub(crate) fn instant(&self) -> Instant {
        self.base + Duration::from_micros(self.net.now)
    }

    /// A number that was never used.
    pub(crate) fn number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    pub(crate) fn break_invariant(&mut self, what: impl FnOnce() -> String) {
        if self.violation.is_none() {
            self.violation = Some(what());
        }
    }

    pub(crate) fn is_alive(&self, pid: SimPid) -> bool {
        self.processes.contains_key(&pid)
    }

    pub(crate) fn start_process(
        &mut self,
        name: Arc<str>,
        role: Option<ChildRole>,
        supervisor: Option<SimPid>,
    ) -> SimPid {
        self.last_pid += 1;
        let pid = self.last_pid;
        let process = Process {
            name,
            role,
            stopped_since: None,
            last_stop: 0,
            is_exiting: false,
            supervisor,
            wait: None,
            offer: 0,
        };
        self.processes.insert(pid, process);
        let start = self.net.random.between(5 * MILLISECOND, 60 * MILLISECOND);
        let ready = match role {
            None => return pid,
            Some(ChildRole::WeightServer) => Message::WeightServer(ToWeightServer::Ready),
            Some(ChildRole::Router) => Message::Router(ToRouter::Ready),
            Some(ChildRole::Worker | ChildRole::Mps | ChildRole::DeviceMonitor) => {
                Message::Worker(ToWorker::Ready)
            }
        };
        self.net.timer(pid, start, ready);
        self.net.timer(pid, PING_PERIOD, Message::Child(ToChild::Ping));
        pid
    }

    /// Sends a datagram to the supervisor that has bound the child's notify socket.
    pub(crate) fn notify(&mut self, pid: SimPid, notice: Notice) {
        let Some(process) = self.processes.get(&pid) else { return };
        let Some(supervisor) = &self.supervisor else { return };
        if supervisor.children.contains_key(&process.name) {
            let (child, to) = (process.name.clone(), supervisor.pid);
            let message = Message::Supervisor(ToSupervisor::Notice { child, pid, notice });
            self.net.send(Link::Notify(pid), to, message);
        }
    }

    /// Delivers one entry to its process.
    pub(crate) fn deliver(&mut self, entry: Entry) {
        if entry.to != WORLD {
            match self.processes.get(&entry.to) {
                None => return,
                Some(process) if process.stopped_since.is_some() => return self.net.hold(entry),
                Some(_) => {}
            }
        }
        let to = entry.to;
        match entry.message {
            Message::WeightServer(ToWeightServer::Ready)
            | Message::Worker(ToWorker::Ready)
            | Message::Router(ToRouter::Ready)
                if self.crashes_at_start(to) =>
            {
                self.kill(to, Termination::ExitCode(1));
            }
            Message::World(event) => self.handle_world(event),
            Message::Child(event) => self.handle_child(to, event),
            Message::Supervisor(event) => self.handle_supervisor(event),
            Message::WeightServer(event) => self.handle_weight_server(event),
            Message::Worker(event) => self.handle_worker(to, event),
            Message::Router(event) => self.handle_router(event),
        }
    }

    fn crashes_at_start(&self, pid: SimPid) -> bool {
        let (name, until) = &self.crash_loop;
        self.net.now < *until && self.processes.get(&pid).is_some_and(|process| *process.name == **name)
    }

    fn handle_child(&mut self, pid: SimPid, event: ToChild) {
        let now = self.instant();
        let number = self.last_number + 1;
        let Some(process) = self.processes.get_mut(&pid) else { return };
        match event {
            ToChild::Ping => {
                if !process.is_exiting {
                    self.notify(pid, Notice::Ping);
                    self.net.timer(pid, PING_PERIOD, Message::Child(ToChild::Ping));
                }
            }
            ToChild::SupervisorLost { supervisor } => {
                if process.supervisor == Some(supervisor) {
                    process.supervisor = None;
                    process.wait = Some(SuccessorWait::new(now));
                    process.offer = number;
                    self.last_number = number;
                    self.net.timer(pid, 0, Message::Child(ToChild::Offer { number }));
                }
            }
            ToChild::Offer { number: current } => {
                let Some(wait) = process.wait.as_mut().filter(|_| process.offer == current) else { return };
                if wait.is_over(now) {
                    return self.begin_exit(pid);
                }
                process.offer = number;
                self.last_number = number;
                let name = process.name.clone();
                let is_bound = self.supervisor.as_ref().is_some_and(|s| s.children.contains_key(&name));
                let again = if is_bound { ANSWER_WAIT } else { OFFER_PERIOD.as_micros() as Micros };
                let token = self.workers.get(&pid).map(|worker| worker.token);
                self.notify(pid, Notice::Offer { number, token });
                self.net.timer(pid, again, Message::Child(ToChild::Offer { number }));
            }
            ToChild::Adopted { supervisor, offer } => {
                if process.wait.is_some() && process.offer == offer {
                    process.wait = None;
                    let is_alive = self.supervisor.as_ref().is_some_and(|s| s.pid == supervisor);
                    let process = self.processes.get_mut(&pid).expect("the process was just found");
                    process.supervisor = Some(supervisor);
                    if !is_alive {
                        let lost = ToChild::SupervisorLost { supervisor };
                        self.net.timer(pid, 0, Message::Child(lost));
                    }
                    self.supervisor_replaced(pid);
                }
            }
            ToChild::Terminate => self.begin_exit(pid),
            ToChild::Exit => self.exit(pid),
        }
    }

    /// The process stops in an orderly way.
    pub(crate) fn begin_exit(&mut self, pid: SimPid) {
        let Some(process) = self.processes.get_mut(&pid).filter(|process| !process.is_exiting) else {
            return;
        };
        process.is_exiting = true;
        if self.workers.contains_key(&pid) {
            self.drain_worker(pid);
        }
        let after = match self.net.random.one_in(20) {
            true => self.net.random.between(SECOND, 15 * SECOND),
            false => self.net.random.between(MILLISECOND, 100 * MILLISECOND),
        };
        self.net.timer(pid, after, Message::Child(ToChild::Exit));
    }

    pub(crate) fn exit(&mut self, pid: SimPid) {
        let connection = self.workers.get(&pid).and_then(|worker| worker.held_connection());
        if let (Some(connection), Some(server)) = (connection, &self.weight_server) {
            let event = WeightServerEvent::Detached { connection: ConnectionId(connection) };
            let message = Message::WeightServer(ToWeightServer::Event(Box::new(event)));
            self.net.send(Link::Handoff(connection), server.pid, message);
        }
        self.kill(pid, Termination::ExitCode(0));
    }

    /// The process is gone at once: its memory, its descriptors and its connections.
    pub(crate) fn kill(&mut self, pid: SimPid, termination: Termination) {
        let Some(process) = self.processes.remove(&pid) else { return };
        self.counts.deaths += 1;
        self.net.release(pid);
        match process.role {
            None => self.lose_supervisor(pid),
            Some(ChildRole::WeightServer) => self.lose_weight_server(),
            Some(ChildRole::Router) => self.lose_router(pid),
            Some(ChildRole::Worker | ChildRole::Mps | ChildRole::DeviceMonitor) => self.lose_worker(pid),
        }
        let child = process.name;
        if let Some(supervisor) = &self.supervisor
            && supervisor.children.get(&child).is_some_and(|known| known.process == Some(pid))
        {
            let exited = ToSupervisor::ChildExited { child, pid, termination };
            self.net.send(Link::Notify(pid), supervisor.pid, Message::Supervisor(exited));
        }
    }

    fn lose_supervisor(&mut self, supervisor: SimPid) {
        self.supervisor = None;
        let children: Vec<SimPid> = self.processes.keys().copied().collect();
        for child in children {
            let late = self.net.random.below(5 * MILLISECOND);
            self.net.timer(child, late, Message::Child(ToChild::SupervisorLost { supervisor }));
        }
    }

    fn lose_weight_server(&mut self) {
        self.weight_server = None;
        for (&pid, worker) in &self.workers {
            if let Some(connection) = worker.connection {
                let frame = ToWorker::Frame { connection, frame: ServerFrame::Closed };
                self.net.send(Link::Handoff(connection), pid, Message::Worker(frame));
            }
        }
        self.fail_admin_calls();
    }

    fn lose_worker(&mut self, pid: SimPid) {
        if self.workers.remove(&pid).is_none() {
            return;
        }
        if let Some(server) = &self.weight_server {
            let to = server.pid;
            let post = |event| Message::WeightServer(ToWeightServer::Event(Box::new(event)));
            for connection in server.connections_of(pid) {
                let ended = WeightServerEvent::ConnectionEnded { connection: ConnectionId(connection) };
                self.net.send(Link::Handoff(connection), to, post(ended));
            }
            for lease in server.leases_of(pid) {
                self.net.timer(to, 0, post(WeightServerEvent::ProcessEnded { lease }));
            }
            let ended = WeightServerEvent::AwaitedProcessEnded { pid: pid.cast_signed() };
            self.net.timer(to, 0, post(ended));
        }
        let Some(router) = &self.router else { return };
        let (to, link) = (router.pid, Link::Frames(pid, router.pid));
        self.net.send(link, to, Message::Router(ToRouter::WorkerGone { pid }));
        // The router learns of a death from its streams and from the link, in any order.
        for stream in router.streams_on(pid) {
            let died = ToRouter::Frame { stream, frame: StreamFrame::Died };
            self.net.send(link, to, Message::Router(died));
        }
    }

    /// A child has a new supervisor, whose FD store is empty.
    fn supervisor_replaced(&mut self, pid: SimPid) {
        if self.weight_server.as_ref().is_some_and(|server| server.pid == pid) {
            self.restore_fd_store();
        }
    }
}
