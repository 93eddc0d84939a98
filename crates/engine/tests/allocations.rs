//! In steady state a step of the policy allocates nothing, whatever the number of sequences: what a sequence will need is
//! reserved when it is admitted, what the pool needs when it is made.
//!
//! What does allocate: the arrival of a request, its admission, and the end of one (it frees). The engine's own step adds
//! one list of tables for the model, per step and not per token.

use allocation_counter::measure;
use engine::scheduler::{ChunkOutputs, Limits, Scheduler, Slot};
use engine::sequence::{Kind, NewSequence};
use prefix::Scope;

const BLOCK_TOKENS: usize = 16;
const RUNNING: usize = 512;
const STEPS: usize = 400;

/// Every sequence gets a token; some have drafts, of which some are right.
fn step(scheduler: &mut Scheduler, slots: &mut Vec<(Slot, usize)>, number: usize) {
    slots.clear();
    scheduler.schedule(usize::MAX);
    let mut spare = scheduler.spare_blocks();
    for index in 0..scheduler.plan().chunks.len() {
        let chunk = scheduler.plan().chunks[index];
        if chunk.outputs != ChunkOutputs::Last {
            continue;
        }
        let drafts =
            if (index + number).is_multiple_of(5) { scheduler.extend(index, 3, &mut spare) } else { 0 };
        slots.push((chunk.slot, drafts));
    }
    scheduler.commit();
    for &(slot, drafts) in &*slots {
        scheduler.push_token(slot, number as u32 % 3);
        for _ in 0..drafts.min(number % 3) {
            scheduler.accept(slot);
            scheduler.push_token(slot, number as u32 % 5);
        }
    }
    scheduler.settle();
}

#[test]
fn a_step_of_decodes_allocates_nothing() {
    let blocks_each = 64;
    let limits = Limits {
        block_tokens: BLOCK_TOKENS,
        step_tokens: 4 * RUNNING,
        running_max: RUNNING,
        score_rows_max: 16,
        draft_rows_max: RUNNING,
        prefix_cache: true,
        forks: true,
    };
    let mut scheduler = Scheduler::new(limits, RUNNING * blocks_each);
    let tokens_max = blocks_each * BLOCK_TOKENS;
    let add = |scheduler: &mut Scheduler, first: u32, tokens_max: usize| {
        let tokens = (0..1 + first % 40).map(|place| first * 64 + place).collect();
        let scope = &Scope::default();
        scheduler.add(NewSequence { kind: Kind::Generate, priority: 0, tenant: 0, tokens, tokens_max, scope })
    };
    let mut slots = Vec::new();
    // Others before them have filled the cache, so that every block that is taken is one that could be found.
    let before: Vec<Slot> =
        (0..RUNNING as u32).map(|index| add(&mut scheduler, 1_000_000 + index, tokens_max)).collect();
    (0..700).for_each(|number| step(&mut scheduler, &mut slots, number));
    before.into_iter().for_each(|slot| scheduler.remove(slot));
    for index in 0..RUNNING as u32 {
        add(&mut scheduler, index, tokens_max);
    }
    while scheduler.waiting() > 0 {
        step(&mut scheduler, &mut slots, 1);
    }
    (0..10).for_each(|number| step(&mut scheduler, &mut slots, number));

    let (evicted, cached) = (scheduler.pool().evictions(), scheduler.pool().cached());
    let counted = measure(|| (0..STEPS).for_each(|number| step(&mut scheduler, &mut slots, number)));
    assert_eq!(scheduler.running(), RUNNING);
    assert!(scheduler.pool().evictions() > evicted + 5_000, "blocks were taken from the cache of {cached}");
    assert_eq!(counted.count_total, 0, "allocations in {STEPS} steps of {RUNNING} sequences: {counted:?}");
}
