// SPDX-License-Identifier: Apache-2.0

//! Counters and gauges that the engine reports.

use crate::draft::speculation::DraftStats;

/// The step whose outputs one call of `Engine::step` reported. An earlier call may have launched
/// it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepReport {
    /// Rows of the batch: tokens whose keys and values the step computed. 0: the step had nothing
    /// to do.
    pub rows: usize,
    /// Rows that continue an output by one token.
    pub decode_rows: usize,
    /// Rows of draft tokens.
    pub draft_rows: usize,
    /// Sequences in the batch.
    pub sequences: usize,
    pub admitted: usize,
    pub preempted: usize,
    pub finished: usize,
    pub tokens_sampled: usize,
}

/// Memory and fragmentation of the KV cache at this moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvCacheUsage {
    /// Memory that backs the cache.
    pub bytes: u64,
    /// Tokens that the blocks of running sequences can hold, in KV cache group 0. A shared block
    /// counts once for each sequence.
    pub token_capacity: usize,
    /// Tokens of `token_capacity` that are not computed yet: internal fragmentation.
    pub unused_tokens: usize,
}

/// Gauges of this moment and counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    pub running: usize,
    pub waiting: usize,
    /// Allocatable blocks, without the null block.
    pub kv_blocks: usize,
    pub kv_block_tokens: usize,
    pub kv_block_bytes: usize,
    /// KV cache groups. A token takes a slot in one block of each group.
    pub kv_groups: usize,
    /// Blocks with a reference count above 0.
    pub kv_blocks_used: usize,
    /// Blocks that can be allocated at once, cached blocks included.
    pub kv_blocks_free: usize,
    /// Free blocks that a prefix lookup still finds.
    pub kv_blocks_cached: usize,
    pub steps: u64,
    /// Steps that were launched before the tokens of the step before were read.
    pub steps_ahead: u64,
    /// Rows that were no decodes: prompt tokens, and tokens recomputed after a preemption.
    pub prompt_tokens_computed: u64,
    pub prompt_tokens_cached: u64,
    /// Reported output tokens. Stop tokens are not reported.
    pub output_tokens: u64,
    pub preemptions: u64,
    /// Cached blocks that were reallocated.
    pub evictions: u64,
    /// Number of the next KV cache event ([`crate::kv::events`]). The first event has number 1.
    pub kv_events: u64,
    /// Requests that took over the computed prompt of an equal request.
    pub forks: u64,
    /// Rows of logits that were deferred because the request's token mask was not ready. Only that
    /// request waits.
    pub deferred_rows: u64,
    pub drafts: DraftStats,
    pub finished: u64,
    pub refused: u64,
}
