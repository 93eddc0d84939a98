// SPDX-License-Identifier: Apache-2.0

//! What a seed does to its fleet: kills, stops, jumps of the clock, replaced files, changed
//! configurations, requests, and requests that crash their worker.

use std::collections::BTreeMap;
use std::sync::Arc;

use supervisor::{ChildRole, CopySpec, FleetSpec, ModelSpec, SupervisionConfig, Termination};
use weight_server::events::WeightServerEvent;
use weight_server::refusal::LoadFailure;

use crate::fleet::Fleet;
use crate::messages::{Message, StreamFrame, ToRouter, ToWorld};
use crate::network::{Link, MILLISECOND, Micros, SECOND, SimPid, SimRandom, WORLD};
use crate::router_process::QUARANTINE;
use crate::weights::{MODELS, path_of};

/// The fleet recovers in this time after the last fault: a backoff of a minute, two starts, a load.
const RECOVERY: Micros = 90 * SECOND;
/// Requests that arrive after the recovery have to succeed.
const HEALTHY: Micros = 20 * SECOND;
const CALM_GAP: Micros = 400 * MILLISECOND;
/// Streams of the last requests end.
const REST: Micros = 40 * SECOND;
/// A router gives up a connection whose pings stay without an answer.
const LINK_TIMEOUT: Micros = 6 * SECOND;
/// Workers that a content may end before it is refused (docs/decisions/0026).
const POISON_DEATHS_MAX: usize = 4;

#[derive(Debug)]
pub(crate) struct FaultPlan {
    /// Index and number of workers of each configured model.
    models: Vec<(usize, u32)>,
    pub(crate) host_bytes: u64,
    pub(crate) faults_until: Micros,
    fault_gap: Micros,
    arrival_gap: Micros,
}

impl FaultPlan {
    pub(crate) fn draw(random: &mut SimRandom) -> Self {
        let mut models = vec![(0, random.between(1, 4) as u32)];
        if random.one_in(2) {
            models.push((1, random.between(1, 3) as u32));
        }
        Self {
            models,
            // Old and new weights of one model fit or not beside the others.
            host_bytes: if random.one_in(3) { 2800 } else { 20_000 },
            faults_until: random.between(40, 200) * SECOND,
            fault_gap: random.between(1, 12) * SECOND,
            arrival_gap: random.between(20, 400) * MILLISECOND,
        }
    }

    pub(crate) fn recovered_at(&self) -> Micros {
        self.faults_until + RECOVERY
    }

    pub(crate) fn arrivals_until(&self) -> Micros {
        self.recovered_at() + HEALTHY
    }

    pub(crate) fn end(&self) -> Micros {
        self.arrivals_until() + REST
    }

    pub(crate) fn workers_of(&self, model: &str) -> u32 {
        self.models.iter().find(|(index, _)| MODELS[*index] == model).map_or(0, |(_, workers)| *workers)
    }

    pub(crate) fn fleet_spec(&self) -> FleetSpec {
        let models = self.models.iter().map(|&(index, workers)| ModelSpec {
            name: MODELS[index].to_owned(),
            path: path_of(MODELS[index]).into(),
            workers,
            copies: vec![CopySpec {
                device: "host".to_owned(),
                weights: MODELS[index].to_owned(),
                worker_config: Default::default(),
                memory: Default::default(),
            }],
            pack: true,
            files: String::new(),
            configured_path: std::path::PathBuf::new(),
            idle_unload: None,
            on_demand: false,
            fallback: None,
            settings: toml::Table::new(),
        });
        FleetSpec {
            weight_server: toml::Table::new(),
            router: toml::Table::new(),
            devices: Default::default(),
            find_gpu: Arc::new(|_| Err("no GPU".to_owned())),
            mps: None,
            device_monitor: None,
            router_socket: None,
            http_address: String::new(),
            log: tracing::Level::INFO,
            models: models.collect(),
            unusable: Vec::new(),
            supervision: SupervisionConfig::default(),
            complete_worker_config: Arc::new(|slot, config| {
                config.insert("model".to_owned(), toml::Value::String(slot.model.clone()));
            }),
            read_again: None,
        }
    }
}

/// A request of a client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SimArrival {
    pub(crate) model: usize,
    /// Equal contents are equal requests.
    pub(crate) content: u64,
    prompt_tokens: usize,
    pub(crate) max_tokens: u32,
    pub(crate) crash_at: Option<usize>,
}

impl SimArrival {
    /// Half of the prompt is shared with other requests.
    pub(crate) fn prompt(&self) -> Arc<[u32]> {
        let own = |at: usize| (self.content % 10_000) as u32 + at as u32;
        let half = self.prompt_tokens / 2;
        (0..self.prompt_tokens).map(|at| if at < half { at as u32 } else { own(at) }).collect()
    }
}

#[derive(Debug)]
struct PoisonContent {
    arrival: SimArrival,
    deaths: Vec<Micros>,
    /// The client waits for the end of its last request.
    is_open: bool,
}

