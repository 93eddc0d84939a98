// SPDX-License-Identifier: Apache-2.0

//! [`Step`]: the batch of one forward pass. Each row is one token of a sequence.

use crate::OpError;

/// In [`Step::tokens`], `DRAWN_TOKEN | output` is the token that [`crate::Backend::start_draws`]
/// chose last for this output. The host need not know it. No vocabulary has so many tokens.
pub const DRAWN_TOKEN: u32 = 1 << 31;

/// Row data of a step, which mixes decodes and chunked prefills. Rows of one sequence are in order
/// of position.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// Token id of each row, or [`DRAWN_TOKEN`] and an output.
    pub tokens: &'a [u32],
    /// Absolute position of each row in its sequence.
    pub positions: &'a [u32],
    /// Index of each row's sequence among those of the step.
    pub sequences: &'a [u32],
    /// KV slot of each row in each KV cache group ([`crate::KvLayout::groups`]): entry `r * groups
    /// + g` is `block * block_tokens + offset` for row `r` in group `g`.
    pub kv_slots: &'a [u32],
    /// Block tables: entry `i` of table `sequence * groups + g` is the block with positions `i *
    /// block_tokens ..`. Entries that no row of the step attends to may have any value.
    pub tables: &'a [&'a [u32]],
    /// Rows that need logits, ascending.
    pub outputs: &'a [u32],
}

impl Step<'_> {
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Number of KV cache groups. A step without rows counts as one group.
    pub fn groups(&self) -> usize {
        self.kv_slots.len().checked_div(self.rows()).unwrap_or(1).max(1)
    }

    /// Checks that all arrays have one entry per row, and that sequence and output indices are in
    /// range.
    pub fn check(&self, op: &'static str) -> Result<(), OpError> {
        let (rows, groups) = (self.rows(), self.groups());
        let sequences = self.tables.len() / groups;
        for (what, found, expected) in [
            ("number of positions", self.positions.len(), rows),
            ("number of sequences", self.sequences.len(), rows),
            ("number of kv slots", self.kv_slots.len(), rows * groups),
            ("number of block tables", self.tables.len(), sequences * groups),
        ] {
            if found != expected {
                return Err(OpError::Shape { op, what, found, expected });
            }
        }
        for (what, indices, len) in
            [("sequence", self.sequences, sequences), ("output row", self.outputs, rows)]
        {
            if let Some(&index) = indices.iter().find(|&&index| index as usize >= len) {
                return Err(OpError::Index { op, what, index: index as usize, len });
            }
        }
        Ok(())
    }
}
