// SPDX-License-Identifier: Apache-2.0

//! Tests of the quarantine: fixed cases, and a fleet with random requests of which one is poison.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::Duration;

use proptest::prelude::*;

use super::policy::{RECORDS_MAX, TRIAL_MAX};
use super::*;
use crate::admission::Uptime;
use crate::failover::SPREAD_WAIT;
use crate::routing::WorkerId;

mod killed_together;

const QUARANTINE: Duration = Duration::from_secs(600);
const NOW: Uptime = Duration::from_secs(100);
/// A loss at this time counts beside one at [`NOW`].
const LATER: Uptime = Duration::from_secs(101);
const POISON: ContentKey = ContentKey(0);
const A: WorkerId = WorkerId(1);
const B: WorkerId = WorkerId(2);

fn policy() -> QuarantinePolicy {
    QuarantinePolicy::new(QUARANTINE)
}

fn lose_alone(
    policy: &mut QuarantinePolicy,
    worker: WorkerId,
    content: ContentKey,
    now: Uptime,
) -> LossVerdict {
    let id = policy.enter(worker, content, now, false).unwrap();
    let verdict = policy.record_loss(worker, id, content, 0, now);
    policy.leave(worker, id);
    verdict
}

#[test]
fn a_content_that_loses_two_workers_alone_is_quarantined_for_a_time() {
    let mut policy = policy();
    assert_eq!(lose_alone(&mut policy, A, POISON, NOW), LossVerdict::Resume);
    assert_eq!(policy.find(POISON, NOW), None);
    let entry = QuarantineEntry { losses: 2, remaining: QUARANTINE };
    let verdict = lose_alone(&mut policy, B, POISON, LATER);
    assert_eq!(verdict, LossVerdict::Quarantine { entry, is_new: true });
    assert_eq!(policy.find(POISON, LATER), Some(entry));
    assert_eq!(policy.find(ContentKey(1), LATER), None);
    assert_eq!(policy.find(POISON, LATER + QUARANTINE), None);
}

#[test]
fn output_beyond_the_loss_clears_a_suspect_and_output_before_it_does_not() {
    let mut policy = policy();
    let id = policy.enter(A, POISON, NOW, false).unwrap();
    policy.record_output(A, id, POISON, 50, NOW);
    assert_eq!(policy.record_loss(A, id, POISON, 50, NOW), LossVerdict::Resume);
    policy.leave(A, id);
    // A client repeats the request, which gets as far as before.
    let id = policy.enter(B, POISON, NOW, false).unwrap();
    policy.record_output(B, id, POISON, 50, LATER);
    assert!(matches!(policy.record_loss(B, id, POISON, 50, LATER), LossVerdict::Quarantine { .. }));

    let innocent = ContentKey(1);
    assert_eq!(lose_alone(&mut policy, A, innocent, NOW), LossVerdict::Resume);
    let id = policy.enter(A, innocent, NOW, false).unwrap();
    policy.record_output(A, id, innocent, 1, NOW);
    policy.leave(A, id);
    assert_eq!(lose_alone(&mut policy, A, innocent, LATER), LossVerdict::Resume, "the first loss again");
}

/// The content is alone on its worker, which dies with so much output.
fn lose_later(policy: &mut QuarantinePolicy, content: ContentKey, output_tokens: usize) -> LossVerdict {
    let id = policy.enter(A, content, NOW, false).unwrap();
    policy.record_output(A, id, content, output_tokens, NOW);
    let verdict = policy.record_loss(A, id, content, output_tokens, NOW);
    policy.leave(A, id);
    verdict
}

