// SPDX-License-Identifier: Apache-2.0

//! Tests of single scheduler steps. Most of the expected behaviour is vLLM's.
//!
//! Longer than 600 lines: one test for each rule of the scheduler, which are read side by side.

use engine::kv::group::KvGroupKind;
use engine::schedule::scheduler::{PREFIX_WAITERS_SKIPPED_MAX, Scheduler};
use engine::schedule::sequence::{NewSequence, SequenceKind, SequenceState};
use engine::schedule::sequence_id::SequenceId;
use engine::schedule::step_plan::{ChunkOutputs, ScheduledChunk, SchedulerLimits};
use engine::schedule::waiting_queue::OLDEST_FIRST_EVERY;
use prefix::Scope;

const BLOCK: usize = 4;

fn limits() -> SchedulerLimits {
    SchedulerLimits {
        block_tokens: BLOCK,
        step_tokens: 64,
        running_max: 8,
        score_rows_max: 4,
        draft_rows_max: 8,
        prefix_cache: true,
        can_fork: false,
    }
}

/// A prompt that shares no token with the prompts of other seeds.
fn prompt(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| seed * 1000 + i).collect()
}

fn add(scheduler: &mut Scheduler, tokens: Vec<u32>, tokens_max: usize) -> SequenceId {
    add_as(scheduler, SequenceKind::Generate, 0, tokens, tokens_max, &Scope::default())
}

fn add_as(
    scheduler: &mut Scheduler,
    kind: SequenceKind,
    priority: i32,
    tokens: Vec<u32>,
    tokens_max: usize,
    scope: &Scope,
) -> SequenceId {
    scheduler.add(NewSequence { kind, priority, tenant: 0, tokens, tokens_max, scope })
}

/// Runs one step and returns (sequence id, first row, rows) of each chunk. If a chunk ends with its
/// sequence's last token, the sequence gets a new token.
fn step(scheduler: &mut Scheduler) -> Vec<(SequenceId, usize, usize)> {
    step_beside(scheduler, usize::MAX)
}

/// Like [`step`], with a limit on prefill rows while sequences decode.
fn step_beside(scheduler: &mut Scheduler, beside: usize) -> Vec<(SequenceId, usize, usize)> {
    let chunks: Vec<ScheduledChunk> = scheduler.schedule(beside).chunks.clone();
    scheduler.commit();
    for chunk in &chunks {
        if chunk.outputs == ChunkOutputs::Last {
            scheduler.push_token(chunk.sequence_id, 7);
        }
    }
    scheduler.check_integrity().unwrap();
    chunks.iter().map(|chunk| (chunk.sequence_id, chunk.start, chunk.rows)).collect()
}

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
    let rows = |scheduler: &mut Scheduler, beside| step_beside(scheduler, beside);
    assert_eq!(rows(&mut scheduler, 24), [(stream, 3, 1), (long, 0, 24)]);
    let short = add(&mut scheduler, prompt(3, 10), 20);
    assert_eq!(rows(&mut scheduler, 24), [(stream, 4, 1), (long, 24, 14), (short, 0, 10)]);
    assert_eq!(rows(&mut scheduler, 0), [(stream, 5, 1), (short, 10, 1), (long, 38, 1)], "it goes on");
    scheduler.set_paused(stream, true);
    scheduler.set_paused(short, true);
    assert_eq!(rows(&mut scheduler, 24), [(long, 39, 64)], "no sequence decodes");
}

/// However small the part of the prefix that fits in a step, the prefix is computed once and stored
/// once.
#[test]
fn requests_with_a_common_prefix_wait_for_the_one_that_computes_it() {
    const PREFIX: usize = 128;
    const OWN: usize = 6;
    const COUNT: usize = 32;
    for (step_tokens, beside) in [(512, usize::MAX), (64, usize::MAX), (64, 20), (64, 7), (512, 1), (41, 33)]
    {
        let mut scheduler =
            Scheduler::new(SchedulerLimits { step_tokens, running_max: 40, ..limits() }, 1000);
        let stream = add(&mut scheduler, prompt(1, 3), 1000);
        step(&mut scheduler);
        let sequence_ids: Vec<SequenceId> = (0..COUNT as u32)
            .map(|own| add(&mut scheduler, [prompt(2, PREFIX), prompt(3 + own, OWN)].concat(), 500))
            .collect();
        let (mut rows, mut most) = (0, 0);
        let left = |scheduler: &Scheduler, sequence_id| scheduler.sequence(sequence_id).unwrap().remaining();
        while sequence_ids.iter().any(|&sequence_id| left(&scheduler, sequence_id) > 0) {
            let chunks = scheduler.schedule(beside).chunks.clone();
            scheduler.commit();
            scheduler.push_token(stream, 7);
            scheduler.check_integrity().unwrap();
            let prompts = chunks.iter().filter(|chunk| chunk.sequence_id != stream);
            rows += prompts.map(|chunk| chunk.rows).sum::<usize>();
            let own = scheduler.sequence(stream).unwrap().table().len();
            most = most.max(scheduler.pool().used_blocks() - own);
        }
        let case = format!("{step_tokens} rows, {beside} beside decodes");
        assert_eq!(rows, PREFIX + COUNT * OWN, "{case}");
        assert_eq!(most, PREFIX / BLOCK + COUNT * OWN.div_ceil(BLOCK), "{case}");
    }
}

