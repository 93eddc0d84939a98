// SPDX-License-Identifier: Apache-2.0

//! The steps at which the processes of a fleet meet their faults. What the step is, is seen from
//! outside: by a loader that runs, a worker that has just started, a command that has not ended,
//! and the frames that clients have received.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::client::Client;
use super::fault::{load_third, loader_of};
use super::soak_fleet::{SoakFleet, THIRD};
use crate::harness::random::SeededRandom;
use crate::harness::{TIMEOUT, ballast, demo_7m, demo_22m, model_table, proc};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FaultStep {
    /// A third model is loaded.
    Load,
    /// A worker starts, because its predecessor was killed.
    Attach,
    Prefill,
    Decode,
    Drain,
    /// The third model gets another file.
    Swap,
    /// The configuration has the third model, and another KV cache for the first one.
    Reload,
    /// Another executable takes over and replaces each process.
    Upgrade,
}

pub(super) const STEPS: [FaultStep; 8] = [
    FaultStep::Load,
    FaultStep::Attach,
    FaultStep::Prefill,
    FaultStep::Decode,
    FaultStep::Drain,
    FaultStep::Swap,
    FaultStep::Reload,
    FaultStep::Upgrade,
];

/// The commands by which an executable replaces the processes of its predecessor.
const REPLACEMENTS: [&[&str]; 3] =
    [&["restart", "weight-server"], &["restart", "--rolling", "--timeout", "1s"], &["restart", "router"]];

/// A loader is seen within this time, or never: it reads a small file.
const LOADER_SEEN: Duration = Duration::from_secs(5);

impl FaultStep {
    /// Whether a loader runs.
    pub(super) fn loads(self) -> bool {
        matches!(self, Self::Load | Self::Swap | Self::Reload)
    }

    /// Whether the step itself ends the router, whichever process the fault ends.
    pub(super) fn ends_router(self) -> bool {
        self == Self::Upgrade
    }

    /// What has to be there before the streams begin.
    pub(super) fn prepare(self, soak: &mut SoakFleet) {
        match self {
            Self::Swap => load_third(soak).unwrap(),
            Self::Upgrade => soak.use_next_executable(),
            _ => {}
        }
    }

    /// Waits for the step. Returns the process of the role, or `None` if the step was over before
    /// it was seen, and a command that goes on.
    pub(super) fn reach(
        self,
        soak: &mut SoakFleet,
        client: &Client,
        role: &str,
        random: &mut SeededRandom,
    ) -> (Option<u32>, Option<Child>) {
        let workers = soak.pids("worker");
        match self {
            Self::Load => {
                let command = spawn(soak, &soak.load_arguments());
                (at_loader(soak, role), Some(command))
            }
            Self::Attach => {
                proc::send_signal(workers[0], "KILL");
                (at_new_worker(soak, role, &workers, random), None)
            }
            Self::Prefill => {
                let is_reached = within(TIMEOUT, || is_above(&client.progress.started, 0));
                (is_reached.and_then(|()| first(soak, role)), None)
            }
            Self::Decode => (at_tokens(client).and_then(|()| first(soak, role)), None),
            Self::Drain => {
                let seen = at_tokens(client);
                let command = spawn(soak, &["drain", "worker-0", "--timeout", "3s"]);
                std::thread::sleep(Duration::from_millis(random.below(40) as u64));
                during(command, seen.and_then(|()| first(soak, role)))
            }
            Self::Swap => {
                let file = soak.file("swapped.gguf", &demo_7m());
                let command = spawn(soak, &["swap", THIRD, file.to_str().unwrap()]);
                if role == "loader" || random.below(2) == 0 {
                    return (at_loader(soak, role), Some(command));
                }
                let victim = at_new_worker(soak, role, &workers, random);
                during(command, victim)
            }
            Self::Reload => {
                let file = soak.file("third.gguf", &demo_22m());
                soak.configure(|config| {
                    config.replacen("kv-tokens = 8192", "kv-tokens = 7168", 1) + &third(&file)
                });
                let command = spawn(soak, &["reload"]);
                if role == "loader" || random.below(2) == 0 {
                    return (at_loader(soak, role), Some(command));
                }
                // The command may end before the workers of the changed model have been replaced.
                (at_new_worker(soak, role, &workers, random), Some(command))
            }
            Self::Upgrade => at_upgrade(soak, client, role, random),
        }
    }