#[test]
fn a_content_that_crashes_workers_later_each_time_is_quarantined_after_eight() {
    let mut policy = policy();
    for output_tokens in 1..8 {
        assert_eq!(lose_later(&mut policy, POISON, output_tokens), LossVerdict::Resume);
    }
    let entry = QuarantineEntry { losses: 8, remaining: QUARANTINE };
    assert_eq!(lose_later(&mut policy, POISON, 8), LossVerdict::Quarantine { entry, is_new: true });
    assert_eq!(policy.find(POISON, NOW), Some(entry));

    let innocent = ContentKey(1);
    for output_tokens in 1..8 {
        assert_eq!(lose_later(&mut policy, innocent, output_tokens), LossVerdict::Resume);
    }
    policy.record_completion(innocent);
    assert_eq!(lose_later(&mut policy, innocent, 8), LossVerdict::Resume, "the first loss again");
}

/// The content has output when its worker dies. A neighbour is on trial there and has none.
fn die_beside_a_trial(
    policy: &mut QuarantinePolicy,
    worker: WorkerId,
    content: ContentKey,
    output_tokens: usize,
) {
    let beside = ContentKey(99);
    let id = policy.enter(worker, content, NOW, false).unwrap();
    policy.record_output(worker, id, content, output_tokens, NOW);
    let trial = policy.enter(worker, beside, NOW, false).unwrap();
    for (id, content, output) in [(trial, beside, 0), (id, content, output_tokens)] {
        assert_eq!(policy.record_loss(worker, id, content, output, NOW), LossVerdict::Resume);
        policy.leave(worker, id);
    }
    // The neighbour runs well elsewhere.
    policy.record_completion(beside);
}

#[test]
fn a_repeated_content_is_on_trial_until_it_is_past_the_point_of_its_loss() {
    let mut policy = policy();
    // The poison is not blamed the first time: it had output, and a neighbour had none.
    die_beside_a_trial(&mut policy, A, POISON, 7);
    // Its client repeats it from the beginning.
    die_beside_a_trial(&mut policy, B, POISON, 7);
    let id = policy.enter(A, POISON, NOW, false).unwrap();
    assert!(!policy.record_output(A, id, POISON, 7, NOW), "still on trial");
    assert_eq!(policy.enter(A, ContentKey(1), NOW, false), Err(Blocked));
    assert!(matches!(policy.record_loss(A, id, POISON, 7, LATER), LossVerdict::Quarantine { .. }));
}

#[test]
fn a_loss_with_less_output_does_not_move_the_point_that_clears() {
    let mut policy = policy();
    die_beside_a_trial(&mut policy, A, POISON, 7);
    // The worker of the repetition is killed at once.
    assert_eq!(lose_alone(&mut policy, B, POISON, NOW), LossVerdict::Resume);
    let id = policy.enter(A, POISON, NOW, false).unwrap();
    policy.record_output(A, id, POISON, 7, NOW);
    assert!(matches!(policy.record_loss(A, id, POISON, 7, LATER), LossVerdict::Quarantine { .. }));
}

#[test]
fn a_completed_stream_clears_its_content() {
    let mut policy = policy();
    die_beside_a_trial(&mut policy, A, POISON, 20);
    let id = policy.enter(A, POISON, NOW, false).unwrap();
    assert!(!policy.record_output(A, id, POISON, 20, NOW));
    policy.record_completion(POISON);
    policy.leave(A, id);
    let id = policy.enter(A, POISON, NOW, false).unwrap();
    assert!(policy.record_output(A, id, POISON, 1, NOW));
}

#[test]
fn contents_with_losses_do_not_join_the_long_trial_of_a_suspect() {
    let (mut policy, late) = (policy(), NOW + 3 * TRIAL_MAX);
    let (suspect, recorded) = (ContentKey(1), ContentKey(2));
    lose_alone(&mut policy, A, suspect, NOW);
    lose_alone(&mut policy, A, POISON, NOW);
    die_beside_a_trial(&mut policy, A, recorded, 1);
    policy.enter(B, suspect, NOW, false).unwrap();
    assert_eq!(policy.enter(B, POISON, late, false), Err(Blocked));
    assert_eq!(policy.enter(B, recorded, late, false), Err(Blocked));
    // What has lost nothing does, and the suspects do not keep it away.
    assert!(policy.enter(B, ContentKey(3), late, false).is_ok());
    assert!(policy.enter(B, POISON, late, true).is_ok());
}

