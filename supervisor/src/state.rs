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
//!     | Stop, Restart   |  v
//!     |                 | crash: an exit that no command asked for
//!  Starting, Running,   |  |            |                |
//!  Orphaned             |  | first      | later          | too many, or a permanent exit code
//!                       |  v            v                v
//!                       '--+-------- BackingOff        Failed --Start, Restart--> Starting
//!                           backoff over
//! ```
//!
//! Events come from three sources:
//! - commands: `Start`, `Stop`, `Restart`;
//! - the child, through the notify protocol: `Ready`, `WatchdogPing`, `WatchdogTrigger`,
//!   `ExtendTimeout`, `OrphanAdopted`;
//! - the kernel and the clock: `Exited`, `OrphanFound`, `Tick`.
//!
//! Actions: `Spawn` starts a process, `Terminate` sends SIGTERM, `Kill` sends SIGKILL. `Stopping`
//! turns into `Killing` when the grace period is over. `OrphanFound` takes a stopped child to
//! Orphaned.
//!
//! Invariants:
//! 1. A process exists in Orphaned, Starting, Running, Stopping and Killing, and in no other state.
//! 2. `Spawn` is returned only on entry into Starting.
//! 3. Every state with a process has a deadline, or SIGKILL was sent to the process.

use std::time::{Duration, Instant};

use service::Exit;

/// The timeouts and restart limits of one kind of child.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RestartPolicy {
    /// From exec to READY=1. A child that needs longer sends EXTEND_TIMEOUT_USEC.
    pub(crate) start_timeout: Duration,
    /// From SIGTERM to SIGKILL.
    pub(crate) stop_grace: Duration,
    /// The longest time between two WATCHDOG=1 messages of a running child.
    pub(crate) watchdog: Duration,
    /// How long a successor waits until an orphan offers itself for adoption.
    pub(crate) adopt_timeout: Duration,
    /// A child that was ready for this long counts as healthy. Its next crash counts as its first
    /// one.
    pub(crate) healthy_after: Duration,
    /// The backoff before the second restart in a row. It doubles with each further crash.
    pub(crate) initial_backoff: Duration,
    pub(crate) max_backoff: Duration,
    /// The child becomes Failed after more consecutive crashes than this.
    pub(crate) max_consecutive_crashes: u32,
}

/// Upper bound of EXTEND_TIMEOUT_USEC: a child may ask for more time, but not without limit.
const MAX_TIMEOUT_EXTENSION: Duration = Duration::from_secs(600);

