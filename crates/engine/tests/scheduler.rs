//! Facts about single steps of the scheduler, most of them from vLLM's behaviour.

#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

use engine::scheduler::{Chunk, ChunkOutputs, Limits, Scheduler, Slot};
use engine::sequence::Kind;
use prefix::Scope;

const BLOCK: usize = 4;

fn limits() -> Limits {
    Limits {
        block_tokens: BLOCK,
        step_tokens: 64,
        prefill_chunk_max: 64,
        running_max: 8,
        score_rows_max: 4,
        draft_rows_max: 8,
        prefix_cache: true,
    }
}

/// Distinct from every other prompt of another `seed`.
fn prompt(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| seed * 1000 + i).collect()
}

fn add(scheduler: &mut Scheduler, tokens: Vec<u32>, tokens_max: usize) -> Slot {
    scheduler.add(Kind::Generate, 0, tokens, tokens_max, &Scope::default())
}

/// One step in which every finished prompt gets a token; returns (slot, first row, rows) of each chunk.
fn step(scheduler: &mut Scheduler) -> Vec<(Slot, usize, usize)> {
    let chunks: Vec<Chunk> = scheduler.schedule().chunks.clone();
    scheduler.commit();
    for chunk in &chunks {
        if chunk.outputs == ChunkOutputs::Last {
            scheduler.push_token(chunk.slot, 7);
        }
    }
    scheduler.check_integrity().unwrap();
    chunks.iter().map(|chunk| (chunk.slot, chunk.start, chunk.rows)).collect()
}

#[test]
fn decodes_come_before_prompts_in_progress() {
    let mut scheduler = Scheduler::new(Limits { step_tokens: 10, prefill_chunk_max: 6, ..limits() }, 100);
    let long = add(&mut scheduler, prompt(1, 30), 40);
    let short = add(&mut scheduler, prompt(2, 3), 40);
    assert_eq!(step(&mut scheduler), [(long, 0, 6), (short, 0, 3)]);
    assert_eq!(step(&mut scheduler), [(short, 3, 1), (long, 6, 6)]);
}

#[test]
fn a_long_prompt_leaves_budget_for_others() {
    let mut scheduler = Scheduler::new(Limits { step_tokens: 10, prefill_chunk_max: 6, ..limits() }, 100);
    let first = add(&mut scheduler, prompt(1, 30), 40);
    let second = add(&mut scheduler, prompt(2, 30), 40);
    assert_eq!(step(&mut scheduler), [(first, 0, 6), (second, 0, 4)]);
    assert_eq!(step(&mut scheduler), [(first, 6, 6), (second, 4, 4)]);
}

#[test]
fn only_the_last_row_of_a_prompt_has_an_output() {
    let mut scheduler = Scheduler::new(Limits { step_tokens: 8, ..limits() }, 100);
    add(&mut scheduler, prompt(1, 12), 40);
    assert_eq!(scheduler.schedule().chunks[0].outputs, ChunkOutputs::None);
    scheduler.commit();
    assert_eq!(scheduler.schedule().chunks[0].outputs, ChunkOutputs::Last);
}

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
    assert_eq!(scheduler.pool().used(), 4);
    let table = |slot| scheduler.sequence(slot).unwrap().table();
    assert_eq!(table(first)[..2], table(second)[..2]);
    assert_ne!(table(first)[2], table(second)[2]);
}

#[test]
fn salts_keep_prompts_apart() {
    let mut scheduler = Scheduler::new(limits(), 100);
    let scope = |salt: &[u8]| Scope { salt: salt.to_vec(), extra: Vec::new() };
    let ours = scheduler.add(Kind::Generate, 0, prompt(1, 10), 20, &scope(b"a"));
    let theirs = scheduler.add(Kind::Generate, 0, prompt(1, 10), 20, &scope(b"b"));
    let ours_again = scheduler.add(Kind::Generate, 0, prompt(1, 10), 20, &scope(b"a"));
    assert_eq!(step(&mut scheduler), [(ours, 0, 10), (theirs, 0, 10), (ours_again, 8, 2)]);
}

#[test]
fn without_the_prefix_cache_nothing_is_shared() {
    let mut scheduler = Scheduler::new(Limits { prefix_cache: false, ..limits() }, 100);
    let first = add(&mut scheduler, prompt(1, 10), 20);
    let second = add(&mut scheduler, prompt(1, 10), 20);
    assert_eq!(step(&mut scheduler), [(first, 0, 10), (second, 0, 10)]);
    assert_eq!(scheduler.pool().used(), 6);
}