#[test]
fn neighbours_with_output_are_no_candidates_of_a_death_during_a_trial() {
    let mut policy = policy();
    let neighbour = ContentKey(1);
    // The neighbour's stream goes on at the second worker.
    for (worker, output) in [(A, 1), (B, 2)] {
        let next_to = policy.enter(worker, neighbour, NOW, false).unwrap();
        policy.record_output(worker, next_to, neighbour, output, NOW);
        let id = policy.enter(worker, POISON, NOW, false).unwrap();
        // Both orders of the two reports.
        if worker == A {
            policy.record_loss(worker, id, POISON, 0, NOW);
            policy.leave(worker, id);
        }
        assert_eq!(policy.record_loss(worker, next_to, neighbour, output, NOW), LossVerdict::Resume);
        policy.leave(worker, next_to);
        if worker == B {
            assert!(matches!(
                policy.record_loss(worker, id, POISON, 0, LATER),
                LossVerdict::Quarantine { is_new: true, .. }
            ));
        }
    }
    assert_eq!(policy.find(neighbour, NOW), None);
}

#[test]
fn two_choices_of_one_content_count_one_loss_for_one_death() {
    let mut policy = policy();
    let ids = [policy.enter(A, POISON, NOW, false).unwrap(), policy.enter(A, POISON, NOW, false).unwrap()];
    for id in ids {
        assert_eq!(policy.record_loss(A, id, POISON, 0, NOW), LossVerdict::Resume);
    }
    let ids = [policy.enter(B, POISON, NOW, false).unwrap(), policy.enter(B, POISON, NOW, false).unwrap()];
    let verdicts = ids.map(|id| policy.record_loss(B, id, POISON, 0, LATER));
    let is_new = verdicts.map(|v| matches!(v, LossVerdict::Quarantine { is_new: true, .. }));
    assert_eq!(is_new, [true, false], "both choices end, and the log has one line: {verdicts:?}");
}

#[test]
fn workers_that_die_together_count_as_one_loss_of_a_content_on_both() {
    let mut policy = policy();
    let ids = [A, B].map(|worker| (worker, policy.enter(worker, POISON, NOW, false).unwrap()));
    for (worker, id) in ids {
        assert_eq!(policy.record_loss(worker, id, POISON, 0, NOW), LossVerdict::Resume);
        policy.leave(worker, id);
    }
    let trial = policy.enter(A, POISON, NOW, false).unwrap();
    assert_eq!(policy.enter(B, POISON, NOW, false), Err(Blocked), "one trial at a time");
    assert!(policy.enter(A, POISON, NOW, false).is_ok());
    assert!(matches!(policy.record_loss(A, trial, POISON, 0, LATER), LossVerdict::Quarantine { .. }));
}

#[test]
fn a_suspect_is_on_trial_alone_and_others_wait_a_bounded_time() {
    let mut policy = policy();
    let other = ContentKey(1);
    lose_alone(&mut policy, A, POISON, NOW);
    let busy = policy.enter(B, other, NOW, false).unwrap();
    assert_eq!(policy.enter(B, POISON, NOW, false), Err(Blocked));
    assert_eq!(policy.enter(B, ContentKey(2), NOW, false), Err(Blocked), "the suspect waits for this worker");
    assert!(policy.record_output(B, busy, other, 1, NOW));
    let suspect = policy.enter(B, POISON, NOW, false).unwrap();
    assert_eq!(policy.enter(B, ContentKey(2), NOW, false), Err(Blocked));
    assert!(policy.enter(B, ContentKey(2), NOW + TRIAL_MAX, false).is_ok());
    assert!(policy.record_output(B, suspect, POISON, 1, NOW));
    assert!(policy.enter(B, ContentKey(3), NOW, false).is_ok());
}

