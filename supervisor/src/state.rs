// SPDX-License-Identifier: Apache-2.0

//! The state machine of one child. It takes one event and returns at most one action. It does no
//! I/O, and time is an argument.
//!
//! ```text
//!  Stopped --Start--> Starting --Ready--> Running <--OrphanAdopted-- Orphaned
//!     ^                 ^  |                 |                          |
//!     |                 |  | start timeout   | watchdog timeout         | adopt timeout
//!     | Exited          |  v                 v                          v
//!  Stopping             | Killing (then: CountAsCrash)          Killing (then: Start)
//!     ^                 |  | Exited
//!     | Stop, Restart   |  v              (Drain: from Running through Draining to Stopping)
//!     |                 | crash: an exit that no command asked for
//!  Starting, Running,   |  |            |
//!  Orphaned             |  | first      | later, or a permanent exit code
//!                       |  v            v
//!                       '--+-------- BackingOff
//!                           backoff over, Start, Restart
//! ```
//!
//! Events come from three sources:
//! - commands: `Start`, `Stop`, `Restart`, `Drain`;
//! - the child, through the notify protocol: `Ready`, `WatchdogPing`, `WatchdogTrigger`,
//!   `ExtendTimeout`, `OrphanAdopted`;
//! - the kernel and the clock: `Exited`, `OrphanFound`, `Tick`.
//!
//! Actions: `Spawn` starts a process, `Drain` asks a worker to finish its streams, `Terminate`
//! sends SIGTERM, `Kill` sends SIGKILL. `Stopping` turns into `Killing` when the grace period is
//! over. `OrphanFound` takes a stopped child to Orphaned.
//!
//! Invariants:
//! 1. A process exists in Orphaned, Starting, Running, Stopping and Killing, and in no other state.
//! 2. `Spawn` is returned only on entry into Starting.
//! 3. Every state with a process has a deadline, or SIGKILL was sent to the process.
//! 4. A crashed child always has a deadline for its next start: no crash is the last one.

use std::time::{Duration, Instant};

use service::Exit;

/// The timeouts and restart limits of one kind of child.
#[derive(Clone, Copy, Debug)]
pub struct RestartPolicy {
    /// From exec to READY=1. A child that needs longer sends EXTEND_TIMEOUT_USEC.
    pub start_timeout: Duration,
    /// From SIGTERM to SIGKILL.
    pub stop_grace: Duration,
    /// The longest time between two WATCHDOG=1 messages of a running child.
    pub watchdog: Duration,
    /// How long a successor waits until an orphan offers itself for adoption.
    pub adopt_timeout: Duration,
    /// A child that was ready for this long, and for its last backoff, counts as healthy. Its next
    /// crash counts as its first one.
    pub healthy_after: Duration,
    /// The backoff before the second restart in a row. It doubles with each further crash.
    pub initial_backoff: Duration,
    pub max_backoff: Duration,
    /// More consecutive crashes are a crash loop, which no passing fault explains.
    pub crash_loop_after: u32,
}

/// Upper bound of EXTEND_TIMEOUT_USEC: a child may ask for more time, but not without limit.
pub(crate) const MAX_TIMEOUT_EXTENSION: Duration = Duration::from_secs(600);
/// Upper bound of the grace of a drain. No stream of a router lasts longer.
const MAX_DRAIN_GRACE: Duration = Duration::from_secs(24 * 3600);
/// A drained worker answers within this time after its grace.
const DRAIN_ANSWER: Duration = Duration::from_secs(5);

impl RestartPolicy {
    /// The backoffs of six consecutive crashes take 6.2 seconds. That outlasts a short shortage of
    /// memory, and the user still learns of a broken child soon. A start a minute costs little, and
    /// a cured fault (a mount that came back, a freed device) is found within that minute.
    pub const DEFAULT: RestartPolicy = RestartPolicy {
        start_timeout: Duration::from_secs(30),
        stop_grace: Duration::from_secs(10),
        watchdog: Duration::from_secs(30),
        adopt_timeout: Duration::from_secs(5),
        healthy_after: Duration::from_secs(5),
        initial_backoff: Duration::from_millis(200),
        max_backoff: Duration::from_secs(60),
        crash_loop_after: 6,
    };

    /// The restart after the first crash has no backoff.
    fn backoff(&self, consecutive_crashes: u32) -> Duration {
        match consecutive_crashes {
            0 | 1 => Duration::ZERO,
            n => self.initial_backoff.saturating_mul(1 << (n - 2).min(20)).min(self.max_backoff),
        }
    }
}

/// How a process terminated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Termination {
    ExitCode(i32),
    Signal(i32),
    /// The process was an adopted orphan: the kernel reports that it exited, but not how.
    Unknown,
    /// The process could not be started.
    SpawnFailed(String),
}

