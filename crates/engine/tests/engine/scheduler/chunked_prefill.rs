// SPDX-License-Identifier: Apache-2.0

//! How a step divides its rows between decodes and prompts.

use super::{add, add_as, limits, prompt, step, step_with_prefill_limit};
use engine::schedule::scheduler::Scheduler;
use engine::schedule::sequence::SequenceKind;
use engine::schedule::step_plan::{ChunkOutputs, SchedulerLimits};
use prefix::Scope;

#[test]
fn decodes_come_before_prompts_in_progress() {
    let mut scheduler = Scheduler::new(SchedulerLimits { step_tokens: 10, ..limits() }, 100);
    let long = add(&mut scheduler, prompt(1, 30), 40);
    let short = add(&mut scheduler, prompt(2, 3), 40);
    // The long prompt gets the rows that the short prompt does not need.
    assert_eq!(step(&mut scheduler), [(long, 0, 7), (short, 0, 3)]);
    assert_eq!(step(&mut scheduler), [(short, 3, 1), (long, 7, 9)]);
}

#[test]
fn a_long_prompt_leaves_budget_for_others() {
    let mut scheduler = Scheduler::new(SchedulerLimits { step_tokens: 10, ..limits() }, 100);
    let first = add(&mut scheduler, prompt(1, 30), 40);
    let second = add(&mut scheduler, prompt(2, 30), 40);
    assert_eq!(step(&mut scheduler), [(first, 0, 6), (second, 0, 4)]);
    assert_eq!(step(&mut scheduler), [(first, 6, 6), (second, 4, 4)]);
}

#[test]
fn a_short_prompt_does_not_wait_for_all_of_a_long_one() {
    let mut scheduler = Scheduler::new(limits(), 1000);
    let long = add(&mut scheduler, prompt(1, 900), 901);
    assert_eq!(step(&mut scheduler), [(long, 0, 64)], "alone it has all rows");
    let short = add(&mut scheduler, prompt(2, 20), 40);
    assert_eq!(step(&mut scheduler), [(long, 64, 44), (short, 0, 20)]);
    // A short prompt does not wait for two long prompts either.
    let other = add(&mut scheduler, prompt(3, 900), 901);
    let third = add(&mut scheduler, prompt(4, 12), 13);
    assert_eq!(step(&mut scheduler), [(short, 20, 1), (long, 108, 35), (other, 0, 16), (third, 0, 12)]);
}

#[test]
fn a_prompt_that_the_step_completes_is_not_cut() {
    let mut scheduler = Scheduler::new(limits(), 1000);
    let first = add(&mut scheduler, prompt(1, 50), 60);
    let second = add(&mut scheduler, prompt(2, 50), 60);
    assert_eq!(step(&mut scheduler), [(first, 0, 50), (second, 0, 14)]);
}

#[test]
fn prompts_get_so_many_rows_as_streams_can_bear() {
    let mut scheduler = Scheduler::new(limits(), 1000);
    let stream = add(&mut scheduler, prompt(1, 3), 300);
    step(&mut scheduler);
    let long = add(&mut scheduler, prompt(2, 900), 901);
    let rows = |scheduler: &mut Scheduler, limit| step_with_prefill_limit(scheduler, limit);
    assert_eq!(rows(&mut scheduler, 24), [(stream, 3, 1), (long, 0, 24)]);
    let short = add(&mut scheduler, prompt(3, 10), 20);
    assert_eq!(rows(&mut scheduler, 24), [(stream, 4, 1), (long, 24, 14), (short, 0, 10)]);
    assert_eq!(
        rows(&mut scheduler, 0),
        [(stream, 5, 1), (short, 10, 1), (long, 38, 1)],
        "a prompt always gets a row"
    );
    scheduler.set_paused(stream, true);
    scheduler.set_paused(short, true);
    assert_eq!(rows(&mut scheduler, 24), [(long, 39, 64)], "no sequence decodes");
}

#[test]
fn only_the_last_row_of_a_prompt_has_an_output() {
    let mut scheduler = Scheduler::new(SchedulerLimits { step_tokens: 8, ..limits() }, 100);
    add(&mut scheduler, prompt(1, 12), 40);
    assert_eq!(scheduler.schedule(usize::MAX).chunks[0].outputs, ChunkOutputs::None);
    scheduler.commit();
    assert_eq!(scheduler.schedule(usize::MAX).chunks[0].outputs, ChunkOutputs::Last);
}

#[test]
fn scoring_is_bounded_and_does_not_block_others() {
    let mut scheduler = Scheduler::new(limits(), 100);
    let scope = Scope::default();
    let first = add_as(&mut scheduler, SequenceKind::Score, 0, prompt(1, 6), 6, &scope);
    let second = add_as(&mut scheduler, SequenceKind::Score, 0, prompt(1, 6), 6, &scope);
    let generate = add(&mut scheduler, prompt(3, 5), 20);
    assert_eq!(step(&mut scheduler), [(first, 0, 4), (generate, 0, 5)]);
    assert_eq!(step(&mut scheduler), [(generate, 5, 1), (first, 4, 2), (second, 0, 2)]);
    assert!(scheduler.plan().chunks[1].outputs == ChunkOutputs::All);
}