#[test]
fn the_tail_of_a_finished_sequence_is_evicted_before_its_head() {
    let mut scheduler = Scheduler::new(limits(), 4);
    let first = add(&mut scheduler, prompt(1, 15), 16);
    step(&mut scheduler);
    scheduler.remove(first);
    assert_eq!(scheduler.pool().cached(), 3);
    // Takes the block without a hash and one with: the last.
    let other = add(&mut scheduler, prompt(2, 8), 9);
    step(&mut scheduler);
    scheduler.remove(other);
    let again = add(&mut scheduler, prompt(1, 15), 16);
    assert_eq!(step(&mut scheduler), [(again, 8, 7)]);
}

#[test]
fn hits_that_nobody_holds_count_against_the_free_blocks() {
    let mut scheduler = Scheduler::new(limits(), 5);
    let first = add(&mut scheduler, prompt(1, 12), 13);
    step(&mut scheduler);
    scheduler.remove(first);
    let holder = add(&mut scheduler, prompt(2, 7), 9);
    assert_eq!(step(&mut scheduler), [(holder, 0, 7)]);
    // Three blocks are free and all three hold its prefix; it needs one more than these.
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
    let mut scheduler = Scheduler::new(Limits { prefill_chunk_max: 8, ..limits() }, 10);
    let first = add(&mut scheduler, prompt(1, 30), 31);
    let second = add(&mut scheduler, prompt(2, 12), 13);
    // 8 rows took 2 of 10 blocks, but 6 more are spoken for: 3 do not fit in the 2 left.
    assert_eq!(step(&mut scheduler), [(first, 0, 8)]);
    scheduler.remove(second);
    let third = add(&mut scheduler, prompt(3, 8), 9);
    assert_eq!(step(&mut scheduler), [(first, 8, 8), (third, 0, 8)]);
}

#[test]
fn admission_leaves_a_block_for_each_sequence_that_will_grow() {
    let mut scheduler = Scheduler::new(limits(), 4);
    let grows = add(&mut scheduler, prompt(1, 5), 20);
    step(&mut scheduler);
    // 2 blocks are free, one of them for the growth of the first.
    add(&mut scheduler, prompt(2, 8), 9);
    assert_eq!(step(&mut scheduler), [(grows, 5, 1)]);
}

#[test]
fn the_last_running_sequence_is_preempted_and_keeps_its_place() {
    let mut scheduler = Scheduler::new(Limits { prefix_cache: false, ..limits() }, 6);
    let first = add(&mut scheduler, prompt(1, 8), 17);
    let second = add(&mut scheduler, prompt(2, 7), 17);
    assert_eq!(step(&mut scheduler), [(first, 0, 8), (second, 0, 7)]);
    let third = add(&mut scheduler, prompt(3, 3), 4);
    for _ in 0..4 {
        assert_eq!(step(&mut scheduler).len(), 2);
    }
    // Each holds 3 of the 6 blocks, and the first is at a block border.
    assert_eq!(step(&mut scheduler), [(first, 12, 1)]);
    assert_eq!(scheduler.plan().preempted, 1);
    assert_eq!((scheduler.running(), scheduler.waiting()), (1, 2), "nothing is admitted in such a step");
    assert_eq!((scheduler.ahead(second), scheduler.ahead(third)), (0, 1));
    scheduler.remove(first);
    assert_eq!(step(&mut scheduler), [(second, 0, 12), (third, 0, 3)], "recomputed with its own output");
}

#[test]
fn a_preempted_sequence_finds_its_own_blocks_again() {
    let mut scheduler = Scheduler::new(limits(), 7);
    let first = add(&mut scheduler, prompt(1, 8), 24);
    step(&mut scheduler);
    let second = add(&mut scheduler, prompt(2, 10), 24);
    assert_eq!(step(&mut scheduler), [(first, 8, 1), (second, 0, 10)]);
    while scheduler.running() == 2 {
        step(&mut scheduler);
    }
    scheduler.remove(first);
    assert_eq!(step(&mut scheduler), [(second, 12, 2)]);
}

#[test]
fn a_preempted_sequence_returns_its_rows_and_names_nothing() {
    let mut scheduler = Scheduler::new(Limits { step_tokens: 16, prefill_chunk_max: 8, ..limits() }, 5);
    let older = add(&mut scheduler, prompt(1, 16), 17);
    let younger = add(&mut scheduler, prompt(2, 3), 9);
    assert_eq!(step(&mut scheduler), [(older, 0, 8), (younger, 0, 3)]);
    scheduler.hold(older, true);
    for position in 3..7 {
        assert_eq!(step(&mut scheduler), [(younger, position, 1)]);
    }
    // The younger took a block that was meant for the older, and is about to fill it.
    scheduler.hold(older, false);
    assert_eq!(step(&mut scheduler), [(older, 8, 8)]);
    assert_eq!((scheduler.plan().rows, scheduler.plan().decode_rows, scheduler.plan().preempted), (8, 0, 1));
    // The block that was not filled is taken first, and was not findable.
    assert_eq!((scheduler.pool().cached(), scheduler.pool().evictions()), (1, 0));
}

