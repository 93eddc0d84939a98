// SPDX-License-Identifier: Apache-2.0

//! The limits of a step and its plan.

use crate::kv::block_tables::BlockCopy;
use crate::schedule::sequence_id::SequenceId;

#[derive(Clone, Copy, Debug)]
pub struct SchedulerLimits {
    pub block_tokens: usize,
    pub step_tokens: usize,
    pub running_max: usize,
    /// Most rows of `SequenceKind::Score` sequences in a step. Each has an output.
    pub score_rows_max: usize,
    /// Most rows of draft tokens in a step. Each has an output.
    pub draft_rows_max: usize,
    pub prefix_cache: bool,
    /// Whether sequences with equal prompts compute them once and fork. This requires a backend
    /// that can copy blocks.
    pub can_fork: bool,
}

/// Rows `start..start + rows` of a sequence, followed by rows of draft tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduledChunk {
    pub sequence_id: SequenceId,
    pub start: usize,
    pub rows: usize,
    /// Rows of draft tokens from `start + rows` on. All of them have an output.
    pub drafts: usize,
    /// Which of the other rows have an output.
    pub outputs: ChunkOutputs,
    /// Blocks of this chunk that entered the prefix cache.
    pub(crate) cached_blocks: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkOutputs {
    None,
    Last,
    All,
}

/// One step. `schedule` fills the plan; it is valid until the next call.
#[derive(Clone, Debug, Default)]
pub struct StepPlan {
    pub chunks: Vec<ScheduledChunk>,
    /// All rows, draft rows included.
    pub rows: usize,
    pub decode_rows: usize,
    pub draft_rows: usize,
    /// Sequences admitted for the first time, with their cached tokens.
    pub admitted: Vec<(SequenceId, usize)>,
    pub preempted: usize,
    /// Block copies, to be carried out in this order before any row is written.
    pub copies: Vec<BlockCopy>,
    /// Set by `commit`.
    pub forked: Vec<Fork>,
}

/// The leader's prompt is computed with this step. The follower continues from the same logits.
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
