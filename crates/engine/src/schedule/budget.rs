//! The rows of a step that are left.

use crate::schedule::sequence::Kind;
use crate::schedule::step_plan::Limits;

/// Rows of the step that are left.
pub(crate) struct Budget {
    rows: usize,
    /// Of those, for prompts.
    prompt_rows: usize,
    score_rows: usize,
}

impl Budget {
    pub(crate) fn new(limits: &Limits) -> Self {
        let rows = limits.step_tokens;
        Self { rows, prompt_rows: rows, score_rows: limits.score_rows_max }
    }

    /// Sequences decode in this step: prompts get no more than that.
    pub(crate) fn bound_prompts(&mut self, rows: usize) {
        self.prompt_rows = self.prompt_rows.min(rows.max(1));
    }

    /// For prompts of that kind.
    pub(crate) fn of(&self, kind: Kind) -> usize {
        let rows = self.rows.min(self.prompt_rows);
        match kind {
            Kind::Generate => rows,
            Kind::Score => rows.min(self.score_rows),
        }
    }

    /// What a prompt that lacks `wanted` rows gets while others may want some too: all of them, or half of what is left,
    /// but a block.
    pub(crate) fn chunk(&self, limits: &Limits, kind: Kind, wanted: usize) -> usize {
        let left = self.of(kind);
        match kind {
            Kind::Generate if wanted > left => left.min((left / 2).max(limits.block_tokens)),
            _ => wanted.min(left),
        }
    }

    #[inline]
    pub(crate) fn spend(&mut self, kind: Kind, decode: bool, rows: usize) {
        self.rows -= rows;
        self.prompt_rows -= if decode { 0 } else { rows };
        self.score_rows -= if kind == Kind::Score { rows } else { 0 };
    }

    pub(crate) fn refund(&mut self, kind: Kind, decode: bool, rows: usize) {
        self.rows += rows;
        self.prompt_rows += if decode { 0 } else { rows };
        self.score_rows += if kind == Kind::Score { rows } else { 0 };
    }
}