#[test]
fn the_first_in_rank_does_not_wait_for_a_prefix_of_another() {
    let mut scheduler = Scheduler::new(SchedulerLimits { step_tokens: 16, ..limits() }, 1000);
    let add = |scheduler: &mut Scheduler, priority| {
        add_as(scheduler, SequenceKind::Generate, priority, prompt(1, 200), 201, &Scope::default())
    };
    let late = add(&mut scheduler, 1);
    assert_eq!(step(&mut scheduler), [(late, 0, 16)]);
    let urgent = add(&mut scheduler, 0);
    let follower = add(&mut scheduler, 1);
    assert_eq!(step(&mut scheduler), [(late, 16, 12), (urgent, 24, 4)]);
    assert_eq!(scheduler.sequence(follower).unwrap().state, SequenceState::Waiting);
}

#[test]
fn a_sequence_that_waits_for_a_prefix_is_skipped_until_its_oldest_first_turn() {
    let mut scheduler =
        Scheduler::new(SchedulerLimits { step_tokens: 16, running_max: 16, ..limits() }, 1000);
    let leader = add(&mut scheduler, prompt(1, 200), 201);
    step(&mut scheduler);
    let follower = add(&mut scheduler, prompt(1, 200), 201);
    let others: Vec<SequenceId> = (2..12).map(|seed| add(&mut scheduler, prompt(seed, 2), 40)).collect();
    let waits = |scheduler: &Scheduler, sequence_id| {
        scheduler.sequence(sequence_id).unwrap().state == SequenceState::Waiting
    };
    let mut went_first = 0;
    while waits(&scheduler, follower) {
        went_first = others.iter().filter(|&&sequence_id| !waits(&scheduler, sequence_id)).count();
        step(&mut scheduler);
    }
    // The leader took the first of `OLDEST_FIRST_EVERY` admissions, and the last one takes the
    // oldest sequence.
    assert_eq!(went_first, OLDEST_FIRST_EVERY as usize - 2);
    assert!(scheduler.sequence(follower).unwrap().rank.is_promoted());
    let chunk = scheduler.plan().chunks.iter().find(|chunk| chunk.sequence_id == follower).unwrap();
    assert_eq!(chunk.start, 196, "it finds all that can be found");
    assert!(scheduler.sequence(leader).unwrap().remaining() <= 1);
}

