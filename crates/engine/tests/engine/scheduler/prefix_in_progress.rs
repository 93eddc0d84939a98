// SPDX-License-Identifier: Apache-2.0

//! Sequences whose prefix another sequence is computing: they wait for it, or are forked from it.

use super::{BLOCK, add, add_as, limits, prompt, step};
use engine::schedule::scheduler::{PREFIX_WAITERS_SKIPPED_MAX, Scheduler};
use engine::schedule::sequence::{SequenceKind, SequenceState};
use engine::schedule::sequence_id::SequenceId;
use engine::schedule::step_plan::{ChunkOutputs, SchedulerLimits};
use engine::schedule::waiting_queue::OLDEST_FIRST_EVERY;
use prefix::Scope;

/// However small the part of the prefix that fits in a step, the prefix is computed once and stored
/// once.
#[test]
fn requests_with_a_common_prefix_wait_for_the_one_that_computes_it() {
    const PREFIX: usize = 128;
    const OWN: usize = 6;
    const COUNT: usize = 32;
    for (step_tokens, limit) in [(512, usize::MAX), (64, usize::MAX), (64, 20), (64, 7), (512, 1), (41, 33)] {
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
            let chunks = scheduler.schedule(limit).chunks.clone();
            scheduler.commit();
            scheduler.push_token(stream, 7);
            scheduler.check_integrity().unwrap();
            let prompts = chunks.iter().filter(|chunk| chunk.sequence_id != stream);
            rows += prompts.map(|chunk| chunk.rows).sum::<usize>();
            let own = scheduler.sequence(stream).unwrap().table().len();
            most = most.max(scheduler.pool().used_blocks() - own);
        }
        let case = format!("{step_tokens} rows, prefill at most {limit}");
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
