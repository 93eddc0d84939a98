// SPDX-License-Identifier: Apache-2.0

//! The faults of the soak.

use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};

use super::soak_fleet::{SoakFleet, THIRD, WATCHDOG};
use crate::harness::proc;
use crate::harness::random::SeededRandom;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SoakFault {
    /// A signal that ends one process of the role.
    Ends(&'static str, &'static str),
    /// SIGSTOP, and SIGCONT after a time below or above that of the watchdog.
    Pauses(&'static str, PauseLength),
    FreezesFleet,
    EndsSupervisorAndWeightServer,
    EndsLoader(&'static str),
    Drains,
    RestartsRolling,
    Restarts(&'static str),
    AddsAndRemovesWorker,
    LoadsAndUnloads,
    DeletesSocket,
    /// The process can open no further descriptor for 3 s.
    TakesDescriptors(&'static str),
    /// The process can allocate no further memory for 3 s.
    TakesMemory(&'static str),
    /// The log is not read for 4 s.
    StallsLog,
    HangsUp,
    ResetsPrefixCache,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PauseLength {
    BelowWatchdog,
    AboveWatchdog,
}

use PauseLength::*;
use SoakFault::*;

const ALL: &[SoakFault] = &[
    Ends("worker", "KILL"),
    Ends("worker", "SEGV"),
    Ends("weight-server", "KILL"),
    Ends("weight-server", "SEGV"),
    Ends("router", "KILL"),
    Ends("router", "SEGV"),
    Ends("supervisor", "KILL"),
    Ends("supervisor", "SEGV"),
    Pauses("worker", BelowWatchdog),
    Pauses("worker", AboveWatchdog),
    Pauses("weight-server", BelowWatchdog),
    Pauses("weight-server", AboveWatchdog),
    Pauses("router", BelowWatchdog),
    Pauses("router", AboveWatchdog),
    Pauses("supervisor", AboveWatchdog),
    FreezesFleet,
    EndsSupervisorAndWeightServer,
    EndsLoader("KILL"),
    EndsLoader("SEGV"),
    EndsLoader("STOP"),
    Drains,
    RestartsRolling,
    Restarts("worker"),
    Restarts("router"),
    Restarts("weight-server"),
    AddsAndRemovesWorker,
    LoadsAndUnloads,
    DeletesSocket,
    TakesDescriptors("worker"),
    TakesDescriptors("weight-server"),
    TakesDescriptors("router"),
    TakesDescriptors("supervisor"),
    TakesMemory("worker"),
    TakesMemory("weight-server"),
    TakesMemory("router"),
    TakesMemory("supervisor"),
    StallsLog,
    HangsUp,
    ResetsPrefixCache,
];

/// Draws faults so that each comes once before one comes again.
pub(super) struct Deck {
    random: SeededRandom,
    left: Vec<SoakFault>,
}

impl Deck {
    /// The first four faults end one process of each role, so that a soak of a minute has them too.
    pub(super) fn new(mut random: SeededRandom) -> Self {
        let mut left = ALL.to_vec();
        random.shuffle(&mut left);
        let mut roles = ["worker", "weight-server", "router", "supervisor"];
        random.shuffle(&mut roles);
        for role in roles {
            let end = left.iter().position(|fault| matches!(fault, Ends(of, _) if *of == role));
            let end = left.remove(end.expect("each role has a fault that ends it"));
            left.push(end);
        }
        Self { random, left }
    }

    pub(super) fn draw(&mut self) -> SoakFault {
        if self.left.is_empty() {
            self.left = ALL.to_vec();
            self.random.shuffle(&mut self.left);
        }
        self.left.pop().unwrap()
    }

    /// Injects the fault. Pauses and shortages end later, on threads of their own, so that the next
    /// fault may meet them. Returns what the fleet refused.
    pub(super) fn inject(&mut self, fault: SoakFault, soak: &mut SoakFleet) -> Result<(), String> {
        match fault {
            Ends(role, signal) => self.signal_one(soak, role, signal),
            Pauses(role, length) => {
                let factor = if length == BelowWatchdog { 0.4 } else { 1.6 };
                if let Some(pid) = self.one(soak, role) {
                    pause(vec![pid], WATCHDOG.mul_f64(factor));
                }
            }
            FreezesFleet => {
                let roles = ["supervisor", "router", "weight-server", "worker"];
                pause(roles.iter().flat_map(|role| soak.pids(role)).collect(), WATCHDOG.mul_f64(1.6));
            }
            EndsSupervisorAndWeightServer => {
                let pids = ["supervisor", "weight-server"].iter().flat_map(|role| soak.pids(role));
                let pids: Vec<String> = pids.map(|pid| pid.to_string()).collect();
                let _ = Command::new("kill").arg("-KILL").args(pids).status().unwrap();
            }
            EndsLoader(signal) => return self.end_loader(soak, signal),
            Drains => {
                let name = self.worker_name(soak);
                let drained = soak.command(&["drain", &name, "--timeout", "2s"]);
                return drained.and(soak.command(&["restart", &name]));
            }
            RestartsRolling => return soak.command(&["restart", "--rolling", "--timeout", "1s"]),
            Restarts("worker") => {
                let name = self.worker_name(soak);
                return soak.command(&["restart", &name]);
            }
            Restarts(role) => return soak.restart(role),
            AddsAndRemovesWorker => {
                let before = soak.fleet.try_processes().ok_or("ps does not answer")?;
                let model = soak.models[0].0.clone();
                soak.command(&["add-worker", &model])?;
                let now = soak.fleet.try_processes().ok_or("ps does not answer")?;
                let is_new = |name: &str| !before.iter().any(|process| process.name == name);
                let added = now.iter().find(|process| is_new(&process.name)).ok_or("no worker was added")?;
                return soak.command(&["remove-worker", &added.name]);
            }
            LoadsAndUnloads => {
                let loaded = load_third(soak);
                return loaded.and(soak.command(&["unload", THIRD]));
            }
            DeletesSocket => {
                let entries = std::fs::read_dir(soak.runtime_dir()).map_err(|error| error.to_string())?;
                let paths = entries.flatten().map(|entry| entry.path());
                let mut sockets: Vec<_> =
                    paths.filter(|path| path.extension().is_some_and(|e| e == "sock")).collect();
                sockets.sort();
                let _ = std::fs::remove_file(self.random.pick(&sockets));
            }
            TakesDescriptors(role) => {
                if let Some(pid) = self.one(soak, role) {
                    let open = proc::open_files(pid).len() as u64;
                    limit(pid, Resource::Nofile, open + self.random.below(4) as u64);
                }
            }
            TakesMemory(role) => {
                if let Some(pid) = self.one(soak, role) {
                    let size: u64 = proc::mappings(pid).iter().map(|mapping| mapping.size).sum();
                    limit(pid, Resource::As, size + (self.random.below(4) as u64) * (256 << 10));
                }
            }
            StallsLog => {
                let stalls = soak.log.stalls.clone();
                stalls.store(true, Ordering::Relaxed);
                after(Duration::from_secs(4), move || stalls.store(false, Ordering::Relaxed));
            }
            HangsUp => {
                let roles = ["supervisor", "router", "weight-server", "worker"];
                roles.iter().flat_map(|role| soak.pids(role)).for_each(|pid| proc::send_signal(pid, "HUP"));
            }
            ResetsPrefixCache => return soak.command(&["reset-prefix-cache"]),
        }
        Ok(())
    }

    /// One process of the role, or none if none lives. Half of the time it is the busiest one,
    /// because the router packs streams of many workers on few.
    fn one(&mut self, soak: &SoakFleet, role: &str) -> Option<u32> {
        let pids = soak.pids(role);
        if self.random.below(2) == 0 {
            return pids.into_iter().max_by_key(|pid| proc::cpu_time(*pid));
        }
        (!pids.is_empty()).then(|| *self.random.pick(&pids))
    }

    fn signal_one(&mut self, soak: &SoakFleet, role: &str, signal: &str) {
        if let Some(pid) = self.one(soak, role) {
            proc::end_by_signal(pid, signal);
        }
    }

    fn worker_name(&mut self, soak: &SoakFleet) -> String {
        let workers = soak.models.len();
        format!("worker-{}", self.random.below(workers))
    }

    /// Signals a loader in the middle of its work, if it is seen early enough.
    fn end_loader(&mut self, soak: &mut SoakFleet, signal: &'static str) -> Result<(), String> {
        let mark = soak.pids("weight-server").into_iter().next().ok_or("no weight-server")?;
        let hunter = std::thread::spawn(move || {
            let began = Instant::now();
            while began.elapsed() < Duration::from_secs(5) {
                if let Some(pid) = loader_of(mark) {
                    if signal == "STOP" {
                        proc::send_signal(pid, signal);
                        std::thread::sleep(Duration::from_secs(2));
                        proc::send_signal(pid, "CONT");
                    } else {
                        proc::end_by_signal(pid, signal);
                    }
                    return;
                }
            }
        });
        let loaded = load_third(soak);
        hunter.join().unwrap();
        let unloaded = soak.command(&["unload", THIRD]);
        loaded.and(unloaded)
    }
}

/// Loads the third model, which [`THIRD`] names.
pub(super) fn load_third(soak: &mut SoakFleet) -> Result<(), String> {
    let arguments = soak.load_arguments();
    soak.command(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
}

/// A loader of the weight-server.
pub(super) fn loader_of(weight_server: u32) -> Option<u32> {
    let is_loader = |pid: &u32| proc::arguments(*pid).iter().any(|argument| argument == "loader");
    proc::descendants(weight_server).into_iter().find(is_loader)
}

fn after(time: Duration, action: impl FnOnce() + Send + 'static) {
    std::thread::spawn(move || {
        std::thread::sleep(time);
        action();
    });
}

pub(super) fn pause(pids: Vec<u32>, time: Duration) {
    pids.iter().for_each(|&pid| proc::send_signal(pid, "STOP"));
    after(time, move || pids.iter().for_each(|&pid| proc::send_signal(pid, "CONT")));
}

/// Sets the soft limit of a process for 3 s.
fn limit(pid: u32, resource: Resource, value: u64) {
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return };
    // The process may have ended.
    let Ok(before) =
        prlimit(Some(pid), resource, Rlimit { current: Some(value), maximum: getrlimit(resource).maximum })
    else {
        return;
    };
    after(Duration::from_secs(3), move || {
        let _ended = prlimit(Some(pid), resource, before);
    });
}
