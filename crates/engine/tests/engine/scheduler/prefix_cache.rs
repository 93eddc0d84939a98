// SPDX-License-Identifier: Apache-2.0

//! Which blocks of earlier prompts a sequence reuses, and which blocks are evicted.

use super::{add, add_as, limits, prompt, step};
use engine::kv::group::KvGroupKind;
use engine::schedule::scheduler::Scheduler;
use engine::schedule::sequence::SequenceKind;
use engine::schedule::step_plan::SchedulerLimits;
use prefix::Scope;

#[test]
fn a_prompt_that_is_cached_whole_still_computes_its_last_block() {
    let mut scheduler = Scheduler::new(limits(), 100);
    let first = add(&mut scheduler, prompt(1, 12), 13);
    step(&mut scheduler);
    scheduler.remove(first);
    let again = add(&mut scheduler, prompt(1, 12), 13);
    assert_eq!(step(&mut scheduler), [(again, 8, 4)]);
    scheduler.remove(again);
    let longer = add(&mut scheduler, prompt(1, 13), 14);
    assert_eq!(step(&mut scheduler), [(longer, 12, 1)]);
}

#[test]
fn two_equal_prompts_in_one_step_share_blocks() {
    let mut scheduler = Scheduler::new(limits(), 100);
    let first = add(&mut scheduler, prompt(1, 10), 20);
    let second = add(&mut scheduler, prompt(1, 10), 20);
    assert_eq!(step(&mut scheduler), [(first, 0, 10), (second, 8, 2)]);
    assert_eq!(scheduler.pool().used_blocks(), 4);
    let table = |sequence_id| scheduler.sequence(sequence_id).unwrap().table();
    assert_eq!(table(first)[..2], table(second)[..2]);
    assert_ne!(table(first)[2], table(second)[2]);
}

#[test]
fn salts_keep_prompts_apart() {
    let mut scheduler = Scheduler::new(limits(), 100);
    let scope = |salt: &[u8]| Scope { salt: salt.to_vec(), extra: Vec::new() };
    let ours = add_as(&mut scheduler, SequenceKind::Generate, 0, prompt(1, 10), 20, &scope(b"a"));
    let theirs = add_as(&mut scheduler, SequenceKind::Generate, 0, prompt(1, 10), 20, &scope(b"b"));
    let ours_again = add_as(&mut scheduler, SequenceKind::Generate, 0, prompt(1, 10), 20, &scope(b"a"));
    assert_eq!(step(&mut scheduler), [(ours, 0, 10), (theirs, 0, 10), (ours_again, 8, 2)]);
}

#[test]
fn without_the_prefix_cache_nothing_is_shared() {
    let mut scheduler = Scheduler::new(SchedulerLimits { prefix_cache: false, ..limits() }, 100);
    let first = add(&mut scheduler, prompt(1, 10), 20);
    let second = add(&mut scheduler, prompt(1, 10), 20);
    assert_eq!(step(&mut scheduler), [(first, 0, 10), (second, 0, 10)]);
    assert_eq!(scheduler.pool().used_blocks(), 6);
}

#[test]
fn the_tail_of_a_finished_sequence_is_evicted_before_its_head() {
    let mut scheduler = Scheduler::new(limits(), 4);
    let first = add(&mut scheduler, prompt(1, 15), 16);
    step(&mut scheduler);
    scheduler.remove(first);
    assert_eq!(scheduler.pool().cached_blocks(), 3);
    // The second prompt takes the block without a block key and one cached block, the last of the
    // first prompt.
    let other = add(&mut scheduler, prompt(2, 8), 9);
    step(&mut scheduler);
    scheduler.remove(other);
    let again = add(&mut scheduler, prompt(1, 15), 16);
    assert_eq!(step(&mut scheduler), [(again, 8, 7)]);
}

#[test]
fn an_abandoned_step_leaves_nothing_to_be_found() {
    let mut scheduler = Scheduler::new(limits(), 100);
    let first = add(&mut scheduler, prompt(1, 10), 20);
    let second = add(&mut scheduler, prompt(1, 10), 20);
    scheduler.schedule(usize::MAX);
    scheduler.abandon();
    scheduler.remove(first);
    scheduler.remove(second);
    scheduler.check_integrity().unwrap();
    assert_eq!((scheduler.pool().used_blocks(), scheduler.pool().cached_blocks()), (0, 0));
    let again = add(&mut scheduler, prompt(1, 10), 20);
    assert_eq!(step(&mut scheduler), [(again, 0, 10)]);
}

#[test]
fn a_window_gives_back_what_it_has_left_behind() {
    let mut scheduler = Scheduler::with_groups(limits(), 10, vec![KvGroupKind::Window { tokens: 6 }]);
    let sequence_id = add(&mut scheduler, prompt(1, 12), 40);
    step(&mut scheduler);
    assert_eq!(scheduler.pool().used_blocks(), 3);
    // The row at position 12 reads positions 7 and later.
    step(&mut scheduler);
    assert_eq!(scheduler.sequence(sequence_id).unwrap().table()[0], 0);
    assert_eq!((scheduler.pool().used_blocks(), scheduler.pool().cached_blocks()), (3, 1));
    (0..20).for_each(|_| drop(step(&mut scheduler)));
    assert!(scheduler.pool().used_blocks() <= 3);
    scheduler.remove(sequence_id);
    assert_eq!(scheduler.pool().free_blocks(), 10);
}

#[test]
fn a_state_is_found_where_a_step_ended_with_a_block() {
    let mut scheduler = Scheduler::with_groups(limits(), 10, vec![KvGroupKind::State]);
    let first = add(&mut scheduler, prompt(1, 8), 40);
    step(&mut scheduler);
    assert_eq!(scheduler.pool().used_blocks(), 1, "one state, however long the prompt");
    let longer = add(&mut scheduler, prompt(1, 11), 40);
    assert_eq!(step(&mut scheduler), [(first, 8, 1), (longer, 8, 3)]);
    let odd = add(&mut scheduler, prompt(1, 7), 40);
    assert_eq!(step(&mut scheduler)[2], (odd, 0, 7), "there is no state after 4 tokens");
}

#[test]
fn the_prefix_cache_is_reset_only_while_no_block_is_in_use() {
    let mut scheduler = Scheduler::new(limits(), 20);
    let sequence_id = add(&mut scheduler, prompt(1, 10), 20);
    step(&mut scheduler);
    assert!(!scheduler.reset_prefix_cache());
    scheduler.remove(sequence_id);
    assert_eq!(scheduler.pool().cached_blocks(), 2);
    assert!(scheduler.reset_prefix_cache());
    assert_eq!((scheduler.pool().cached_blocks(), scheduler.pool().in_use_end()), (0, 1));
    let again = add(&mut scheduler, prompt(1, 10), 20);
    assert_eq!(step(&mut scheduler), [(again, 0, 10)]);
}