impl RestartPolicy {
    /// The backoffs of six consecutive crashes take 6.2 seconds. That outlasts a short shortage of
    /// memory, and the user still learns of a broken child soon.
    pub(crate) const DEFAULT: RestartPolicy = RestartPolicy {
        start_timeout: Duration::from_secs(30),
        stop_grace: Duration::from_secs(10),
        watchdog: Duration::from_secs(30),
        adopt_timeout: Duration::from_secs(5),
        healthy_after: Duration::from_secs(5),
        initial_backoff: Duration::from_millis(200),
        max_backoff: Duration::from_secs(30),
        max_consecutive_crashes: 6,
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureReason {
    /// The child crashed more often than the policy allows.
    CrashLoop,
    /// The exit code says that a restart fails in the same way.
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
    Orphaned { deadline: Instant },
    Starting { deadline: Instant },
    Running { since: Instant, watchdog_deadline: Instant },
    Stopping { deadline: Instant, then: AfterExit },
    Killing { then: AfterExit },
    BackingOff { deadline: Instant },
    Failed(FailureReason),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ChildEvent {
    /// Commands.
    Start,
    Stop,
    Restart,
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
pub(crate) enum ChildAction {
    Spawn,
    /// Sends SIGTERM to the process.
    Terminate,
    /// Sends SIGKILL to the whole process group.
    Kill,
}

#[derive(Clone, Debug)]
pub(crate) struct ChildStateMachine {
    policy: RestartPolicy,
    state: ChildState,
    crashes: u32,
    consecutive_crashes: u32,
}

impl ChildStateMachine {
    pub(crate) fn new(policy: RestartPolicy) -> Self {
        Self { policy, state: ChildState::Stopped, crashes: 0, consecutive_crashes: 0 }
    }

    pub(crate) fn state(&self) -> ChildState {
        self.state
    }

    /// Counts all crashes since the supervisor knows the child.
    pub(crate) fn crashes(&self) -> u32 {
        self.crashes
    }

    /// Whether an exit of the process is expected.
    pub(crate) fn is_stopping(&self) -> bool {
        matches!(
            self.state,
            ChildState::Stopping { .. }
                | ChildState::Killing { then: AfterExit::StayStopped | AfterExit::Start }
                | ChildState::Stopped
        )
    }

    pub(crate) fn has_process(&self) -> bool {
        !matches!(self.state, ChildState::Stopped | ChildState::BackingOff { .. } | ChildState::Failed(_))
    }

    /// When the next Tick is due.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        match self.state {
            ChildState::Orphaned { deadline }
            | ChildState::Starting { deadline }
            | ChildState::Stopping { deadline, .. }
            | ChildState::BackingOff { deadline } => Some(deadline),
            ChildState::Running { watchdog_deadline, .. } => Some(watchdog_deadline),
            ChildState::Stopped | ChildState::Killing { .. } | ChildState::Failed(_) => None,
        }
    }

    pub(crate) fn handle(&mut self, now: Instant, event: ChildEvent) -> Option<ChildAction> {
        match (self.state, event) {
            (ChildState::Stopped, ChildEvent::OrphanFound) => {
                self.enter(ChildState::Orphaned { deadline: now + self.policy.adopt_timeout }, None)
            }
            (
                ChildState::Stopped | ChildState::BackingOff { .. },
                ChildEvent::Start | ChildEvent::Restart,
            ) => self.spawn(now),
            (ChildState::Failed(_), ChildEvent::Start | ChildEvent::Restart) => {
                self.consecutive_crashes = 0;
                self.spawn(now)
            }
            (ChildState::BackingOff { .. } | ChildState::Failed(_), ChildEvent::Stop) => {
                self.enter(ChildState::Stopped, None)
            }
            (ChildState::BackingOff { deadline }, ChildEvent::Tick) if now >= deadline => self.spawn(now),

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
            (ChildState::Stopping { deadline, .. }, ChildEvent::Stop) => {
                self.enter(ChildState::Stopping { deadline, then: AfterExit::StayStopped }, None)
            }
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
            (ChildState::Killing { .. }, ChildEvent::Stop) => {
                self.enter(ChildState::Killing { then: AfterExit::StayStopped }, None)
            }
            (ChildState::Killing { .. }, ChildEvent::Start | ChildEvent::Restart) => {
                self.enter(ChildState::Killing { then: AfterExit::Start }, None)
            }

            (ChildState::Stopping { then, .. } | ChildState::Killing { then }, ChildEvent::Exited(end)) => {
                match then {
                    AfterExit::StayStopped => self.enter(ChildState::Stopped, None),
                    AfterExit::Start => self.spawn(now),
                    AfterExit::CountAsCrash => self.handle_crash(now, &end),
                }
            }
            (ChildState::Running { since, .. }, ChildEvent::Exited(end)) => {
                if now.saturating_duration_since(since) >= self.policy.healthy_after {
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
        if let Some(exit) = permanent {
            return self.enter(ChildState::Failed(FailureReason::PermanentError(exit)), None);
        }
        if self.consecutive_crashes > self.policy.max_consecutive_crashes {
            return self.enter(ChildState::Failed(FailureReason::CrashLoop), None);
        }
        match self.policy.backoff(self.consecutive_crashes) {
            Duration::ZERO => self.spawn(now),
            pause => self.enter(ChildState::BackingOff { deadline: now + pause }, None),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SIGKILL: Termination = Termination::Signal(9);

    fn started(now: Instant) -> ChildStateMachine {
        let mut machine = ChildStateMachine::new(RestartPolicy::DEFAULT);
        assert_eq!(machine.handle(now, ChildEvent::Start), Some(ChildAction::Spawn));
        machine
    }

    fn running(now: Instant) -> ChildStateMachine {
        let mut machine = started(now);
        assert_eq!(machine.handle(now, ChildEvent::Ready), None);
        machine
    }

    #[test]
    fn first_crash_restarts_at_once_and_later_ones_after_growing_backoff() {
        let mut now = Instant::now();
        let mut machine = running(now);
        let mut backoffs_ms = Vec::new();
        loop {
            let action = machine.handle(now, ChildEvent::Exited(SIGKILL));
            let pause = match machine.state() {
                ChildState::Starting { .. } => Duration::ZERO,
                ChildState::BackingOff { deadline } => deadline - now,
                ChildState::Failed(cause) => {
                    assert_eq!(cause, FailureReason::CrashLoop);
                    break;
                }
                other => panic!("{other:?}"),
            };
            assert_eq!(action.is_some(), pause.is_zero());
            backoffs_ms.push(pause.as_millis());
            now += pause;
            machine.handle(now, ChildEvent::Tick);
        }
        assert_eq!(backoffs_ms, [0, 200, 400, 800, 1600, 3200]);
        assert_eq!(
            machine.handle(now, ChildEvent::Restart),
            Some(ChildAction::Spawn),
            "a Restart command leaves the failed state"
        );
    }

    #[test]
    fn healthy_child_resets_the_crash_count() {
        let mut now = Instant::now();
        let mut machine = running(now);
        for _ in 0..20 {
            now += RestartPolicy::DEFAULT.healthy_after;
            assert_eq!(machine.handle(now, ChildEvent::Exited(SIGKILL)), Some(ChildAction::Spawn));
            machine.handle(now, ChildEvent::Ready);
        }
        assert_eq!(machine.crashes(), 20);
    }

    #[test]
    fn permanent_exit_code_is_not_restarted() {
        let now = Instant::now();
        let mut machine = started(now);
        let code = i32::from(Exit::ModelRefused.code());
        assert_eq!(machine.handle(now, ChildEvent::Exited(Termination::ExitCode(code))), None);
        assert_eq!(machine.state(), ChildState::Failed(FailureReason::PermanentError(Exit::ModelRefused)));
    }

    #[test]
    fn child_that_ignores_sigterm_is_killed_after_the_grace_period() {
        let now = Instant::now();
        let mut machine = running(now);
        assert_eq!(machine.handle(now, ChildEvent::Stop), Some(ChildAction::Terminate));
        let almost = now + RestartPolicy::DEFAULT.stop_grace - Duration::from_millis(1);
        assert_eq!(machine.handle(almost, ChildEvent::Tick), None);
        assert_eq!(
            machine.handle(now + RestartPolicy::DEFAULT.stop_grace, ChildEvent::Tick),
            Some(ChildAction::Kill)
        );
        assert_eq!(machine.handle(now, ChildEvent::Exited(SIGKILL)), None);
        assert_eq!((machine.state(), machine.crashes()), (ChildState::Stopped, 0));
    }

    #[test]
    fn watchdog_and_start_timeout_kill_the_child_and_count_as_crash() {
        let now = Instant::now();
        let mut silent = running(now);
        assert_eq!(silent.handle(now + Duration::from_secs(20), ChildEvent::WatchdogPing), None);
        assert_eq!(silent.handle(now + Duration::from_secs(40), ChildEvent::Tick), None);
        assert_eq!(silent.handle(now + Duration::from_secs(50), ChildEvent::Tick), Some(ChildAction::Kill));
        assert_eq!(
            silent.handle(now + Duration::from_secs(50), ChildEvent::Exited(SIGKILL)),
            Some(ChildAction::Spawn)
        );
        let mut slow = started(now);
        slow.handle(now + Duration::from_secs(20), ChildEvent::ExtendTimeout(Duration::from_secs(30)));
        assert_eq!(slow.handle(now + Duration::from_secs(40), ChildEvent::Tick), None);
        assert_eq!(slow.handle(now + Duration::from_secs(50), ChildEvent::Tick), Some(ChildAction::Kill));
        slow.handle(now + Duration::from_secs(50), ChildEvent::Exited(SIGKILL));
        assert_eq!((silent.crashes(), slow.crashes()), (1, 1));
    }

    #[test]
    fn orphan_is_adopted_or_replaced() {
        let now = Instant::now();
        let mut adopted = ChildStateMachine::new(RestartPolicy::DEFAULT);
        adopted.handle(now, ChildEvent::OrphanFound);
        assert_eq!(adopted.handle(now, ChildEvent::OrphanAdopted), None);
        assert!(matches!(adopted.state(), ChildState::Running { .. }));
        let mut mute = ChildStateMachine::new(RestartPolicy::DEFAULT);
        mute.handle(now, ChildEvent::OrphanFound);
        let later = now + RestartPolicy::DEFAULT.adopt_timeout;
        assert_eq!(mute.handle(later, ChildEvent::Tick), Some(ChildAction::Kill));
        assert_eq!(mute.handle(later, ChildEvent::Exited(Termination::Unknown)), Some(ChildAction::Spawn));
    }

    fn any_event() -> impl Strategy<Value = ChildEvent> {
        prop_oneof![
            Just(ChildEvent::Start),
            Just(ChildEvent::Stop),
            Just(ChildEvent::Restart),
            Just(ChildEvent::OrphanFound),
            Just(ChildEvent::OrphanAdopted),
            Just(ChildEvent::Ready),
            Just(ChildEvent::WatchdogPing),
            Just(ChildEvent::WatchdogTrigger),
            (0u64..3_000).prop_map(|s| ChildEvent::ExtendTimeout(Duration::from_secs(s))),
            Just(ChildEvent::Exited(SIGKILL)),
            Just(ChildEvent::Exited(Termination::ExitCode(1))),
            Just(ChildEvent::Exited(Termination::ExitCode(2))),
            Just(ChildEvent::Tick),
        ]
    }

    proptest! {
        /// For any sequence of events: at most one process exists, signals go to existing processes
        /// only, and no state with a process lasts forever.
        #[test]
        fn at_most_one_process_exists(steps in prop::collection::vec((any_event(), 0u64..20_000), 0..200)) {
            let mut now = Instant::now();
            let mut machine = ChildStateMachine::new(RestartPolicy::DEFAULT);
            let mut process = false;
            for (event, wait_ms) in steps {
                now += Duration::from_millis(wait_ms);
                match event {
                    // The environment cannot report the exit of a process that does not exist.
                    ChildEvent::Exited(_) if !process => continue,
                    ChildEvent::Exited(_) => process = false,
                    ChildEvent::OrphanFound if machine.state() == ChildState::Stopped => process = true,
                    _ => {}
                }
                match machine.handle(now, event) {
                    Some(ChildAction::Spawn) => {
                        prop_assert!(!process, "spawned while a process exists");
                        process = true;
                    }
                    Some(ChildAction::Terminate | ChildAction::Kill) => prop_assert!(process, "signal without a process"),
                    None => {}
                }
                prop_assert_eq!(machine.has_process(), process);
                let bounded = machine.deadline().is_some() || matches!(machine.state(), ChildState::Killing { .. });
                prop_assert!(!process || bounded, "{:?} has no deadline", machine.state());
            }
        }

        /// From any state, a Stop command and enough time bring the child to Stopped.
        #[test]
        fn stop_command_always_reaches_stopped(steps in prop::collection::vec((any_event(), 0u64..20_000), 0..60)) {
            let mut now = Instant::now();
            let mut machine = ChildStateMachine::new(RestartPolicy::DEFAULT);
            for (event, wait_ms) in steps {
                now += Duration::from_millis(wait_ms);
                if matches!(event, ChildEvent::Exited(_)) && !machine.has_process() {
                    continue;
                }
                machine.handle(now, event);
            }
            let mut action = machine.handle(now, ChildEvent::Stop);
            for _ in 0..4 {
                prop_assert_ne!(action, Some(ChildAction::Spawn));
                action = match (action, machine.deadline()) {
                    (Some(ChildAction::Kill), _) => machine.handle(now, ChildEvent::Exited(SIGKILL)),
                    (_, Some(deadline)) => {
                        now = now.max(deadline);
                        machine.handle(now, ChildEvent::Tick)
                    }
                    // SIGKILL was sent before; the exit follows without another action.
                    (_, None) if machine.has_process() => machine.handle(now, ChildEvent::Exited(SIGKILL)),
                    (_, None) => None,
                };
            }
            prop_assert_eq!(machine.state(), ChildState::Stopped);
        }
    }
}
