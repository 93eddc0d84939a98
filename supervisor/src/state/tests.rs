// SPDX-License-Identifier: Apache-2.0

//! Tests of the state machine of one child.

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
fn first_crash_restarts_at_once_and_later_ones_for_ever_after_growing_backoff() {
    let mut now = Instant::now();
    let mut machine = running(now);
    let mut backoffs_ms = Vec::new();
    let mut reasons = Vec::new();
    for _ in 0..13 {
        let action = machine.handle(now, ChildEvent::Exited(SIGKILL));
        let pause = match machine.state() {
            ChildState::Starting { .. } => Duration::ZERO,
            ChildState::BackingOff { deadline, reason } => {
                reasons.push(reason);
                deadline - now
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(action.is_some(), pause.is_zero());
        backoffs_ms.push(pause.as_millis());
        now += pause;
        machine.handle(now, ChildEvent::Tick);
    }
    let growing = [0, 200, 400, 800, 1600, 3200, 6400, 12_800, 25_600, 51_200, 60_000, 60_000, 60_000];
    assert_eq!(backoffs_ms, growing);
    assert_eq!(reasons[..5], [BackoffReason::Crash; 5]);
    assert_eq!(reasons[5..], [BackoffReason::CrashLoop; 7]);
    machine.handle(now, ChildEvent::Exited(SIGKILL));
    assert_eq!(machine.handle(now, ChildEvent::Restart), Some(ChildAction::Spawn));
    assert_eq!(machine.consecutive_crashes(), 0, "a Restart command begins anew");
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
fn permanent_exit_code_is_restarted_after_a_pause_only() {
    let now = Instant::now();
    let mut machine = started(now);
    let code = i32::from(Exit::ModelRefused.code());
    assert_eq!(machine.handle(now, ChildEvent::Exited(Termination::ExitCode(code))), None);
    let deadline = now + RestartPolicy::DEFAULT.initial_backoff;
    let reason = BackoffReason::PermanentError(Exit::ModelRefused);
    assert_eq!(machine.state(), ChildState::BackingOff { deadline, reason });
    assert_eq!(machine.handle(deadline, ChildEvent::Tick), Some(ChildAction::Spawn));
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
fn drained_worker_stops_after_its_answer_or_after_the_grace() {
    let now = Instant::now();
    let grace = Duration::from_secs(60);
    let drain = |then| ChildEvent::Drain { grace, then };
    let mut answers = running(now);
    assert_eq!(answers.handle(now, drain(AfterExit::StayStopped)), Some(ChildAction::Drain { grace }));
    assert_eq!(answers.handle(now, ChildEvent::Drained), Some(ChildAction::Terminate));
    answers.handle(now, ChildEvent::Exited(Termination::ExitCode(0)));
    assert_eq!((answers.state(), answers.crashes()), (ChildState::Stopped, 0));

    let mut slow = running(now);
    slow.handle(now, drain(AfterExit::Start));
    let end = now + grace + DRAIN_ANSWER;
    slow.handle(end - RestartPolicy::DEFAULT.watchdog, ChildEvent::WatchdogPing);
    slow.handle(end - Duration::from_secs(1), ChildEvent::WatchdogPing);
    assert_eq!(slow.handle(end - Duration::from_secs(1), ChildEvent::Tick), None);
    assert_eq!(slow.handle(end, ChildEvent::Tick), Some(ChildAction::Terminate));
    assert_eq!(slow.handle(end, ChildEvent::Exited(SIGKILL)), Some(ChildAction::Spawn));

    let mut hangs = running(now);
    hangs.handle(now, drain(AfterExit::Start));
    let silent = now + RestartPolicy::DEFAULT.watchdog;
    assert_eq!(hangs.handle(silent, ChildEvent::Tick), Some(ChildAction::Kill));
}

#[test]
fn a_later_drain_decides_what_follows_and_may_end_an_earlier_one() {
    let now = Instant::now();
    let drain = |seconds, then| ChildEvent::Drain { grace: Duration::from_secs(seconds), then };
    let mut restarts = running(now);
    restarts.handle(now, drain(60, AfterExit::Start));
    assert_eq!(restarts.handle(now, drain(1, AfterExit::StayStopped)), None);
    let end = now + Duration::from_secs(1) + DRAIN_ANSWER;
    assert_eq!(restarts.handle(end, ChildEvent::Tick), Some(ChildAction::Terminate));
    assert_eq!(restarts.handle(end, ChildEvent::Exited(SIGKILL)), None);
    assert_eq!(restarts.state(), ChildState::Stopped);

    let mut stops = running(now);
    stops.handle(now, ChildEvent::Restart);
    stops.handle(now, drain(60, AfterExit::StayStopped));
    assert_eq!(stops.handle(now, ChildEvent::Exited(SIGKILL)), None);
    assert_eq!(stops.state(), ChildState::Stopped);
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
        Just(ChildEvent::Drain { grace: Duration::from_secs(60), then: AfterExit::StayStopped }),
        Just(ChildEvent::Drain { grace: Duration::from_secs(5), then: AfterExit::Start }),
        Just(ChildEvent::Drained),
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
                Some(ChildAction::Drain { .. } | ChildAction::Terminate | ChildAction::Kill) => {
                    prop_assert!(process, "signal without a process");
                }
                None => {}
            }
            prop_assert_eq!(machine.has_process(), process);
            let bounded = machine.deadline().is_some() || matches!(machine.state(), ChildState::Killing { .. });
            prop_assert!(!process || bounded, "{:?} has no deadline", machine.state());
            prop_assert!(process || bounded || machine.state() == ChildState::Stopped, "given up");
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

#[test]
fn signals_other_than_those_that_end_processes_are_crashes() {
    assert!(Termination::Signal(6).is_crash() && Termination::Signal(11).is_crash());
    let ends = [SIGKILL, Termination::Signal(15), Termination::ExitCode(1), Termination::Unknown];
    assert!(!ends.iter().any(Termination::is_crash));
}