#[test]
fn a_suspect_is_blamed_before_a_request_that_joined_its_long_trial() {
    let mut policy = policy();
    lose_alone(&mut policy, A, POISON, NOW);
    let suspect = policy.enter(B, POISON, NOW, false).unwrap();
    let late = policy.enter(B, ContentKey(1), NOW + TRIAL_MAX, false).unwrap();
    assert_eq!(policy.record_loss(B, late, ContentKey(1), 0, NOW), LossVerdict::Resume);
    let verdict = policy.record_loss(B, suspect, POISON, 0, LATER);
    assert!(matches!(verdict, LossVerdict::Quarantine { is_new: true, .. }), "{verdict:?}");
}

#[test]
fn a_suspect_whose_client_is_gone_blocks_nothing() {
    let mut policy = policy();
    lose_alone(&mut policy, A, POISON, NOW);
    let busy = policy.enter(B, ContentKey(1), NOW, false).unwrap();
    assert_eq!(policy.enter(B, POISON, NOW, false), Err(Blocked));
    policy.drop_claims(POISON);
    assert!(policy.enter(B, ContentKey(2), NOW, false).is_ok());
    policy.leave(B, busy);
}

#[test]
fn records_are_bounded_and_quarantined_contents_stay_longest() {
    let mut policy = policy();
    lose_alone(&mut policy, A, POISON, NOW);
    lose_alone(&mut policy, B, POISON, LATER);
    for n in 1..=2 * RECORDS_MAX as u128 {
        lose_alone(&mut policy, A, ContentKey(n), LATER);
    }
    assert!(policy.find(POISON, LATER).is_some());
    assert_eq!(policy.quarantined(LATER), 1);
}

/// A fleet in which one content kills its worker when it starts, and all others output tokens.
#[derive(Debug, Default)]
struct SimulatedFleet {
    /// Streams on each worker: content and output tokens.
    streams: BTreeMap<WorkerId, Vec<(StreamId, ContentKey, usize)>>,
    waiting: Vec<(ContentKey, usize)>,
    deaths: u32,
    failed: Vec<ContentKey>,
}

impl SimulatedFleet {
    /// Sends every waiting stream to the first worker that lets it in.
    fn place(&mut self, policy: &mut QuarantinePolicy, workers: u64, now: Uptime) {
        for (n, (content, output)) in (0..).zip(std::mem::take(&mut self.waiting)) {
            if policy.find(content, now).is_some() {
                self.failed.push(content);
                continue;
            }
            let first = content.0 as u64 + n;
            let entered = (0..workers)
                .map(|next| WorkerId((first + next) % workers))
                .find_map(|worker| Some((worker, policy.enter(worker, content, now, false).ok()?)));
            match entered {
                Some((worker, id)) => self.streams.entry(worker).or_default().push((id, content, output)),
                None => self.waiting.push((content, output)),
            }
        }
    }