    /// Brings back what was before the step. The fault is over.
    pub(super) fn clean_up(self, soak: &mut SoakFleet) {
        match self {
            Self::Load => unload_third(soak),
            Self::Drain => {
                let _not_drained = soak.command(&["restart", "worker-0"]);
            }
            Self::Swap => unload_third(soak),
            Self::Reload => {
                soak.configure(str::to_owned);
                repeat(soak, |soak| soak.command(&["reload"]));
                unload_third(soak);
            }
            Self::Upgrade => {
                for arguments in REPLACEMENTS {
                    repeat(soak, |soak| soak.command(arguments));
                }
                repeat(soak, |soak| soak.executes_only_its_executable());
            }
            Self::Attach | Self::Prefill | Self::Decode => {}
        }
    }
}

fn first(soak: &SoakFleet, role: &str) -> Option<u32> {
    soak.pids(role).first().copied()
}

/// A process of the role while a loader runs.
fn at_loader(soak: &SoakFleet, role: &str) -> Option<u32> {
    let weight_server = first(soak, "weight-server")?;
    let loader = within(LOADER_SEEN, || loader_of(weight_server))?;
    if role == "loader" { Some(loader) } else { first(soak, role) }
}

/// A process of the role while a worker attaches that is none of `before`.
fn at_new_worker(soak: &SoakFleet, role: &str, before: &[u32], random: &mut SeededRandom) -> Option<u32> {
    let new = within(TIMEOUT, || soak.pids("worker").into_iter().find(|pid| !before.contains(pid)))?;
    std::thread::sleep(Duration::from_millis(random.below(80) as u64));
    if role == "worker" { Some(new) } else { first(soak, role) }
}

/// The streams have begun to generate.
fn at_tokens(client: &Client) -> Option<()> {
    within(TIMEOUT, || is_above(&client.progress.deltas, 3))
}

/// The successor takes over, or it replaces one of the roles.
fn at_upgrade(
    soak: &mut SoakFleet,
    client: &Client,
    role: &str,
    random: &mut SeededRandom,
) -> (Option<u32>, Option<Child>) {
    let seen = at_tokens(client);
    proc::end_by_signal(soak.pids("supervisor")[0], "KILL");
    soak.keep_supervised();
    if random.below(2) == 0 {
        std::thread::sleep(Duration::from_millis(random.below(300) as u64));
        return (seen.and_then(|()| first(soak, role)), None);
    }
    let answers = within(TIMEOUT, || soak.fleet.try_processes());
    let replacement: &[&str] = REPLACEMENTS[random.below(REPLACEMENTS.len())];
    let command = spawn(soak, replacement);
    std::thread::sleep(Duration::from_millis(random.below(40) as u64));
    during(command, answers.and_then(|_| first(soak, role)))
}

/// The victim, if the command has not ended yet.
fn during(mut command: Child, victim: Option<u32>) -> (Option<u32>, Option<Child>) {
    let goes_on = command.try_wait().unwrap().is_none();
    (victim.filter(|_| goes_on), Some(command))
}

fn is_above(counter: &std::sync::atomic::AtomicUsize, count: usize) -> Option<()> {
    (counter.load(Ordering::Relaxed) > count).then_some(())
}

/// Polls more often than `eventually`: steps are short.
fn within<T>(time: Duration, mut condition: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + time;
    while Instant::now() < end {
        if let Some(value) = condition() {
            return Some(value);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    None
}

fn spawn(soak: &SoakFleet, arguments: &[impl AsRef<OsStr>]) -> Child {
    let mut command = ballast();
    command.args(arguments).arg("--runtime-dir").arg(soak.runtime_dir());
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// The third model in `ballast.toml`.
fn third(file: &Path) -> String {
    model_table(THIRD, file, "")
}

/// A command that the step has begun may still go on, and refuse others meanwhile.
fn repeat(soak: &mut SoakFleet, mut work: impl FnMut(&mut SoakFleet) -> Result<(), String>) {
    let end = Instant::now() + TIMEOUT;
    while let Err(refusal) = work(soak) {
        assert!(Instant::now() < end, "{refusal}\n{}", soak.log.last_lines());
        soak.sleep_until(Instant::now() + Duration::from_millis(200));
    }
}

fn unload_third(soak: &mut SoakFleet) {
    repeat(soak, |soak| match soak.command(&["unload", THIRD]) {
        Err(refusal) if refusal.contains("no model is called") => Ok(()),
        unloaded => unloaded,
    });
}
