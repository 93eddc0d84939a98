// SPDX-License-Identifier: Apache-2.0

//! Paused sequences: they keep their blocks only while no other sequence needs them.

use super::{add, limits, prompt, step};
use engine::schedule::scheduler::Scheduler;
use engine::schedule::sequence::SequenceState;
use engine::schedule::step_plan::SchedulerLimits;
use proptest::prelude::*;

#[test]
fn a_paused_sequence_gets_no_rows_and_keeps_its_blocks() {
    let mut scheduler = Scheduler::new(limits(), 100);
    let sequence_id = add(&mut scheduler, prompt(1, 8), 20);
    step(&mut scheduler);
    scheduler.set_paused(sequence_id, true);
    assert_eq!(step(&mut scheduler), []);
    assert_eq!(scheduler.pool().used_blocks(), 2);
    scheduler.set_paused(sequence_id, false);
    assert_eq!(step(&mut scheduler), [(sequence_id, 8, 1)]);
}

#[test]
fn a_paused_sequence_is_not_admitted_and_delays_no_other() {
    let mut scheduler = Scheduler::new(limits(), 100);
    let first = add(&mut scheduler, prompt(1, 12), 40);
    scheduler.set_paused(first, true);
    let second = add(&mut scheduler, prompt(2, 12), 40);
    assert_eq!((scheduler.waiting_count(), scheduler.waiting_ahead(second)), (2, 0));
    assert_eq!(step(&mut scheduler), [(second, 0, 12)]);
    assert_eq!(step(&mut scheduler), [(second, 12, 1)]);
    scheduler.set_paused(first, false);
    assert_eq!(step(&mut scheduler), [(second, 13, 1), (first, 0, 12)]);
    scheduler.set_paused(first, true);
    scheduler.remove(first);
    assert_eq!((scheduler.running_count(), scheduler.waiting_count()), (1, 0));
}

#[test]
fn a_waiting_sequence_gets_the_blocks_of_a_paused_one_that_came_first() {
    let mut scheduler = Scheduler::new(limits(), 6);
    let paused = add(&mut scheduler, prompt(1, 15), 24);
    assert_eq!(step(&mut scheduler), [(paused, 0, 15)]);
    assert_eq!(step(&mut scheduler), [(paused, 15, 1)]);
    scheduler.set_paused(paused, true);
    let waiting = add(&mut scheduler, prompt(2, 10), 20);
    assert_eq!(step(&mut scheduler), [(waiting, 0, 10)]);
    assert_eq!(scheduler.plan().preempted, 1);
    assert_eq!(scheduler.sequence(paused).unwrap().state, SequenceState::Waiting);
    assert_eq!(step(&mut scheduler), [(waiting, 10, 1)], "a paused sequence is not admitted again");
    scheduler.set_paused(paused, false);
    assert_eq!(step(&mut scheduler), [(waiting, 11, 1)], "the blocks are in use");
    scheduler.remove(waiting);
    // The block that `waiting` did not take is still cached.
    let [(sequence_id, start, rows)] = step(&mut scheduler)[..] else { panic!("{:?}", scheduler.plan()) };
    assert_eq!((sequence_id, start + rows), (paused, 17));
}

#[test]
fn a_running_sequence_takes_blocks_of_paused_ones_before_those_of_a_later_rank() {
    let mut scheduler = Scheduler::new(SchedulerLimits { prefix_cache: false, ..limits() }, 8);
    let paused = add(&mut scheduler, prompt(1, 7), 20);
    let first = add(&mut scheduler, prompt(2, 7), 20);
    let last = add(&mut scheduler, prompt(3, 7), 20);
    assert_eq!(step(&mut scheduler).len(), 3);
    scheduler.set_paused(paused, true);
    for position in 7..12 {
        assert_eq!(step(&mut scheduler), [(first, position, 1), (last, position, 1)]);
        assert_eq!(scheduler.plan().preempted, 0);
    }
    // Each sequence that runs has three of the blocks, and needs a fourth one.
    assert_eq!(step(&mut scheduler), [(first, 12, 1), (last, 12, 1)]);
    assert_eq!(scheduler.plan().preempted, 1);
    assert_eq!(scheduler.sequence(paused).unwrap().state, SequenceState::Waiting);
}

#[test]
fn a_waiting_sequence_gets_the_place_of_a_paused_one() {
    let mut scheduler = Scheduler::new(SchedulerLimits { running_max: 2, ..limits() }, 100);
    let paused = add(&mut scheduler, prompt(1, 5), 20);
    let other = add(&mut scheduler, prompt(2, 5), 20);
    step(&mut scheduler);
    let waiting = add(&mut scheduler, prompt(3, 5), 20);
    assert_eq!(step(&mut scheduler), [(paused, 5, 1), (other, 5, 1)]);
    scheduler.set_paused(paused, true);
    assert_eq!(step(&mut scheduler), [(other, 6, 1), (waiting, 0, 5)]);
    scheduler.set_paused(paused, false);
    assert_eq!(step(&mut scheduler), [(other, 7, 1), (waiting, 5, 1)]);
    scheduler.remove(other);
    // The full block of the preempted sequence is found in the prefix cache.
    assert_eq!(step(&mut scheduler), [(waiting, 6, 1), (paused, 4, 3)]);
}

proptest! {
    /// However many sequences are paused, and whatever they hold, the next step computes a request
    /// that fits alone.
    #[test]
    fn paused_sequences_never_delay_another_one(
        others in prop::collection::vec((1..40_usize, 1..30_usize), 1..12),
        (tokens, blocks) in (1..40_usize, 11..30_usize),
        (running_max, steps) in (1..9_usize, 1..30_usize),
        (prefix_cache, can_fork) in (any::<bool>(), any::<bool>()),
        shared in any::<bool>(),
    ) {
        let limits = SchedulerLimits { running_max, prefix_cache, can_fork, ..limits() };
        let mut scheduler = Scheduler::new(limits, blocks);
        let others: Vec<_> = others
            .into_iter()
            .zip(1..)
            .map(|((tokens, more), seed)| {
                let tokens_max = (tokens + more).min(blocks * limits.block_tokens);
                add(&mut scheduler, prompt(if shared { 1 } else { seed }, tokens), tokens_max.max(tokens + 1))
            })
            .collect();
        for _ in 0..steps {
            step(&mut scheduler);
            for &other in &others {
                let sequence = scheduler.sequence(other).unwrap();
                if sequence.tokens().len() == sequence.tokens_max() {
                    scheduler.set_paused(other, true);
                }
            }
        }
        others.iter().for_each(|&other| scheduler.set_paused(other, true));
        let last = add(&mut scheduler, prompt(99, tokens), tokens + 1);
        prop_assert_eq!(step(&mut scheduler), [(last, 0, tokens)]);
    }
}