    /// Every worker takes a step: it dies if the poison is there, else each stream gets a token.
    fn step(&mut self, policy: &mut QuarantinePolicy, now: Uptime) {
        for (&worker, streams) in &mut self.streams {
            if streams.iter().any(|&(_, content, _)| content == POISON) {
                self.deaths += 1;
                for (id, content, output) in streams.drain(..) {
                    match policy.record_loss(worker, id, content, output, now) {
                        LossVerdict::Resume => self.waiting.push((content, output)),
                        LossVerdict::Quarantine { .. } => self.failed.push(content),
                    }
                    policy.leave(worker, id);
                }
                continue;
            }
            for (id, content, output) in streams.iter_mut() {
                *output += 1;
                policy.record_output(worker, *id, *content, *output, now);
            }
            streams.retain(|&(id, _, output)| {
                let ends = output >= 8;
                if ends {
                    policy.leave(worker, id);
                }
                !ends
            });
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever runs beside it, a poison kills three workers, or two more than those that have a
    /// copy of it at once. One fewer if its losses are more than a second apart. No neighbour fails
    /// or waits for ever.
    #[test]
    fn i6_a_poison_kills_at_most_three_workers_and_no_neighbour_fails(
        workers in 1_u64..5,
        copies in 1_usize..4,
        arrivals in proptest::collection::vec(proptest::collection::vec(1_u128..40, 0..6), 1..30),
        poison_at in 0_usize..30,
    ) {
        let (mut policy, mut fleet, mut now) = (policy(), SimulatedFleet::default(), NOW);
        for step in 0..200 {
            now += Duration::from_millis(20);
            fleet.waiting.extend(arrivals.get(step).into_iter().flatten().map(|&n| (ContentKey(n), 0)));
            if step == poison_at {
                fleet.waiting.extend(vec![(POISON, 0); copies]);
            }
            fleet.place(&mut policy, workers, now);
            fleet.step(&mut policy, now);
        }
        prop_assert!(fleet.deaths >= 2 && fleet.deaths <= 2 + (copies as u32).min(workers as u32), "{} deaths", fleet.deaths);
        prop_assert_eq!(&fleet.failed, &vec![POISON; copies]);
        prop_assert!(fleet.waiting.is_empty() && fleet.streams.values().all(Vec::is_empty), "{:?}", fleet);
    }
}

/// A fleet whose workers come back after they died. The poison, if it is there, crashes each worker
/// some steps after it got there, so that its output grows from crash to crash.
#[derive(Debug)]
struct RestartingFleet {
    workers: u64,
    is_packed: bool,
    /// Steps of the poison on its worker before the crash.
    crash_after: usize,
    restart_time: Duration,
    down_until: BTreeMap<WorkerId, Uptime>,
    streams: Vec<SimulatedStream>,
    deaths: u32,
    quarantined: Vec<ContentKey>,
    most_losses: u32,
}

#[derive(Debug)]
struct SimulatedStream {
    content: ContentKey,
    output: usize,
    length: usize,
    losses: u32,
    not_before: Uptime,
    stay: Option<SimulatedStay>,
}

#[derive(Clone, Copy, Debug)]
struct SimulatedStay {
    worker: WorkerId,
    id: StreamId,
    spread_by_deaths: Option<NonZeroU32>,
    steps: usize,
}

impl SimulatedStream {
    fn new(content: ContentKey, length: usize, not_before: Uptime) -> Self {
        Self { content, output: 0, length, losses: 0, not_before, stay: None }
    }
}

impl RestartingFleet {
    fn new(workers: u64, is_packed: bool, streams: Vec<SimulatedStream>) -> Self {
        Self {
            workers,
            is_packed,
            crash_after: 0,
            restart_time: Duration::from_secs(1),
            down_until: BTreeMap::new(),
            streams,
            deaths: 0,
            quarantined: Vec::new(),
            most_losses: 0,
        }
    }

    fn place(&mut self, policy: &mut QuarantinePolicy, now: Uptime) {
        for at in 0..self.streams.len() {
            let SimulatedStream { content, not_before, stay, .. } = self.streams[at];
            if stay.is_some() || now < not_before || policy.find(content, now).is_some() {
                continue;
            }
            let spread_by_deaths = policy.deaths_to_spread(content, now);
            let stays = || self.streams.iter().filter_map(|stream| stream.stay);
            let mut workers: Vec<WorkerId> = (0..self.workers).map(WorkerId).collect();
            workers.retain(|worker| self.down_until.get(worker).is_none_or(|until| *until <= now));
            workers.sort_by_key(|worker| {
                let there = stays().filter(|stay| stay.worker == *worker);
                let spread = there.clone().filter_map(|stay| stay.spread_by_deaths);
                match (spread_by_deaths, self.is_packed) {
                    (Some(_), _) => (spread.clone().max(), spread.count()),
                    (None, true) => (None, usize::MAX - there.count()),
                    (None, false) => (None, there.count()),
                }
            });
            let entered = workers
                .into_iter()
                .find_map(|worker| Some((worker, policy.enter(worker, content, now, false).ok()?)));
            let entered =
                entered.map(|(worker, id)| SimulatedStay { worker, id, spread_by_deaths, steps: 0 });
            self.streams[at].stay = entered;
        }
    }

    fn step(&mut self, policy: &mut QuarantinePolicy, now: Uptime) {
        let poison = self.streams.iter().find(|stream| stream.content == POISON);
        let dead = poison
            .and_then(|poison| poison.stay)
            .filter(|stay| stay.steps >= self.crash_after)
            .map(|stay| stay.worker);
        if let Some(dead) = dead {
            self.kill(policy, dead, now);
        }
        for stream in &mut self.streams {
            let Some(stay) = &mut stream.stay else { continue };
            let (worker, id) = (stay.worker, stay.id);
            stay.steps += 1;
            // A prefill takes a step for each 20 tokens.
            if stay.steps > 1 + stream.output / 20 {
                stream.output += 1;
                policy.record_output(worker, id, stream.content, stream.output, now);
            }
            if stream.output == stream.length {
                policy.record_completion(stream.content);
                policy.leave(worker, id);
                stream.stay = None;
                stream.not_before = Uptime::MAX;
            }
        }
    }

    fn kill(&mut self, policy: &mut QuarantinePolicy, dead: WorkerId, now: Uptime) {
        self.deaths += 1;
        self.down_until.insert(dead, now + self.restart_time);
        let is_lost = |stream: &&mut SimulatedStream| stream.stay.is_some_and(|stay| stay.worker == dead);
        for stream in self.streams.iter_mut().filter(is_lost) {
            let stay = stream.stay.expect("it was on the dead worker");
            stream.losses += 1;
            let verdict = policy.record_loss(dead, stay.id, stream.content, stream.output, now);
            if matches!(verdict, LossVerdict::Quarantine { .. }) {
                self.quarantined.push(stream.content);
            }
            stream.not_before = match policy.deaths_to_spread(stream.content, now) {
                Some(_) => now + SPREAD_WAIT,
                None => now,
            };
        }
        for stream in self.streams.iter_mut().filter(is_lost) {
            let stay = stream.stay.take().expect("it was on the dead worker");
            policy.leave(dead, stay.id);
        }
        self.most_losses =
            self.streams.iter().filter(|s| s.content != POISON).map(|s| s.losses).max().unwrap_or(0);
    }

    /// Streams that have all their output.
    fn completed(&self) -> usize {
        self.streams.iter().filter(|stream| stream.output == stream.length).count()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn i6_neighbours_of_a_content_that_crashes_later_each_time_go_on(
        workers in 2_u64..6,
        is_packed: bool,
        crash_after in 10_usize..60,
        lengths in proptest::collection::vec(10_usize..2000, 0..12),
        poison_at in 0_usize..100,
    ) {
        let (mut policy, mut now) = (policy(), NOW);
        let stream = |content, length, at: usize| {
            let not_before = NOW + Duration::from_millis(20 * at as u64);
            SimulatedStream::new(ContentKey(content), length, not_before)
        };
        let mut streams: Vec<_> =
            (1..).zip(&lengths).map(|(n, length)| stream(n, *length, 7 * n as usize)).collect();
        streams.push(stream(POISON.0, 10_000, poison_at));
        let mut fleet =
            RestartingFleet { crash_after, ..RestartingFleet::new(workers, is_packed, streams) };
        for _ in 0..6000 {
            now += Duration::from_millis(20);
            fleet.place(&mut policy, now);
            fleet.step(&mut policy, now);
        }
        prop_assert_eq!(&fleet.quarantined, &vec![POISON], "{:?}", fleet);
        prop_assert!(fleet.deaths < 16 && fleet.most_losses < 16, "{:?}", fleet);
        prop_assert_eq!(fleet.completed(), lengths.len(), "{:?}", fleet);
    }
}
