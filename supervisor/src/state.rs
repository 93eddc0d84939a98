//! The life of one child as a pure machine: events in, at most one action out. Time is an argument.
//!
//! ```text
//!            Start                        Ready
//!  Stopped --------->  Starting  ------------------->  Running <-------- Orphaned (left by a dead supervisor)
//!     ^               ^   |  \ too slow                 |   \ watchdog      | Adopted
//!     |        pause  |   |   `---------> Killing <-----|----'              | did not offer itself: Killing
//!     |        over   |   | Exited           | Exited   | Exited
//!     |               |   v                  v          v
//!     |            BackingOff <---------- crashed? ------'
//!     |                                      | too often, or an exit code that says "never"
//!     |  Exited                              v
//!  Stopping <---- Stop, Restart           Failed ---- Restart ----> Starting
//!     |  grace over
//!     `---------> Killing
//! ```
//!
//! Invariant: a process exists in Orphaned, Starting, Running, Stopping and Killing, and in no other state. `Spawn` is only
//! ever the way into Starting; every state with a process, except a healthy Running one, has a deadline or has been sent
//! SIGKILL, which cannot be ignored.

use std::time::{Duration, Instant};

use service::Exit;

/// How patient the supervisor is with one kind of child.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Policy {
    /// From exec to READY=1. A child that needs longer says so (EXTEND_TIMEOUT_USEC).
    pub(crate) start_timeout: Duration,
    /// From SIGTERM to SIGKILL.
    pub(crate) stop_grace: Duration,
    /// Longest silence of a running child.
    pub(crate) watchdog: Duration,
    /// For how long a successor waits for the children of its predecessor.
    pub(crate) adopt_timeout: Duration,
    /// A child that was ready for this long has shown that it can live: its crash counts as a first one.
    pub(crate) healthy_after: Duration,
    /// Pause before the second start in a row; doubles from then on.
    pub(crate) pause_first: Duration,
    pub(crate) pause_max: Duration,
    /// Crashes in a row after which it is given up.
    pub(crate) crashes_in_a_row_max: u32,
}

/// A child may ask for more time, but not for ever.
const EXTENSION_MAX: Duration = Duration::from_secs(600);

impl Policy {
    /// Six crashes in a row take 6.2 seconds of pauses: long enough for a passing shortage, short enough to be told soon.
    pub(crate) const DEFAULT: Policy = Policy {
        start_timeout: Duration::from_secs(30),
        stop_grace: Duration::from_secs(10),
        watchdog: Duration::from_secs(30),
        adopt_timeout: Duration::from_secs(5),
        healthy_after: Duration::from_secs(5),
        pause_first: Duration::from_millis(200),
        pause_max: Duration::from_secs(30),
        crashes_in_a_row_max: 6,
    };

    /// The first crash costs no pause.
    fn pause(&self, crashes_in_a_row: u32) -> Duration {
        match crashes_in_a_row {
            0 | 1 => Duration::ZERO,
            n => self.pause_first.saturating_mul(1 << (n - 2).min(20)).min(self.pause_max),
        }
    }
}