#[test]
fn rows_of_a_preempted_sequence_go_to_others_of_the_same_step() {
    let mut scheduler = Scheduler::new(Limits { step_tokens: 9, prefill_chunk_max: 8, ..limits() }, 8);
    let older = add(&mut scheduler, prompt(1, 16), 17);
    let middle = add(&mut scheduler, prompt(2, 12), 13);
    assert_eq!(step(&mut scheduler), [(older, 0, 8), (middle, 0, 1)]);
    scheduler.hold(older, true);
    scheduler.hold(middle, true);
    let younger = add(&mut scheduler, prompt(3, 3), 17);
    (0..11).for_each(|_| assert_eq!(step(&mut scheduler)[0].0, younger));
    assert_eq!(scheduler.pool().free(), 1);
    scheduler.hold(older, false);
    scheduler.hold(middle, false);
    // The younger had one of the 9 rows until the older took its blocks.
    assert_eq!(step(&mut scheduler), [(older, 8, 8), (middle, 1, 1)]);
    assert_eq!(scheduler.plan().preempted, 1);
}

#[test]
fn lower_priority_values_run_first() {
    let mut scheduler = Scheduler::new(Limits { step_tokens: 8, ..limits() }, 100);
    let late = scheduler.add(Kind::Generate, 1, prompt(1, 8), 20, &Scope::default());
    let early = scheduler.add(Kind::Generate, -1, prompt(2, 8), 20, &Scope::default());
    assert_eq!((scheduler.ahead(early), scheduler.ahead(late)), (0, 1));
    assert_eq!(step(&mut scheduler), [(early, 0, 8)]);
}

#[test]
fn a_held_sequence_gets_no_rows_and_keeps_its_blocks() {
    let mut scheduler = Scheduler::new(limits(), 100);
    let slot = add(&mut scheduler, prompt(1, 8), 20);
    step(&mut scheduler);
    scheduler.hold(slot, true);
    assert_eq!(step(&mut scheduler), []);
    assert_eq!(scheduler.pool().used(), 2);
    scheduler.hold(slot, false);
    assert_eq!(step(&mut scheduler), [(slot, 8, 1)]);
}

#[test]
fn scoring_is_bounded_and_does_not_block_others() {
    let mut scheduler = Scheduler::new(limits(), 100);
    let scope = Scope::default();
    let first = scheduler.add(Kind::Score, 0, prompt(1, 6), 6, &scope);
    let second = scheduler.add(Kind::Score, 0, prompt(1, 6), 6, &scope);
    let generate = add(&mut scheduler, prompt(3, 5), 20);
    assert_eq!(step(&mut scheduler), [(first, 0, 4), (generate, 0, 5)]);
    assert_eq!(step(&mut scheduler), [(generate, 5, 1), (first, 4, 2), (second, 0, 2)]);
    assert!(scheduler.plan().chunks[1].outputs == ChunkOutputs::All);
}

#[test]
fn an_abandoned_step_leaves_nothing_to_be_found() {
    let mut scheduler = Scheduler::new(limits(), 100);
    let first = add(&mut scheduler, prompt(1, 10), 20);
    let second = add(&mut scheduler, prompt(1, 10), 20);
    scheduler.schedule();
    scheduler.abandon();
    scheduler.remove(first);
    scheduler.remove(second);
    scheduler.check_integrity().unwrap();
    assert_eq!((scheduler.pool().used(), scheduler.pool().cached()), (0, 0));
    let again = add(&mut scheduler, prompt(1, 10), 20);
    assert_eq!(step(&mut scheduler), [(again, 0, 10)]);
}

#[test]
fn removal_in_every_state_gives_all_blocks_back() {
    let mut scheduler = Scheduler::new(Limits { step_tokens: 8, running_max: 2, ..limits() }, 20);
    let slots: Vec<Slot> = (1..=4).map(|seed| add(&mut scheduler, prompt(seed, 12), 30)).collect();
    step(&mut scheduler);
    step(&mut scheduler);
    assert!(scheduler.waiting() > 0 && scheduler.running() > 0);
    slots.into_iter().for_each(|slot| scheduler.remove(slot));
    scheduler.check_integrity().unwrap();
    assert_eq!((scheduler.running(), scheduler.waiting(), scheduler.pool().free()), (0, 0, 20));
}
