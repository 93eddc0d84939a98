// SPDX-License-Identifier: Apache-2.0

//! The token budget of a step while the scheduler plans it.

use crate::schedule::sequence::SequenceKind;
use crate::schedule::step_plan::SchedulerLimits;

/// Rows that the step may still take.
pub(crate) struct TokenBudget {
    rows: usize,
    /// Prefill rows that the step may still take, included in `rows`.
    prefill_rows: usize,
    score_rows: usize,
}

impl TokenBudget {
    pub(crate) fn new(limits: &SchedulerLimits) -> Self {
        let rows = limits.step_tokens;
        Self { rows, prefill_rows: rows, score_rows: limits.score_rows_max }
    }

    /// Caps chunked prefill because sequences decode in this step.
    pub(crate) fn limit_prefill(&mut self, rows: usize) {
        self.prefill_rows = self.prefill_rows.min(rows.max(1));
    }

    /// Rows left for prefill of a sequence of this kind.
    pub(crate) fn rows_for(&self, kind: SequenceKind) -> usize {
        let rows = self.rows.min(self.prefill_rows);
        match kind {
            SequenceKind::Generate | SequenceKind::EmbedLast | SequenceKind::EmbedAll => rows,
            SequenceKind::Score => rows.min(self.score_rows),
        }
    }

    /// Rows for a prefill that lacks `wanted` rows: all of them if they fit. Otherwise half of the
    /// rows that are left, but at least one block, so that a short prompt need not wait for a long
    /// one.
    pub(crate) fn chunk_rows(&self, limits: &SchedulerLimits, kind: SequenceKind, wanted: usize) -> usize {
        let left = self.rows_for(kind);
        match kind {
            SequenceKind::Score => wanted.min(left),
            _ if wanted > left => left.min((left / 2).max(limits.block_tokens)),
            _ => wanted,
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