/// Requests that crash each worker which computes them.
#[derive(Debug, Default)]
pub(crate) struct PoisonRequests {
    contents: BTreeMap<u64, PoisonContent>,
}

impl PoisonRequests {
    pub(crate) fn draw(random: &mut SimRandom) -> Self {
        let count = if random.one_in(3) { random.between(1, 3) } else { 0 };
        let contents = (1..=count).map(|content| {
            let (prompt_tokens, max_tokens) = (random.between(4, 30) as usize, 12);
            let crash_at = Some(random.below(4) as usize);
            let arrival = SimArrival { model: 0, content, prompt_tokens, max_tokens, crash_at };
            (content, PoisonContent { arrival, deaths: Vec::new(), is_open: false })
        });
        Self { contents: contents.collect() }
    }

    fn next(&mut self, random: &mut SimRandom) -> Option<SimArrival> {
        let content = 1 + random.below(self.contents.len().max(1) as u64);
        let poison = self.contents.get_mut(&content).filter(|poison| !poison.is_open)?;
        poison.is_open = true;
        Some(poison.arrival)
    }

    pub(crate) fn ended(&mut self, content: u64) {
        if let Some(poison) = self.contents.get_mut(&content) {
            poison.is_open = false;
        }
    }

    /// A new router knows nothing.
    pub(crate) fn router_lost(&mut self) {
        for poison in self.contents.values_mut() {
            poison.is_open = false;
            poison.deaths.clear();
        }
    }

    pub(crate) fn is_poison(&self, content: u64) -> bool {
        self.contents.contains_key(&content)
    }
}

impl Fleet {
    pub(crate) fn handle_world(&mut self, event: ToWorld) {
        match event {
            ToWorld::StartSupervisor => self.start_supervisor(),
            ToWorld::Arrival => self.arrive(),
            ToWorld::Continue { pid } => self.resume(pid),
            ToWorld::LinkTimeout { worker, since } => {
                let is_stopped = |process: &crate::fleet::Process| process.stopped_since == Some(since);
                if self.processes.get(&worker).is_some_and(is_stopped) {
                    self.break_link(worker);
                }
            }
            ToWorld::Fault => {
                if self.net.now >= self.plan.faults_until {
                    return self.end_faults();
                }
                self.inject_fault();
                let gap = self.plan.fault_gap;
                let after = self.net.random.between(gap / 10, 2 * gap);
                self.net.timer(WORLD, after, Message::World(ToWorld::Fault));
            }
        }
    }

    fn arrive(&mut self) {
        if self.net.now >= self.plan.arrivals_until() {
            return;
        }
        let random = &mut self.net.random;
        let is_calm = self.net.now >= self.plan.faults_until;
        let poison = match !is_calm && random.one_in(20) {
            true => self.poison.next(random),
            false => None,
        };
        let (model, _) = self.plan.models[random.below(self.plan.models.len() as u64) as usize];
        let arrival = poison.unwrap_or_else(|| SimArrival {
            model,
            content: 1000 + random.below(100_000),
            prompt_tokens: random.between(1, 40) as usize,
            max_tokens: random.between(1, 40) as u32,
            crash_at: None,
        });
        self.start_request(arrival);
        // A recovered fleet is not overloaded, so that it has no reason to refuse.
        let gap = if is_calm { self.plan.arrival_gap.max(CALM_GAP) } else { self.plan.arrival_gap };
        let after = self.net.random.between(1, 2 * gap);
        self.net.timer(WORLD, after, Message::World(ToWorld::Arrival));
    }

    /// A request of this router has ended its worker.
    pub(crate) fn poison_killed(&mut self, content: u64, router: SimPid) {
        self.counts.poison_deaths += 1;
        // A call that its router did not live to cancel.
        if self.router.as_ref().is_none_or(|current| current.pid != router) {
            return;
        }
        let now = self.net.now;
        let Some(poison) = self.poison.contents.get_mut(&content) else { return };
        let window = QUARANTINE.as_micros() as Micros;
        poison.deaths.retain(|at| at + window > now);
        poison.deaths.push(now);
        let deaths = poison.deaths.len();
        if deaths > POISON_DEATHS_MAX {
            self.break_invariant(|| format!("quarantine: content {content} has ended {deaths} workers"));
        }
    }

    fn inject_fault(&mut self) {
        self.counts.faults += 1;
        let role = |fleet: &Self, role| {
            fleet.processes.iter().find(|(_, process)| process.role == Some(role)).map(|(pid, _)| *pid)
        };
        let weight_server = role(self, ChildRole::WeightServer);
        let router = role(self, ChildRole::Router);
        let supervisor = self.supervisor.as_ref().map(|supervisor| supervisor.pid);
        let workers: Vec<SimPid> = self.workers.keys().copied().collect();
        let worker =
            (!workers.is_empty()).then(|| workers[self.net.random.below(workers.len() as u64) as usize]);
        match self.net.random.below(17) {
            0..4 => self.kill_all(&[worker]),
            4 | 5 => self.kill_all(&[weight_server]),
            6 => self.kill_all(&[router]),
            7 => self.kill_all(&[supervisor]),
            8 => self.kill_all(&[supervisor, weight_server]),
            9 => self.kill_all(&[weight_server, worker]),
            10 => self.kill_loader(),
            11 | 12 => {
                let victims = [worker, weight_server, router, supervisor];
                let victim = victims[self.net.random.below(4) as usize];
                self.stop(victim, 30);
            }
            13 => self.stop(supervisor, 6),
            14 => self.freeze(),
            15 => self.start_crash_loop(worker),
            _ => self.change_files(),
        }
    }

