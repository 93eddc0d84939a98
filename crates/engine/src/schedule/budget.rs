//! The rows of a step that are left.

use crate::schedule::sequence::SequenceKind;
use crate::schedule::step_plan::SchedulerLimits;

/// Rows of the step that are left.
pub(crate) struct TokenBudget {
    rows: usize,
    /// Of those, for prompts.
    prefill_rows: usize,
    score_rows: usize,
}

impl TokenBudget {
    pub(crate) fn new(limits: &SchedulerLimits) -> Self {
        let rows = limits.step_tokens;
        Self { rows, prefill_rows: rows, score_rows: limits.score_rows_max }
    }

    /// Sequences decode in this step: prompts get no more than that.
    pub(crate) fn limit_prefill(&mut self, rows: usize) {
        self.prefill_rows = self.prefill_rows.min(rows.max(1));
    }

    /// For prompts of that kind.
    pub(crate) fn rows_for(&self, kind: SequenceKind) -> usize {
        let rows = self.rows.min(self.prefill_rows);
        match kind {
            SequenceKind::Generate => rows,
            SequenceKind::Score => rows.min(self.score_rows),
        }
    }

    /// What a prompt that lacks `wanted` rows gets while others may want some too: all of them, or half of what is left,
    /// but a block.
    pub(crate) fn chunk_rows(&self, limits: &SchedulerLimits, kind: SequenceKind, wanted: usize) -> usize {
        let left = self.rows_for(kind);
        match kind {
            SequenceKind::Generate if wanted > left => left.min((left / 2).max(limits.block_tokens)),
            _ => wanted.min(left),
        }
    }

    #[inline]
    pub(crate) fn spend(&mut self, kind: SequenceKind, decode: bool, rows: usize) {
        self.rows -= rows;
        self.prefill_rows -= if decode { 0 } else { rows };
        self.score_rows -= if kind == SequenceKind::Score { rows } else { 0 };
    }

    pub(crate) fn refund(&mut self, kind: SequenceKind, decode: bool, rows: usize) {
        self.rows += rows;
        self.prefill_rows += if decode { 0 } else { rows };
        self.score_rows += if kind == SequenceKind::Score { rows } else { 0 };
    }
}
