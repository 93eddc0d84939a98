//! What the engine counts.

use crate::draft::speculation::DraftStats;

/// What one call of `Engine::step` did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepReport {
    /// Rows of the batch: tokens whose keys and values were computed. 0: there was nothing to do.
    pub rows: usize,
    /// Rows that continued an output by one token.
    pub decode_rows: usize,
    /// Rows of drafted tokens.
    pub draft_rows: usize,
    /// Sequences in the batch.
    pub sequences: usize,
    pub admitted: usize,
    pub preempted: usize,
    pub finished: usize,
    pub tokens_sampled: usize,
}

/// How the cache's memory is used, now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvCacheUsage {
    /// Memory behind the cache.
    pub bytes: u64,
    /// Token places in the tables of running sequences for the first group of layers, a shared block counted for each.
    pub token_capacity: usize,
    /// Those of them that hold nothing yet: fragmentation.
    pub unused_tokens: usize,
}

/// Gauges of now and counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    pub running: usize,
    pub waiting: usize,
    /// Usable blocks, without the trash block.
    pub kv_blocks: usize,
    pub kv_block_tokens: usize,
    pub kv_block_bytes: usize,
    /// Groups of layers: a token takes a place in a block of each.
    pub kv_groups: usize,
    /// Blocks that a live request holds.
    pub kv_blocks_used: usize,
    /// Blocks that may be taken at once; cached ones among them.
    pub kv_blocks_free: usize,
    /// Free blocks that still hold a findable prefix.
    pub kv_blocks_cached: usize,
    pub steps: u64,
    /// Rows that were not decodes: prompts, and what a preemption made necessary again.
    pub prompt_tokens_computed: u64,
    pub prompt_tokens_cached: u64,
    /// Reported ones: without stop tokens.
    pub output_tokens: u64,
    pub preemptions: u64,
    /// Cached blocks that were taken for something else.
    pub evictions: u64,
    /// Number of the next event of the cache: of so many less one has been told ([`crate::events`]).
    pub kv_events: u64,
    /// Requests that went on from another's computed prompt.
    pub forks: u64,
    /// Rows that were there before their constraint could say what is allowed: the request waited, nobody else.
    pub deferred_rows: u64,
    pub drafts: DraftStats,
    pub finished: u64,
    pub refused: u64,
}
