//! What a step is made of: its bounds, its plan, and the budget of rows while it is planned.

use crate::kv::block_tables::BlockCopy;
use crate::schedule::sequence_id::SequenceId;

#[derive(Clone, Copy, Debug)]
pub struct SchedulerLimits {
    pub block_tokens: usize,
    pub step_tokens: usize,
    pub running_max: usize,
    /// Rows of `SequenceKind::Score` sequences in a step, each of which has an output.
    pub score_rows_max: usize,
    /// Rows of drafted tokens in a step, each of which has an output.
    pub draft_rows_max: usize,
    pub prefix_cache: bool,
    /// Equal prompts that are in progress are computed once and forked: blocks can be copied.
    pub can_fork: bool,
}

/// Rows `start..start + rows` of a sequence, and drafted ones behind them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduledChunk {
    pub sequence_id: SequenceId,
    pub start: usize,
    pub rows: usize,
    /// Rows of drafted tokens at `start + rows ..`, all of which have an output.
    pub drafts: usize,
    /// Which of the other rows have an output: the last one, all, or none.
    pub outputs: ChunkOutputs,
    /// Blocks that became findable with this chunk.
    pub(crate) cached_blocks: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkOutputs {
    None,
    Last,
    All,
}

/// One step: filled by `schedule`, valid until the next one.
#[derive(Clone, Debug, Default)]
pub struct StepPlan {
    pub chunks: Vec<ScheduledChunk>,
    /// All of them, drafted ones too.
    pub rows: usize,
    pub decode_rows: usize,
    pub draft_rows: usize,
    /// Sequences that left the queue for the first time, with their cached tokens.
    pub admitted: Vec<(SequenceId, usize)>,
    pub preempted: usize,
    /// To be carried out in this order, before any row is written.
    pub copies: Vec<BlockCopy>,
    /// Set by `commit`.
    pub forked: Vec<Fork>,
}

/// The leader's prompt is complete with this step; the follower goes on from the same output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fork {
    pub leader: SequenceId,
    pub follower: SequenceId,
}

impl StepPlan {
    pub(crate) fn clear(&mut self) {
        self.chunks.clear();
        self.admitted.clear();
        self.copies.clear();
        self.forked.clear();
        self.rows = 0;
        self.decode_rows = 0;
        self.draft_rows = 0;
        self.preempted = 0;
    }
}
