// SPDX-License-Identifier: Apache-2.0

//! Tests of single scheduler steps. Most of the expected behaviour is vLLM's.

mod admission;
mod chunked_prefill;
mod pauses;
mod preemption;
mod prefix_cache;
mod prefix_in_progress;

use engine::schedule::scheduler::Scheduler;
use engine::schedule::sequence::{NewSequence, SequenceKind};
use engine::schedule::sequence_id::SequenceId;
use engine::schedule::step_plan::{ChunkOutputs, ScheduledChunk, SchedulerLimits};
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
    step_with_prefill_limit(scheduler, usize::MAX)
}

/// Like [`step`], with a limit on prefill rows while sequences decode.
fn step_with_prefill_limit(
    scheduler: &mut Scheduler,
    prefill_row_limit: usize,
) -> Vec<(SequenceId, usize, usize)> {
    let chunks: Vec<ScheduledChunk> = scheduler.schedule(prefill_row_limit).chunks.clone();
    scheduler.commit();
    for chunk in &chunks {
        if chunk.outputs == ChunkOutputs::Last {
            scheduler.push_token(chunk.sequence_id, 7);
        }
    }
    scheduler.check_integrity().unwrap();
    chunks.iter().map(|chunk| (chunk.sequence_id, chunk.start, chunk.rows)).collect()
}
