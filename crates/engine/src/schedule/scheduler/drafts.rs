// SPDX-License-Identifier: Apache-2.0

//! Draft tokens in the step plan: rows are added after scheduling, and accepted or rolled back
//! after the step.

use super::{Scheduler, expect_sequence};
use crate::schedule::sequence_id::SequenceId;
use crate::schedule::step_plan::ChunkOutputs;

impl Scheduler {
    /// Blocks for drafts: free blocks beyond those that running sequences need next.
    pub fn spare_blocks(&self) -> usize {
        self.pool.free_blocks().saturating_sub(self.reserved_blocks())
    }

    /// Adds rows for draft tokens to a chunk whose last row has an output. The number is at most
    /// `most` and limited by the token budget, by the `spare` blocks and by the sequence's
    /// `tokens_max`. Returns the number of rows added.
    pub fn add_drafts(&mut self, chunk: usize, most: usize, spare: &mut usize) -> usize {
        let limits = self.limits;
        let chunk = &mut self.plan.chunks[chunk];
        let sequence = expect_sequence(&mut self.sequences, chunk.sequence_id);
        assert!(
            chunk.outputs == ChunkOutputs::Last && chunk.drafts == 0,
            "drafts follow a last token, once a step: {chunk:?}"
        );
        let rows = most
            .min(limits.step_tokens - self.plan.rows)
            .min(limits.draft_rows_max - self.plan.draft_rows)
            .min(sequence.draft_tokens_max(*spare));
        let free = self.pool.free_blocks();
        if rows == 0 || !sequence.allocate(&mut self.pool, chunk.rows + rows, &mut self.plan.copies) {
            return 0;
        }
        *spare = (*spare + self.pool.free_blocks()).saturating_sub(free);
        chunk.drafts = rows;
        self.drafted_sequences.push(chunk.sequence_id);
        self.plan.rows += rows;
        self.plan.draft_rows += rows;
        rows
    }

    /// Removes the last `rows` draft rows of a chunk from the plan.
    pub fn drop_drafts(&mut self, chunk: usize, rows: usize) {
        self.plan.chunks[chunk].drafts -= rows;
        self.plan.rows -= rows;
        self.plan.draft_rows -= rows;
    }

    /// Accepts the draft row at `position` if its sequence now has `token` there. Rows of one
    /// sequence are checked in order.
    pub fn accept_draft(&mut self, sequence_id: SequenceId, position: usize, token: u32) -> bool {
        // The sequence may have ended with an earlier row of this step.
        let Some(sequence) = &mut self.sequences[sequence_id.index()] else { return false };
        let right = sequence.tokens().get(position) == Some(&token);
        if right {
            assert_eq!(sequence.computed(), position, "drafts of {sequence_id:?} are accepted in order");
            sequence.commit(&mut self.pool, 1);
            sequence.cache_full_blocks(&mut self.pool, 0);
        }
        right
    }

    /// Rolls back after the last `accept_draft` of a step: sequences release blocks that only
    /// rejected drafts needed.
    pub fn release_rejected_drafts(&mut self) {
        for sequence_id in &self.drafted_sequences {
            // The sequence may have ended in this step.
            if let Some(sequence) = &mut self.sequences[sequence_id.index()] {
                sequence.truncate(&mut self.pool);
            }
        }
    }
}
