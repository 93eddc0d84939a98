// SPDX-License-Identifier: Apache-2.0

//! Which sequence is preempted when blocks run out, and what happens to its rows and blocks.

use super::{add, add_as, limits, prompt, step};
use engine::schedule::scheduler::Scheduler;
use engine::schedule::sequence::{SequenceKind, SequenceState};
use engine::schedule::step_plan::SchedulerLimits;
use prefix::Scope;

#[test]
fn the_last_running_sequence_is_preempted_and_keeps_its_place() {
    let mut scheduler = Scheduler::new(SchedulerLimits { prefix_cache: false, ..limits() }, 6);
    let first = add(&mut scheduler, prompt(1, 8), 17);
    let second = add(&mut scheduler, prompt(2, 7), 17);
    assert_eq!(step(&mut scheduler), [(first, 0, 8), (second, 0, 7)]);
    let third = add(&mut scheduler, prompt(3, 3), 4);
    for _ in 0..4 {
        assert_eq!(step(&mut scheduler).len(), 2);
    }
    // Each sequence holds 3 of the 6 blocks, and the first sequence needs a new block.
    assert_eq!(step(&mut scheduler), [(first, 12, 1)]);
    assert_eq!(scheduler.plan().preempted, 1);
    assert_eq!(
        (scheduler.running_count(), scheduler.waiting_count()),
        (1, 2),
        "nothing is admitted in such a step"
    );
    assert_eq!((scheduler.waiting_ahead(second), scheduler.waiting_ahead(third)), (0, 1));
    scheduler.remove(first);
    assert_eq!(step(&mut scheduler), [(second, 0, 12), (third, 0, 3)], "recomputed with its own output");
}

#[test]
fn every_decode_moves_when_the_preempted_leader_had_followers_of_first_rank() {
    let small =
        SchedulerLimits { block_tokens: 1, step_tokens: 5, running_max: 5, can_fork: true, ..limits() };
    let mut scheduler = Scheduler::new(small, 31);
    let add = |scheduler: &mut Scheduler, priority, tokens| {
        add_as(scheduler, SequenceKind::Generate, priority, tokens, 30, &Scope::default())
    };
    let decodes = [1, 2, 3].map(|seed| add(&mut scheduler, 1, prompt(seed, 1)));
    let leader = add(&mut scheduler, 2, prompt(4, 16));
    step(&mut scheduler);
    let joined = add(&mut scheduler, 0, prompt(4, 16));
    let chunks = loop {
        let chunks = step(&mut scheduler);
        assert_eq!(scheduler.sequence(joined).unwrap().state, SequenceState::AwaitingFork(leader));
        if scheduler.sequence(leader).unwrap().remaining() == 4 {
            break step(&mut scheduler);
        }
        assert_eq!(chunks.len(), 4);
    };
    assert_eq!(scheduler.plan().preempted, 1);
    assert_eq!(scheduler.sequence(joined).unwrap().state, SequenceState::Waiting);
    assert_eq!(chunks.iter().map(|chunk| chunk.0).collect::<Vec<_>>(), decodes);
}

#[test]
fn a_leader_does_not_wait_for_a_follower_that_was_preempted() {
    let small =
        SchedulerLimits { block_tokens: 1, step_tokens: 5, running_max: 5, can_fork: true, ..limits() };
    let mut scheduler = Scheduler::new(small, 31);
    let add = |scheduler: &mut Scheduler, priority, tokens| {
        add_as(scheduler, SequenceKind::Generate, priority, tokens, 30, &Scope::default())
    };
    for seed in [1, 2, 3] {
        add(&mut scheduler, 1, prompt(seed, 1));
    }
    let leader = add(&mut scheduler, 0, prompt(4, 16));
    step(&mut scheduler);
    let follower = add(&mut scheduler, 2, prompt(4, 16));
    let preempted = (0..40).any(|_| {
        step(&mut scheduler);
        let now = scheduler.sequence(follower).unwrap();
        now.state == SequenceState::Waiting && scheduler.plan().preempted > 0
    });
    assert!(preempted, "the follower has the last rank");
    assert_eq!(scheduler.sequence(leader).unwrap().followers, 0);
}

#[test]
fn a_preempted_sequence_finds_its_own_blocks_again() {
    let mut scheduler = Scheduler::new(limits(), 7);
    let first = add(&mut scheduler, prompt(1, 8), 24);
    step(&mut scheduler);
    let second = add(&mut scheduler, prompt(2, 10), 24);
    assert_eq!(step(&mut scheduler), [(first, 8, 1), (second, 0, 10)]);
    while scheduler.running_count() == 2 {
        step(&mut scheduler);
    }
    scheduler.remove(first);
    assert_eq!(step(&mut scheduler), [(second, 12, 2)]);
}

#[test]
fn a_preempted_sequence_returns_its_rows_and_names_nothing() {
    let mut scheduler = Scheduler::new(SchedulerLimits { step_tokens: 11, ..limits() }, 5);
    let older = add(&mut scheduler, prompt(1, 16), 17);
    let younger = add(&mut scheduler, prompt(2, 3), 9);
    assert_eq!(step(&mut scheduler), [(older, 0, 8), (younger, 0, 3)]);
    scheduler.set_paused(older, true);
    for position in 3..7 {
        assert_eq!(step(&mut scheduler), [(younger, position, 1)]);
    }
    // The younger sequence took a block that the older one needs. The next row would fill that
    // block.
    scheduler.set_paused(older, false);
    assert_eq!(step(&mut scheduler), [(older, 8, 8)]);
    assert_eq!((scheduler.plan().rows, scheduler.plan().decode_rows, scheduler.plan().preempted), (8, 0, 1));
    // The older sequence takes the unfilled block first. That block was never cached.
    assert_eq!((scheduler.pool().cached_blocks(), scheduler.pool().evictions()), (1, 0));
}

#[test]
fn rows_of_a_preempted_sequence_go_to_others_of_the_same_step() {
    let mut scheduler = Scheduler::new(SchedulerLimits { step_tokens: 8, ..limits() }, 8);
    let older = add(&mut scheduler, prompt(1, 16), 17);
    let middle = add(&mut scheduler, prompt(2, 8), 9);
    assert_eq!(step(&mut scheduler), [(older, 0, 4), (middle, 0, 4)]);
    scheduler.set_paused(older, true);
    scheduler.set_paused(middle, true);
    let younger = add(&mut scheduler, prompt(3, 3), 31);
    while scheduler.pool().free_blocks() > 0 {
        assert_eq!(step(&mut scheduler)[0].0, younger);
    }
    scheduler.set_paused(older, false);
    scheduler.set_paused(middle, false);
    // The younger sequence had one of the 8 rows until the older one took its blocks.
    assert_eq!(step(&mut scheduler), [(older, 4, 4), (middle, 4, 4)]);
    assert_eq!(scheduler.plan().preempted, 1);
}