#[test]
fn a_step_passes_no_more_than_so_many_that_wait_for_a_prefix() {
    for (followers, is_admitted) in
        [(PREFIX_WAITERS_SKIPPED_MAX, true), (PREFIX_WAITERS_SKIPPED_MAX + 1, false)]
    {
        let mut scheduler = Scheduler::new(SchedulerLimits { step_tokens: 16, ..limits() }, 10_000);
        add(&mut scheduler, prompt(1, 200), 201);
        step(&mut scheduler);
        for _ in 0..followers {
            add(&mut scheduler, prompt(1, 200), 201);
        }
        let other = add(&mut scheduler, prompt(2, 3), 10);
        assert_eq!(step(&mut scheduler).iter().any(|chunk| chunk.0 == other), is_admitted, "{followers}");
    }
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

#[test]
fn lower_priority_values_run_first() {
    let mut scheduler = Scheduler::new(SchedulerLimits { step_tokens: 8, ..limits() }, 100);
    let late = add_as(&mut scheduler, SequenceKind::Generate, 1, prompt(1, 8), 20, &Scope::default());
    let early = add_as(&mut scheduler, SequenceKind::Generate, -1, prompt(2, 8), 20, &Scope::default());
    assert_eq!((scheduler.waiting_ahead(early), scheduler.waiting_ahead(late)), (0, 1));
    assert_eq!(step(&mut scheduler), [(early, 0, 8)]);
}

#[test]
fn a_held_sequence_gets_no_rows_and_keeps_its_blocks() {
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

/// The step that admits a sequence may also fill the blocks of its prefix cache hit. If that step
/// fails, the sequence must fail too. So even a paused sequence gets rows in that step.
#[test]
fn a_held_sequence_gets_the_rows_of_its_admission() {
    let mut scheduler = Scheduler::new(limits(), 100);
    let first = add(&mut scheduler, prompt(1, 12), 40);
    let second = add(&mut scheduler, [prompt(1, 12), vec![7, 8]].concat(), 40);
    scheduler.set_paused(second, true);
    assert_eq!(step(&mut scheduler), [(first, 0, 12), (second, 12, 2)]);
    assert_eq!(step(&mut scheduler), [(first, 12, 1)]);
    scheduler.set_paused(second, false);
    assert_eq!(step(&mut scheduler), [(first, 13, 1), (second, 14, 1)]);
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

/// Runs one step and returns its rows. Each row with an output gets a token, and each fork of that
/// row gets one too.
fn step_with_forks(scheduler: &mut Scheduler) -> usize {
    let rows = scheduler.schedule(usize::MAX).rows;
    scheduler.commit();
    let plan = scheduler.plan().clone();
    let with_output = plan.chunks.iter().filter(|chunk| chunk.outputs == ChunkOutputs::Last);
    with_output.for_each(|chunk| scheduler.push_token(chunk.sequence_id, 50));
    plan.forked.iter().for_each(|fork| scheduler.push_token(fork.follower, 51));
    scheduler.check_integrity().unwrap();
    rows
}

#[test]
fn equal_prompts_are_computed_once_and_the_last_block_is_copied_on_write() {
    let mut scheduler = Scheduler::new(SchedulerLimits { can_fork: true, ..limits() }, 20);
    let sequence_ids: Vec<SequenceId> = (0..4).map(|_| add(&mut scheduler, prompt(1, 10), 20)).collect();
    assert_eq!(step_with_forks(&mut scheduler), 10, "the prompt once");
    assert_eq!((scheduler.plan().forked.len(), scheduler.running_count()), (3, 4));
    assert_eq!(scheduler.pool().used_blocks(), 3, "all four share all blocks");
    // Three sequences copy the last block. The fourth sequence then is the only user of the
    // original.
    assert_eq!(step_with_forks(&mut scheduler), 4);
    assert_eq!((scheduler.plan().copies.len(), scheduler.pool().used_blocks()), (3, 6));
    let tables: Vec<_> = sequence_ids
        .iter()
        .map(|&sequence_id| scheduler.sequence(sequence_id).unwrap().table().to_vec())
        .collect();
    assert!(tables.iter().all(|table| table[..2] == tables[0][..2]));
    sequence_ids.into_iter().for_each(|sequence_id| scheduler.remove(sequence_id));
    assert_eq!(scheduler.pool().free_blocks(), 20);
}

#[test]
fn a_follower_of_a_cancelled_leader_computes_the_prompt() {
    let mut scheduler = Scheduler::new(SchedulerLimits { can_fork: true, step_tokens: 8, ..limits() }, 20);
    let leader = add(&mut scheduler, prompt(1, 14), 20);
    let follower = add(&mut scheduler, prompt(1, 14), 20);
    assert_eq!(step_with_forks(&mut scheduler), 8);
    assert_eq!(scheduler.running_count(), 2, "the follower has joined, without rows");
    scheduler.remove(leader);
    assert_eq!((scheduler.running_count(), scheduler.waiting_count()), (0, 1));
    assert_eq!(step_with_forks(&mut scheduler), 6, "it finds what the leader had computed");
    scheduler.remove(follower);
    assert_eq!(scheduler.pool().free_blocks(), 20);
}

#[test]
fn another_tenants_equal_prompt_is_not_forked() {
    let mut scheduler = Scheduler::new(SchedulerLimits { can_fork: true, ..limits() }, 20);
    let scope = |salt: &[u8]| Scope { salt: salt.to_vec(), extra: Vec::new() };
    add_as(&mut scheduler, SequenceKind::Generate, 0, prompt(1, 10), 20, &scope(b"a"));
    add_as(&mut scheduler, SequenceKind::Generate, 0, prompt(1, 10), 20, &scope(b"b"));
    assert_eq!(step_with_forks(&mut scheduler), 20);
    assert!(scheduler.plan().forked.is_empty());
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