/// How a process ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    Code(i32),
    Signal(i32),
    /// It was not our child: the kernel told that it ended, not how.
    Unknown,
    /// It could not be started at all.
    NotStarted(String),
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            End::Code(code) => match Exit::from_code(*code) {
                Some(exit) => write!(f, "exit code {code} ({exit:?})"),
                None => write!(f, "exit code {code}"),
            },
            End::Signal(signal) => match nix::sys::signal::Signal::try_from(*signal) {
                Ok(name) => write!(f, "killed by {name}"),
                Err(_) => write!(f, "killed by signal {signal}"),
            },
            End::Unknown => f.write_str("ended"),
            End::NotStarted(why) => write!(f, "not started: {why}"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailCause {
    /// It crashed again and again.
    CrashLoop,
    /// Its exit code says that another try must fail the same way.
    Permanent(Exit),
}

/// What follows when the process that is being stopped has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    Stay,
    Start,
    /// It was killed for hanging: that is a crash.
    Crash,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Stopped,
    Orphaned { until: Instant },
    Starting { until: Instant },
    Running { since: Instant, silent_until: Instant },
    Stopping { until: Instant, next: Next },
    Killing { next: Next },
    BackingOff { until: Instant },
    Failed(FailCause),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// Orders.
    Start,
    Stop,
    Restart,
    /// A process of a dead supervisor is known to live.
    Orphan,
    /// ... and has offered itself.
    Adopted,
    /// What the child says.
    Ready,
    Alive,
    Stuck,
    Extend(Duration),
    /// What the kernel says. Also reported when a Spawn failed.
    Ended(End),
    /// The deadline may have passed.
    Tick,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Spawn,
    /// SIGTERM to the process.
    Terminate,
    /// SIGKILL to its whole process group.
    Kill,
}

#[derive(Clone, Debug)]
pub(crate) struct Machine {
    policy: Policy,
    state: State,
    crashes: u32,
    crashes_in_a_row: u32,
}

impl Machine {
    pub(crate) fn new(policy: Policy) -> Self {
        Self { policy, state: State::Stopped, crashes: 0, crashes_in_a_row: 0 }
    }

    pub(crate) fn state(&self) -> State {
        self.state
    }

    /// Unplanned ends, all of them.
    pub(crate) fn crashes(&self) -> u32 {
        self.crashes
    }

    /// Whether an end of the process is what has been asked for.
    pub(crate) fn is_stopping(&self) -> bool {
        matches!(
            self.state,
            State::Stopping { .. } | State::Killing { next: Next::Stay | Next::Start } | State::Stopped
        )
    }

    pub(crate) fn has_process(&self) -> bool {
        !matches!(self.state, State::Stopped | State::BackingOff { .. } | State::Failed(_))
    }