    fn kill_all(&mut self, victims: &[Option<SimPid>]) {
        for &pid in victims.iter().flatten() {
            if self.supervisor.as_ref().is_some_and(|supervisor| supervisor.pid == pid) {
                let after = match self.net.random.one_in(5) {
                    true => self.net.random.between(9 * SECOND, 30 * SECOND),
                    false => self.net.random.between(100 * MILLISECOND, 8 * SECOND),
                };
                self.restart_supervisor_after(after);
            }
            self.kill(pid, Termination::Signal(9));
        }
    }

    fn kill_loader(&mut self) {
        let is_first = self.supervisor.iter().flat_map(|s| s.models.values()).any(|model| !model.was_served);
        let Some(&generation) = self.running_server().and_then(|server| server.loaders.first()) else {
            return;
        };
        // A load that fails before its model was ever served is reported, and not repeated.
        if !is_first {
            let failure = LoadFailure::LoaderLost { how: "killed".to_owned() };
            self.post_to_server(0, 5, WeightServerEvent::LoadFailed { generation, failure });
        }
    }

    /// SIGSTOP for a while. One in `long` stops is longer than every watchdog.
    fn stop(&mut self, pid: Option<SimPid>, long: u64) {
        let Some(pid) = pid else { return };
        let now = self.net.now;
        let time = match self.net.random.one_in(long) {
            true => self.net.random.between(20 * SECOND, 70 * SECOND),
            false => self.net.random.between(100 * MILLISECOND, 9 * SECOND),
        };
        let Some(process) = self.processes.get_mut(&pid).filter(|p| p.stopped_since.is_none()) else {
            return;
        };
        process.stopped_since = Some(now);
        self.net.timer(WORLD, time, Message::World(ToWorld::Continue { pid }));
        if self.workers.contains_key(&pid) {
            let timeout = ToWorld::LinkTimeout { worker: pid, since: now };
            self.net.timer(WORLD, LINK_TIMEOUT, Message::World(timeout));
        }
    }

    pub(crate) fn resume(&mut self, pid: SimPid) {
        let now = self.net.now;
        let Some(process) = self.processes.get_mut(&pid) else { return };
        if process.stopped_since.take().is_some() {
            process.last_stop = now;
            self.net.release(pid);
            self.report_serving(pid);
        }
    }

    fn break_link(&mut self, worker: SimPid) {
        let Some(router) = &self.router else { return };
        let (to, link) = (router.pid, Link::Frames(worker, router.pid));
        let streams = router.streams_on(worker);
        self.net.send(link, to, Message::Router(ToRouter::WorkerGone { pid: worker }));
        for stream in streams {
            let died = ToRouter::Frame { stream, frame: StreamFrame::Died };
            self.net.send(link, to, Message::Router(died));
        }
    }

    /// A child finds a broken environment for a while: a mount that is away, a device that is lost.
    fn start_crash_loop(&mut self, child: Option<SimPid>) {
        let Some(process) = child.and_then(|pid| self.processes.get(&pid)) else { return };
        let name = process.name.to_string();
        let until = self.net.now + self.net.random.between(SECOND, 30 * SECOND);
        self.crash_loop = (name, until.min(self.plan.faults_until));
        self.kill_all(&[child]);
    }

    /// Nothing runs for a while: a frozen cgroup, a paused virtual machine.
    fn freeze(&mut self) {
        let time = self.net.random.between(SECOND, 100 * SECOND);
        self.net.jump(time);
        self.plan.faults_until += time;
    }

    /// A model file is replaced, or a supervisor with another configuration follows.
    fn change_files(&mut self) {
        let is_file = match self.net.random.below(3) {
            0 if self.plan.models.len() == 1 => {
                self.plan.models.push((1, 1));
                false
            }
            0 => self.plan.models.pop().is_none(),
            1 => {
                self.plan.models[0].1 = self.net.random.between(1, 4) as u32;
                false
            }
            _ => {
                let model = self.net.random.below(MODELS.len() as u64) as usize;
                self.files.replace_file(model);
                true
            }
        };
        if !is_file || self.net.random.one_in(2) {
            let supervisor = self.supervisor.as_ref().map(|supervisor| supervisor.pid);
            self.kill_all(&[supervisor]);
        }
    }

    /// From now on the fleet has to recover by itself.
    fn end_faults(&mut self) {
        let stopped: Vec<SimPid> = self.processes.keys().copied().collect();
        stopped.into_iter().for_each(|pid| self.resume(pid));
        self.restart_supervisor_after(SECOND);
    }
}
