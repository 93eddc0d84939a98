// SPDX-License-Identifier: Apache-2.0

//! When a waiting sequence is admitted, in which order, and what its pause or removal does.

use super::{add, add_as, limits, prompt, step};
use engine::schedule::scheduler::Scheduler;
use engine::schedule::sequence::{NewSequence, SequenceKind};
use engine::schedule::sequence_id::SequenceId;
use engine::schedule::step_plan::SchedulerLimits;
use prefix::Scope;

#[test]
fn free_blocks_of_a_prefix_hit_count_against_the_free_blocks() {
    let mut scheduler = Scheduler::new(limits(), 5);
    let first = add(&mut scheduler, prompt(1, 12), 13);
    step(&mut scheduler);
    scheduler.remove(first);
    let holder = add(&mut scheduler, prompt(2, 7), 9);
    assert_eq!(step(&mut scheduler), [(holder, 0, 7)]);
    // Three blocks are free, and all three hold the prefix of the new sequence. The sequence needs
    // a fourth block.
    let needs_four = add(&mut scheduler, prompt(1, 13), 14);
    assert_eq!(step(&mut scheduler), [(holder, 7, 1)]);
    scheduler.remove(holder);
    assert_eq!(step(&mut scheduler), [(needs_four, 12, 1)]);
}

#[test]
fn a_head_that_does_not_fit_is_not_passed() {
    let mut scheduler = Scheduler::new(limits(), 6);
    let running = add(&mut scheduler, prompt(1, 14), 17);
    step(&mut scheduler);
    let large = add(&mut scheduler, prompt(2, 12), 13);
    let small = add(&mut scheduler, prompt(3, 4), 5);
    assert_eq!(step(&mut scheduler), [(running, 14, 1)]);
    scheduler.remove(running);
    assert_eq!(step(&mut scheduler), [(large, 0, 12), (small, 0, 4)]);
}

#[test]
fn admission_counts_what_prompts_in_progress_still_need() {
    let mut scheduler = Scheduler::new(SchedulerLimits { step_tokens: 12, ..limits() }, 10);
    let first = add(&mut scheduler, prompt(1, 30), 31);
    let second = add(&mut scheduler, prompt(2, 12), 13);
    // The first 8 rows took 2 of 10 blocks, and the rest of that prompt needs 6 more. The second
    // prompt needs 3 blocks, but only 2 are left.
    assert_eq!(step(&mut scheduler), [(first, 0, 12)]);
    scheduler.remove(second);
    let third = add(&mut scheduler, prompt(3, 8), 9);
    assert_eq!(step(&mut scheduler), [(first, 12, 8), (third, 0, 4)]);
}

#[test]
fn admission_leaves_a_block_for_each_sequence_that_will_grow() {
    let mut scheduler = Scheduler::new(limits(), 4);
    let grows = add(&mut scheduler, prompt(1, 5), 20);
    step(&mut scheduler);
    // Two blocks are free. The scheduler keeps one of them for the growth of the running sequence.
    add(&mut scheduler, prompt(2, 8), 9);
    assert_eq!(step(&mut scheduler), [(grows, 5, 1)]);
}

#[test]
fn lower_priority_values_run_first() {
    let mut scheduler = Scheduler::new(SchedulerLimits { step_tokens: 8, ..limits() }, 100);
    let late = add_as(&mut scheduler, SequenceKind::Generate, 1, prompt(1, 8), 20, &Scope::default());
    let early = add_as(&mut scheduler, SequenceKind::Generate, -1, prompt(2, 8), 20, &Scope::default());
    assert_eq!((scheduler.waiting_ahead(early), scheduler.waiting_ahead(late)), (0, 1));
    assert_eq!(step(&mut scheduler), [(early, 0, 8)]);
}

#[test]
fn removal_in_every_state_gives_all_blocks_back() {
    let mut scheduler = Scheduler::new(SchedulerLimits { step_tokens: 8, running_max: 2, ..limits() }, 20);
    let sequence_ids: Vec<SequenceId> =
        (1..=4).map(|seed| add(&mut scheduler, prompt(seed, 12), 30)).collect();
    step(&mut scheduler);
    step(&mut scheduler);
    assert!(scheduler.waiting_count() > 0 && scheduler.running_count() > 0);
    sequence_ids.into_iter().for_each(|sequence_id| scheduler.remove(sequence_id));
    scheduler.check_integrity().unwrap();
    assert_eq!(
        (scheduler.running_count(), scheduler.waiting_count(), scheduler.pool().free_blocks()),
        (0, 0, 20)
    );
}

#[test]
fn a_request_costs_its_prompt_and_its_expected_output() {
    // (tokens of the prompt, tokens of the output): the tenant whose first request costs less is
    // served first with its second.
    for (less, more) in [((10, 1), (2, 12)), ((3, 3), (7, 1))] {
        let mut scheduler = Scheduler::new(limits(), 100);
        let mut add = |tenant, (rows, output): (usize, usize)| {
            let tokens = prompt(tenant as u32, rows);
            let (kind, scope) = (SequenceKind::Generate, &Scope::default());
            scheduler.add(NewSequence { kind, priority: 0, tenant, tokens, tokens_max: rows + output, scope })
        };
        add(2, more);
        add(1, less);
        let (second_of_more, second_of_less) = (add(2, (1, 1)), add(1, (1, 1)));
        let ahead = [second_of_less, second_of_more].map(|sequence_id| scheduler.waiting_ahead(sequence_id));
        assert!(ahead[0] < ahead[1], "{less:?} {more:?}: {ahead:?}");
    }
}

#[test]
fn token_slots_count_running_sequences_only() {
    let mut scheduler = Scheduler::new(SchedulerLimits { step_tokens: 6, running_max: 4, ..limits() }, 100);
    assert_eq!(scheduler.token_slots(), (0, 0));
    add(&mut scheduler, prompt(1, 5), 20);
    add(&mut scheduler, prompt(2, 9), 20);
    assert_eq!(scheduler.token_slots(), (0, 0), "both wait");
    step(&mut scheduler);
    // 5 rows in two blocks of 4; one row of the second sequence in one block.
    assert_eq!(scheduler.token_slots(), (12, 6));
}