impl Termination {
    /// Whether a signal other than SIGKILL and SIGTERM ended the process.
    pub(crate) fn is_crash(&self) -> bool {
        use nix::libc::{SIGKILL, SIGTERM};
        matches!(self, Termination::Signal(signal) if !matches!(*signal, SIGKILL | SIGTERM))
    }
}

impl std::fmt::Display for Termination {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Termination::ExitCode(code) => match Exit::from_code(*code) {
                Some(exit) => write!(f, "exit code {code} ({exit:?})"),
                None => write!(f, "exit code {code}"),
            },
            Termination::Signal(signal) => match nix::sys::signal::Signal::try_from(*signal) {
                Ok(name) => write!(f, "killed by {name}"),
                Err(_) => write!(f, "killed by signal {signal}"),
            },
            Termination::Unknown => f.write_str("exited, status unknown"),
            Termination::SpawnFailed(why) => write!(f, "could not be started: {why}"),
        }
    }
}

/// Why a child waits for its next start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackoffReason {
    /// A few crashes, which a restart may cure.
    Crash,
    /// The child crashed more often in a row than a passing fault explains.
    CrashLoop,
    /// The exit code says that a restart with the same input fails in the same way. The input may
    /// change, so the child starts again nevertheless.
    PermanentError(Exit),
}