    /// When the next Tick is due.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        match self.state {
            State::Orphaned { until }
            | State::Starting { until }
            | State::Stopping { until, .. }
            | State::BackingOff { until } => Some(until),
            State::Running { silent_until, .. } => Some(silent_until),
            State::Stopped | State::Killing { .. } | State::Failed(_) => None,
        }
    }

    pub(crate) fn on(&mut self, now: Instant, event: Event) -> Option<Action> {
        match (self.state, event) {
            (State::Stopped, Event::Orphan) => {
                self.enter(State::Orphaned { until: now + self.policy.adopt_timeout }, None)
            }
            (State::Stopped | State::BackingOff { .. }, Event::Start | Event::Restart) => self.spawn(now),
            (State::Failed(_), Event::Start | Event::Restart) => {
                self.crashes_in_a_row = 0;
                self.spawn(now)
            }
            (State::BackingOff { .. } | State::Failed(_), Event::Stop) => self.enter(State::Stopped, None),
            (State::BackingOff { until }, Event::Tick) if now >= until => self.spawn(now),

            (State::Orphaned { .. }, Event::Adopted) | (State::Starting { .. }, Event::Ready) => {
                self.enter(State::Running { since: now, silent_until: now + self.policy.watchdog }, None)
            }
            // A process that never offered itself could not be supervised: it makes room for one that can.
            (State::Orphaned { until }, Event::Tick) if now >= until => {
                self.enter(State::Killing { next: Next::Start }, Some(Action::Kill))
            }
            (State::Starting { until }, Event::Tick) if now >= until => self.kill_for_hanging(),
            (State::Starting { until }, Event::Extend(by)) => {
                self.enter(State::Starting { until: until.max(now + by.min(EXTENSION_MAX)) }, None)
            }
            (State::Running { since, .. }, Event::Alive) => {
                self.enter(State::Running { since, silent_until: now + self.policy.watchdog }, None)
            }
            (State::Running { silent_until, .. }, Event::Tick) if now >= silent_until => {
                self.kill_for_hanging()
            }
            (State::Starting { .. } | State::Running { .. }, Event::Stuck) => self.kill_for_hanging(),

            (State::Orphaned { .. } | State::Starting { .. } | State::Running { .. }, Event::Stop) => {
                self.terminate(now, Next::Stay)
            }
            (State::Orphaned { .. } | State::Starting { .. } | State::Running { .. }, Event::Restart) => {
                self.terminate(now, Next::Start)
            }
            (State::Stopping { until, .. }, Event::Stop) => {
                self.enter(State::Stopping { until, next: Next::Stay }, None)
            }
            (State::Stopping { until, .. }, Event::Start | Event::Restart) => {
                self.enter(State::Stopping { until, next: Next::Start }, None)
            }
            (State::Stopping { until, next }, Event::Extend(by)) => {
                self.enter(State::Stopping { until: until.max(now + by.min(EXTENSION_MAX)), next }, None)
            }
            (State::Stopping { until, next }, Event::Tick) if now >= until => {
                self.enter(State::Killing { next }, Some(Action::Kill))
            }
            (State::Killing { .. }, Event::Stop) => self.enter(State::Killing { next: Next::Stay }, None),
            (State::Killing { .. }, Event::Start | Event::Restart) => {
                self.enter(State::Killing { next: Next::Start }, None)
            }

            (State::Stopping { next, .. } | State::Killing { next }, Event::Ended(end)) => match next {
                Next::Stay => self.enter(State::Stopped, None),
                Next::Start => self.spawn(now),
                Next::Crash => self.crashed(now, &end),
            },
            (State::Running { since, .. }, Event::Ended(end)) => {
                if now.saturating_duration_since(since) >= self.policy.healthy_after {
                    self.crashes_in_a_row = 0;
                }
                self.crashed(now, &end)
            }
            (State::Orphaned { .. } | State::Starting { .. }, Event::Ended(end)) => self.crashed(now, &end),

            // An early Tick, an order that is already carried out, or words of a process that is on its way out.
            (
                _,
                Event::Start
                | Event::Stop
                | Event::Orphan
                | Event::Adopted
                | Event::Ready
                | Event::Alive
                | Event::Stuck
                | Event::Extend(_)
                | Event::Ended(_)
                | Event::Tick,
            ) => None,
        }
    }

    fn enter(&mut self, state: State, action: Option<Action>) -> Option<Action> {
        self.state = state;
        action
    }

    fn spawn(&mut self, now: Instant) -> Option<Action> {
        self.enter(State::Starting { until: now + self.policy.start_timeout }, Some(Action::Spawn))
    }

    fn terminate(&mut self, now: Instant, next: Next) -> Option<Action> {
        self.enter(State::Stopping { until: now + self.policy.stop_grace, next }, Some(Action::Terminate))
    }

    fn kill_for_hanging(&mut self) -> Option<Action> {
        self.enter(State::Killing { next: Next::Crash }, Some(Action::Kill))
    }

    fn crashed(&mut self, now: Instant, end: &End) -> Option<Action> {
        self.crashes += 1;
        self.crashes_in_a_row += 1;
        let permanent = match end {
            End::Code(code) => Exit::from_code(*code).filter(|exit| exit.is_permanent()),
            _ => None,
        };
        if let Some(exit) = permanent {
            return self.enter(State::Failed(FailCause::Permanent(exit)), None);
        }
        if self.crashes_in_a_row > self.policy.crashes_in_a_row_max {
            return self.enter(State::Failed(FailCause::CrashLoop), None);
        }
        match self.policy.pause(self.crashes_in_a_row) {
            Duration::ZERO => self.spawn(now),
            pause => self.enter(State::BackingOff { until: now + pause }, None),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SIGKILL: End = End::Signal(9);

    fn started(now: Instant) -> Machine {
        let mut machine = Machine::new(Policy::DEFAULT);
        assert_eq!(machine.on(now, Event::Start), Some(Action::Spawn));
        machine
    }

    fn running(now: Instant) -> Machine {
        let mut machine = started(now);
        assert_eq!(machine.on(now, Event::Ready), None);
        machine
    }

    #[test]
    fn the_first_crash_is_answered_at_once_and_later_ones_after_growing_pauses() {
        let mut now = Instant::now();
        let mut machine = running(now);
        let mut pauses_ms = Vec::new();
        loop {
            let action = machine.on(now, Event::Ended(SIGKILL));
            let pause = match machine.state() {
                State::Starting { .. } => Duration::ZERO,
                State::BackingOff { until } => until - now,
                State::Failed(cause) => {
                    assert_eq!(cause, FailCause::CrashLoop);
                    break;
                }
                other => panic!("{other:?}"),
            };
            assert_eq!(action.is_some(), pause.is_zero());
            pauses_ms.push(pause.as_millis());
            now += pause;
            machine.on(now, Event::Tick);
        }
        assert_eq!(pauses_ms, [0, 200, 400, 800, 1600, 3200]);
        assert_eq!(machine.on(now, Event::Restart), Some(Action::Spawn), "an order ends the failed state");
    }

    #[test]
    fn a_child_that_lived_starts_with_a_clean_record() {
        let mut now = Instant::now();
        let mut machine = running(now);
        for _ in 0..20 {
            now += Policy::DEFAULT.healthy_after;
            assert_eq!(machine.on(now, Event::Ended(SIGKILL)), Some(Action::Spawn));
            machine.on(now, Event::Ready);
        }
        assert_eq!(machine.crashes(), 20);
    }

    #[test]
    fn a_refused_model_is_not_tried_again() {
        let now = Instant::now();
        let mut machine = started(now);
        let code = i32::from(Exit::ModelRefused.code());
        assert_eq!(machine.on(now, Event::Ended(End::Code(code))), None);
        assert_eq!(machine.state(), State::Failed(FailCause::Permanent(Exit::ModelRefused)));
    }

    #[test]
    fn a_child_that_ignores_the_request_to_stop_is_killed_after_its_grace() {
        let now = Instant::now();
        let mut machine = running(now);
        assert_eq!(machine.on(now, Event::Stop), Some(Action::Terminate));
        let almost = now + Policy::DEFAULT.stop_grace - Duration::from_millis(1);
        assert_eq!(machine.on(almost, Event::Tick), None);
        assert_eq!(machine.on(now + Policy::DEFAULT.stop_grace, Event::Tick), Some(Action::Kill));
        assert_eq!(machine.on(now, Event::Ended(SIGKILL)), None);
        assert_eq!((machine.state(), machine.crashes()), (State::Stopped, 0));
    }

    #[test]
    fn a_silent_child_and_one_that_never_gets_ready_are_killed_and_count_as_crashed() {
        let now = Instant::now();
        let mut silent = running(now);
        assert_eq!(silent.on(now + Duration::from_secs(20), Event::Alive), None);
        assert_eq!(silent.on(now + Duration::from_secs(40), Event::Tick), None);
        assert_eq!(silent.on(now + Duration::from_secs(50), Event::Tick), Some(Action::Kill));
        assert_eq!(silent.on(now + Duration::from_secs(50), Event::Ended(SIGKILL)), Some(Action::Spawn));
        let mut slow = started(now);
        slow.on(now + Duration::from_secs(20), Event::Extend(Duration::from_secs(30)));
        assert_eq!(slow.on(now + Duration::from_secs(40), Event::Tick), None);
        assert_eq!(slow.on(now + Duration::from_secs(50), Event::Tick), Some(Action::Kill));
        slow.on(now + Duration::from_secs(50), Event::Ended(SIGKILL));
        assert_eq!((silent.crashes(), slow.crashes()), (1, 1));
    }

    #[test]
    fn an_orphan_is_adopted_or_replaced() {
        let now = Instant::now();
        let mut adopted = Machine::new(Policy::DEFAULT);
        adopted.on(now, Event::Orphan);
        assert_eq!(adopted.on(now, Event::Adopted), None);
        assert!(matches!(adopted.state(), State::Running { .. }));
        let mut mute = Machine::new(Policy::DEFAULT);
        mute.on(now, Event::Orphan);
        let later = now + Policy::DEFAULT.adopt_timeout;
        assert_eq!(mute.on(later, Event::Tick), Some(Action::Kill));
        assert_eq!(mute.on(later, Event::Ended(End::Unknown)), Some(Action::Spawn));
    }

    fn any_event() -> impl Strategy<Value = Event> {
        prop_oneof![
            Just(Event::Start),
            Just(Event::Stop),
            Just(Event::Restart),
            Just(Event::Orphan),
            Just(Event::Adopted),
            Just(Event::Ready),
            Just(Event::Alive),
            Just(Event::Stuck),
            (0u64..3_000).prop_map(|s| Event::Extend(Duration::from_secs(s))),
            Just(Event::Ended(SIGKILL)),
            Just(Event::Ended(End::Code(1))),
            Just(Event::Ended(End::Code(2))),
            Just(Event::Tick),
        ]
    }

    proptest! {
        /// Whatever happens in whatever order: processes are spawned one at a time, signals go to processes that exist,
        /// and no state with a process can last for ever.
        #[test]
        fn there_is_never_more_than_one_process(steps in prop::collection::vec((any_event(), 0u64..20_000), 0..200)) {
            let mut now = Instant::now();
            let mut machine = Machine::new(Policy::DEFAULT);
            let mut process = false;
            for (event, wait_ms) in steps {
                now += Duration::from_millis(wait_ms);
                match event {
                    // The world cannot report the end of a process that doesn't exist, or find an orphan of ours.
                    Event::Ended(_) if !process => continue,
                    Event::Ended(_) => process = false,
                    Event::Orphan if machine.state() == State::Stopped => process = true,
                    _ => {}
                }
                match machine.on(now, event) {
                    Some(Action::Spawn) => {
                        prop_assert!(!process, "spawned beside a living process");
                        process = true;
                    }
                    Some(Action::Terminate | Action::Kill) => prop_assert!(process, "signal to nobody"),
                    None => {}
                }
                prop_assert_eq!(machine.has_process(), process);
                let bounded = machine.deadline().is_some() || matches!(machine.state(), State::Killing { .. });
                prop_assert!(!process || bounded, "{:?} could last for ever", machine.state());
            }
        }

        /// From any state, a stop order and time bring the child to rest.
        #[test]
        fn a_stop_order_is_always_carried_out(steps in prop::collection::vec((any_event(), 0u64..20_000), 0..60)) {
            let mut now = Instant::now();
            let mut machine = Machine::new(Policy::DEFAULT);
            for (event, wait_ms) in steps {
                now += Duration::from_millis(wait_ms);
                if matches!(event, Event::Ended(_)) && !machine.has_process() {
                    continue;
                }
                machine.on(now, event);
            }
            let mut action = machine.on(now, Event::Stop);
            for _ in 0..4 {
                prop_assert_ne!(action, Some(Action::Spawn));
                action = match (action, machine.deadline()) {
                    (Some(Action::Kill), _) => machine.on(now, Event::Ended(SIGKILL)),
                    (_, Some(deadline)) => {
                        now = now.max(deadline);
                        machine.on(now, Event::Tick)
                    }
                    // SIGKILL was sent before: the end comes by itself.
                    (_, None) if machine.has_process() => machine.on(now, Event::Ended(SIGKILL)),
                    (_, None) => None,
                };
            }
            prop_assert_eq!(machine.state(), State::Stopped);
        }
    }
}
