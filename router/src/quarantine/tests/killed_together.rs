// SPDX-License-Identifier: Apache-2.0

//! Workers that die within a second of each other: one cause may have killed them, so their deaths
//! count as one. A content that crashes workers gets few of them in that second.

use proptest::prelude::*;

use super::*;

const C: WorkerId = WorkerId(3);
const GAP: Duration = Duration::from_millis(5);

/// The content loses a worker, and 5 ms later the one that has admitted it since.
fn lose_two(policy: &mut QuarantinePolicy, content: ContentKey) {
    assert_eq!(lose_alone(policy, A, content, NOW), LossVerdict::Resume);
    let id = policy.enter(B, content, NOW, false).unwrap();
    assert_eq!(policy.record_loss(B, id, content, 0, NOW + GAP), LossVerdict::Resume);
    policy.leave(B, id);
}

#[test]
fn a_content_whose_workers_are_killed_together_waits_and_goes_on() {
    let mut policy = policy();
    let innocent = ContentKey(1);
    lose_two(&mut policy, innocent);
    assert_eq!(policy.find(innocent, NOW + GAP), None);
    for at in [NOW + GAP, NOW + KILLED_TOGETHER - GAP] {
        assert_eq!(policy.enter(C, innocent, at, false), Err(Blocked));
        assert_eq!(policy.next_change(at), NOW + KILLED_TOGETHER - at, "the end of the wait");
    }
    let end = NOW + KILLED_TOGETHER;
    let id = policy.enter(C, innocent, end, false).unwrap();
    assert!(policy.record_output(C, id, innocent, 1, end));
    policy.leave(C, id);
    assert_eq!(lose_alone(&mut policy, A, innocent, end), LossVerdict::Resume, "the first loss again");
}

#[test]
fn a_wait_ends_early_if_the_router_forces_the_content_in_and_keeps_no_other_away() {
    let mut policy = policy();
    lose_two(&mut policy, POISON);
    let other = policy.enter(C, ContentKey(1), NOW + GAP, false).unwrap();
    policy.leave(C, other);
    let id = policy.enter(C, POISON, NOW + GAP, true).unwrap();
    // A third loss in that second says no more than the second one, and the wait is not longer.
    assert_eq!(policy.record_loss(C, id, POISON, 0, NOW + 2 * GAP), LossVerdict::Resume);
    policy.leave(C, id);
    assert_eq!(policy.enter(A, POISON, NOW + KILLED_TOGETHER - GAP, false), Err(Blocked));
    assert!(policy.enter(A, POISON, NOW + KILLED_TOGETHER, false).is_ok());
}

#[test]
fn after_a_wait_trials_have_their_bounds_again() {
    let mut policy = policy();
    lose_two(&mut policy, POISON);
    let end = NOW + KILLED_TOGETHER;
    assert_eq!(policy.next_change(end), TRIAL_MAX);
    policy.enter(A, POISON, end, false).unwrap();
    assert_eq!(policy.enter(B, POISON, end, false), Err(Blocked), "one trial at a time");
    assert_eq!(policy.next_change(end), TRIAL_MAX);
}

#[test]
fn losses_a_second_apart_count_two_whether_the_content_waited_or_not() {
    for waits in [false, true] {
        let mut policy = policy();
        match waits {
            true => lose_two(&mut policy, POISON),
            false => _ = lose_alone(&mut policy, A, POISON, NOW),
        }
        let entry = QuarantineEntry { losses: 2, remaining: QUARANTINE };
        let verdict = lose_alone(&mut policy, C, POISON, NOW + KILLED_TOGETHER);
        assert_eq!(verdict, LossVerdict::Quarantine { entry, is_new: true }, "waits: {waits}");
    }
}

/// Whatever time the content needs to crash a worker, and however often clients send it.
#[test]
fn a_content_that_crashes_every_worker_ends_at_most_three() {
    for crash_after in [0, 1, 10, 300, 499, 500, 501, 999, 1000, 1001, 3000] {
        let (mut policy, mut now, mut deaths) = (policy(), NOW, 0);
        while policy.find(POISON, now).is_none() {
            now += Duration::from_millis(1);
            let Ok(id) = policy.enter(A, POISON, now, false) else { continue };
            now += Duration::from_millis(crash_after);
            policy.record_loss(A, id, POISON, 0, now);
            policy.leave(A, id);
            deaths += 1;
        }
        let expected = if crash_after < 999 { 3 } else { 2 };
        assert_eq!(deaths, expected, "a crash after {crash_after} ms");
        assert!(now <= NOW + KILLED_TOGETHER + 2 * Duration::from_millis(crash_after + 1));
        assert!(policy.find(POISON, now + QUARANTINE / 2).is_some(), "a repetition is refused");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// All workers of a device die within a second, once or twice. Every stream goes on.
    #[test]
    fn i6_no_stream_is_blamed_for_workers_that_are_killed_together(
        workers in 1_u64..9,
        is_packed: bool,
        restart_ms in 20_u64..1500,
        lengths in proptest::collection::vec(10_usize..500, 1..12),
        kill_at in 0_u64..1000,
        second_kill_after in 6_000_u64..12_000,
        offsets in proptest::collection::vec(0_u64..1000, 8),
        nearness in 1_u64..100,
    ) {
        let (mut policy, mut now) = (policy(), NOW);
        let streams = (1..).zip(&lengths).map(|(n, &length)| {
            SimulatedStream::new(ContentKey(n), length, NOW + Duration::from_millis(30 * n as u64))
        });
        let restart_time = Duration::from_millis(restart_ms);
        let fleet = RestartingFleet::new(workers, is_packed, streams.collect());
        let mut fleet = RestartingFleet { restart_time, ..fleet };
        for step in 0..8_000 {
            now += GAP;
            fleet.place(&mut policy, now);
            for (worker, offset) in (0..workers).zip(&offsets) {
                let at = (kill_at + offset / nearness) / 5;
                if step == at || step == at + second_kill_after / 5 {
                    fleet.kill(&mut policy, WorkerId(worker), now);
                }
            }
            fleet.step(&mut policy, now);
        }
        prop_assert!(fleet.quarantined.is_empty(), "{:?}", fleet);
        prop_assert!(fleet.most_losses <= 6, "{:?}", fleet);
        prop_assert_eq!(fleet.completed(), lengths.len(), "{:?}", fleet);
    }
}
