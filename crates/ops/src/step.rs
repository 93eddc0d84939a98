//! One step of the engine: a ragged batch of rows, each one token of some sequence.

use crate::OpError;

/// Row data of a step. Decode rows and chunks of prompts stand side by side; rows of one sequence are in position order.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// Token id of each row.
    pub tokens: &'a [u32],
    /// Absolute position of each row in its sequence.
    pub positions: &'a [u32],
    /// Index of each row's sequence.
    pub sequences: &'a [u32],
    /// Where each row's key and value go, in each group of layers ([`crate::KvLayout::groups`]): of row `r` in group `g`,
    /// entry `r * groups + g` is `block * block_tokens + offset`.
    pub kv_slots: &'a [u32],
    /// Block ids of each sequence, in each group: entry `i` of table `sequence * groups + g` holds positions
    /// `i * block_tokens ..`. Blocks that no row of the step sees there may be any.
    pub tables: &'a [&'a [u32]],
    /// Rows whose logits are wanted, ascending.
    pub outputs: &'a [u32],
}

impl Step<'_> {
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Groups of layers that have tables of their own. A step without rows has no use for any.
    pub fn groups(&self) -> usize {
        self.kv_slots.len().checked_div(self.rows()).unwrap_or(1).max(1)
    }

    /// That there is one of everything for each row, and that sequences and outputs are among those there are.
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