/// What the state machine does after the process that is being stopped has exited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterExit {
    StayStopped,
    Start,
    /// The process was killed because it hung, which counts as a crash.
    CountAsCrash,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChildState {
    Stopped,
    Orphaned {
        deadline: Instant,
    },
    Starting {
        deadline: Instant,
    },
    Running {
        since: Instant,
        watchdog_deadline: Instant,
    },
    /// A worker that takes no new requests and finishes its streams.
    Draining {
        deadline: Instant,
        watchdog_deadline: Instant,
        then: AfterExit,
    },
    Stopping {
        deadline: Instant,
        then: AfterExit,
    },
    Killing {
        then: AfterExit,
    },
    BackingOff {
        deadline: Instant,
        reason: BackoffReason,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChildEvent {
    /// Commands.
    Start,
    Stop,
    Restart,
    /// Let the running streams end before the process stops, at most `grace`.
    Drain {
        grace: Duration,
        then: AfterExit,
    },
    /// The worker has drained, or cannot be asked.
    Drained,
    /// A process of a dead supervisor is still alive.
    OrphanFound,
    /// The orphan offered itself for adoption.
    OrphanAdopted,
    /// Notifications of the child.
    Ready,
    WatchdogPing,
    WatchdogTrigger,
    ExtendTimeout(Duration),
    /// The kernel reports the exit of the process. A failed spawn is reported in the same way.
    Exited(Termination),
    /// The deadline may have passed.
    Tick,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChildAction {
    Spawn,
    /// Asks the worker to take no new requests and to finish its streams.
    Drain {
        grace: Duration,
    },
    /// Sends SIGTERM to the process.
    Terminate,
    /// Sends SIGKILL to the whole process group.
    Kill,
}

#[derive(Clone, Debug)]
pub struct ChildStateMachine {
    policy: RestartPolicy,
    state: ChildState,
    crashes: u32,
    consecutive_crashes: u32,
}

impl ChildStateMachine {
    pub fn new(policy: RestartPolicy) -> Self {
        Self { policy, state: ChildState::Stopped, crashes: 0, consecutive_crashes: 0 }
    }

    pub fn state(&self) -> ChildState {
        self.state
    }

    /// Counts all crashes since the supervisor knows the child.
    pub fn crashes(&self) -> u32 {
        self.crashes
    }

    /// Counts the crashes since the child was healthy.
    pub fn consecutive_crashes(&self) -> u32 {
        self.consecutive_crashes
    }

    /// Whether an exit of the process is expected.
    pub fn is_stopping(&self) -> bool {
        matches!(
            self.state,
            ChildState::Stopping { .. }
                | ChildState::Killing { then: AfterExit::StayStopped | AfterExit::Start }
                | ChildState::Stopped
        )
    }

    pub fn has_process(&self) -> bool {
        !matches!(self.state, ChildState::Stopped | ChildState::BackingOff { .. })
    }

    /// When the next Tick is due.
    pub fn deadline(&self) -> Option<Instant> {
        match self.state {
            ChildState::Orphaned { deadline }
            | ChildState::Starting { deadline }
            | ChildState::Stopping { deadline, .. }
            | ChildState::BackingOff { deadline, .. } => Some(deadline),
            ChildState::Running { watchdog_deadline, .. } => Some(watchdog_deadline),
            ChildState::Draining { deadline, watchdog_deadline, .. } => Some(deadline.min(watchdog_deadline)),
            ChildState::Stopped | ChildState::Killing { .. } => None,
        }
    }

    pub fn handle(&mut self, now: Instant, event: ChildEvent) -> Option<ChildAction> {
        match (self.state, event) {
            (ChildState::Stopped, ChildEvent::OrphanFound) => {
                self.enter(ChildState::Orphaned { deadline: now + self.policy.adopt_timeout }, None)
            }
            (ChildState::Stopped, ChildEvent::Start | ChildEvent::Restart) => self.spawn(now),
            (ChildState::BackingOff { .. }, ChildEvent::Start | ChildEvent::Restart) => {
                self.consecutive_crashes = 0;
                self.spawn(now)
            }
            (ChildState::BackingOff { .. }, ChildEvent::Stop) => self.enter(ChildState::Stopped, None),
            (ChildState::BackingOff { deadline, .. }, ChildEvent::Tick) if now >= deadline => self.spawn(now),

            (ChildState::Orphaned { .. }, ChildEvent::OrphanAdopted)
            | (ChildState::Starting { .. }, ChildEvent::Ready) => self.enter(
                ChildState::Running { since: now, watchdog_deadline: now + self.policy.watchdog },
                None,
            ),
            // An orphan that never offers itself cannot be supervised, so a new process replaces
            // it.
            (ChildState::Orphaned { deadline }, ChildEvent::Tick) if now >= deadline => {
                self.enter(ChildState::Killing { then: AfterExit::Start }, Some(ChildAction::Kill))
            }
            (ChildState::Starting { deadline }, ChildEvent::Tick) if now >= deadline => {
                self.kill_hung_process()
            }
            (ChildState::Starting { deadline }, ChildEvent::ExtendTimeout(by)) => self.enter(
                ChildState::Starting { deadline: deadline.max(now + by.min(MAX_TIMEOUT_EXTENSION)) },
                None,
            ),
            (ChildState::Running { since, .. }, ChildEvent::WatchdogPing) => {
                self.enter(ChildState::Running { since, watchdog_deadline: now + self.policy.watchdog }, None)
            }
            (ChildState::Running { watchdog_deadline, .. }, ChildEvent::Tick) if now >= watchdog_deadline => {
                self.kill_hung_process()
            }
            (ChildState::Starting { .. } | ChildState::Running { .. }, ChildEvent::WatchdogTrigger) => {
                self.kill_hung_process()
            }

            (
                ChildState::Orphaned { .. } | ChildState::Starting { .. } | ChildState::Running { .. },
                ChildEvent::Stop,
            ) => self.terminate(now, AfterExit::StayStopped),
            (
                ChildState::Orphaned { .. } | ChildState::Starting { .. } | ChildState::Running { .. },
                ChildEvent::Restart,
            ) => self.terminate(now, AfterExit::Start),
            (ChildState::Running { watchdog_deadline, .. }, ChildEvent::Drain { grace, then }) => {
                let grace = grace.min(MAX_DRAIN_GRACE);
                let deadline = now + grace + DRAIN_ANSWER;
                let state = ChildState::Draining { deadline, watchdog_deadline, then };
                self.enter(state, Some(ChildAction::Drain { grace }))
            }
            (ChildState::Orphaned { .. } | ChildState::Starting { .. }, ChildEvent::Drain { then, .. }) => {
                self.terminate(now, then)
            }
            (
                ChildState::Stopped | ChildState::BackingOff { .. },
                ChildEvent::Drain { then: AfterExit::Start, .. },
            ) => self.spawn(now),
            (ChildState::BackingOff { .. }, ChildEvent::Drain { .. }) => {
                self.enter(ChildState::Stopped, None)
            }
            // A later drain decides what follows, and may end this one earlier.
            (ChildState::Draining { deadline, watchdog_deadline, .. }, ChildEvent::Drain { grace, then }) => {
                let deadline = deadline.min(now + grace.min(MAX_DRAIN_GRACE) + DRAIN_ANSWER);
                self.enter(ChildState::Draining { deadline, watchdog_deadline, then }, None)
            }
            (ChildState::Draining { deadline, then, .. }, ChildEvent::WatchdogPing) => {
                let watchdog_deadline = now + self.policy.watchdog;
                self.enter(ChildState::Draining { deadline, watchdog_deadline, then }, None)
            }
            (ChildState::Draining { watchdog_deadline, then, .. }, ChildEvent::Tick)
                if now >= watchdog_deadline =>
            {
                self.enter(ChildState::Killing { then }, Some(ChildAction::Kill))
            }
            (ChildState::Draining { deadline, then, .. }, ChildEvent::Tick) if now >= deadline => {
                self.terminate(now, then)
            }
            (ChildState::Draining { then, .. }, ChildEvent::Drained) => self.terminate(now, then),
            (ChildState::Draining { .. }, ChildEvent::Stop) => self.terminate(now, AfterExit::StayStopped),
            (ChildState::Draining { .. }, ChildEvent::Restart) => self.terminate(now, AfterExit::Start),
            (
                ChildState::Stopping { deadline, .. },
                ChildEvent::Stop | ChildEvent::Drain { then: AfterExit::StayStopped, .. },
            ) => self.enter(ChildState::Stopping { deadline, then: AfterExit::StayStopped }, None),
            (ChildState::Stopping { deadline, .. }, ChildEvent::Start | ChildEvent::Restart) => {
                self.enter(ChildState::Stopping { deadline, then: AfterExit::Start }, None)
            }
            (ChildState::Stopping { deadline, then }, ChildEvent::ExtendTimeout(by)) => self.enter(
                ChildState::Stopping { deadline: deadline.max(now + by.min(MAX_TIMEOUT_EXTENSION)), then },
                None,
            ),
            (ChildState::Stopping { deadline, then }, ChildEvent::Tick) if now >= deadline => {
                self.enter(ChildState::Killing { then }, Some(ChildAction::Kill))
            }
            (
                ChildState::Killing { .. },
                ChildEvent::Stop | ChildEvent::Drain { then: AfterExit::StayStopped, .. },
            ) => self.enter(ChildState::Killing { then: AfterExit::StayStopped }, None),
            (ChildState::Killing { .. }, ChildEvent::Start | ChildEvent::Restart) => {
                self.enter(ChildState::Killing { then: AfterExit::Start }, None)
            }

            (
                ChildState::Stopping { then, .. }
                | ChildState::Killing { then }
                | ChildState::Draining { then, .. },
                ChildEvent::Exited(end),
            ) => match then {
                AfterExit::StayStopped => self.enter(ChildState::Stopped, None),
                AfterExit::Start => self.spawn(now),
                AfterExit::CountAsCrash => self.handle_crash(now, &end),
            },
            (ChildState::Running { since, .. }, ChildEvent::Exited(end)) => {
                let healthy_after =
                    self.policy.healthy_after.max(self.policy.backoff(self.consecutive_crashes));
                if now.saturating_duration_since(since) >= healthy_after {
                    self.consecutive_crashes = 0;
                }
                self.handle_crash(now, &end)
            }
            (ChildState::Orphaned { .. } | ChildState::Starting { .. }, ChildEvent::Exited(end)) => {
                self.handle_crash(now, &end)
            }

            // Ignored: a Tick before the deadline, a command that is already carried out, or a
            // notification of a process that is being stopped.
            (
                _,
                ChildEvent::Start
                | ChildEvent::Stop
                | ChildEvent::Drain { .. }
                | ChildEvent::Drained
                | ChildEvent::OrphanFound
                | ChildEvent::OrphanAdopted
                | ChildEvent::Ready
                | ChildEvent::WatchdogPing
                | ChildEvent::WatchdogTrigger
                | ChildEvent::ExtendTimeout(_)
                | ChildEvent::Exited(_)
                | ChildEvent::Tick,
            ) => None,
        }
    }

    fn enter(&mut self, state: ChildState, action: Option<ChildAction>) -> Option<ChildAction> {
        self.state = state;
        action
    }

    fn spawn(&mut self, now: Instant) -> Option<ChildAction> {
        self.enter(
            ChildState::Starting { deadline: now + self.policy.start_timeout },
            Some(ChildAction::Spawn),
        )
    }

    fn terminate(&mut self, now: Instant, then: AfterExit) -> Option<ChildAction> {
        self.enter(
            ChildState::Stopping { deadline: now + self.policy.stop_grace, then },
            Some(ChildAction::Terminate),
        )
    }

    fn kill_hung_process(&mut self) -> Option<ChildAction> {
        self.enter(ChildState::Killing { then: AfterExit::CountAsCrash }, Some(ChildAction::Kill))
    }

    fn handle_crash(&mut self, now: Instant, termination: &Termination) -> Option<ChildAction> {
        self.crashes += 1;
        self.consecutive_crashes += 1;
        let permanent = match termination {
            Termination::ExitCode(code) => Exit::from_code(*code).filter(|exit| exit.is_permanent()),
            _ => None,
        };
        let reason = match permanent {
            Some(exit) => BackoffReason::PermanentError(exit),
            None if self.consecutive_crashes > self.policy.crash_loop_after => BackoffReason::CrashLoop,
            None => BackoffReason::Crash,
        };
        // An immediate restart is for a process that was lost by accident.
        let backoff_steps = self.consecutive_crashes.max(if permanent.is_some() { 2 } else { 1 });
        match self.policy.backoff(backoff_steps) {
            Duration::ZERO => self.spawn(now),
            pause => self.enter(ChildState::BackingOff { deadline: now + pause, reason }, None),
        }
    }
}

#[cfg(test)]
mod tests;
