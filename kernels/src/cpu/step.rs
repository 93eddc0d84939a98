//! The row data of the current step, copied and checked once, so that the ops may index without looking back.

use ops::{OpError, Step};

#[derive(Debug, Default)]
pub(super) struct Rows {
    pub(super) tokens: Vec<u32>,
    pub(super) positions: Vec<u32>,
    pub(super) kv_slots: Vec<u32>,
    pub(super) outputs: Vec<u32>,
    pub(super) sequences: Vec<u32>,
    /// Block ids of all sequences, one after the other.
    blocks: Vec<u32>,
    /// Where each sequence's block ids end.
    ends: Vec<usize>,
}

impl Rows {
    pub(super) fn set(&mut self, step: &Step<'_>) -> Result<(), OpError> {
        const OP: &str = "begin";
        let expected = step.rows();
        for (what, found) in [
            ("number of positions", step.positions.len()),
            ("number of sequences", step.sequences.len()),
            ("number of kv slots", step.kv_slots.len()),
        ] {
            if found != expected {
                return Err(OpError::Shape { op: OP, what, found, expected });
            }
        }
        for (what, indices, len) in
            [("sequence", step.sequences, step.tables.len()), ("output row", step.outputs, step.rows())]
        {
            if let Some(&index) = indices.iter().find(|&&index| index as usize >= len) {
                return Err(OpError::Index { op: OP, what, index: index as usize, len });
            }
        }
        let copy = |to: &mut Vec<u32>, from: &[u32]| {
            to.clear();
            to.extend_from_slice(from);
        };
        copy(&mut self.tokens, step.tokens);
        copy(&mut self.positions, step.positions);
        copy(&mut self.kv_slots, step.kv_slots);
        copy(&mut self.outputs, step.outputs);
        copy(&mut self.sequences, step.sequences);
        self.blocks.clear();
        self.ends.clear();
        for table in step.tables {
            self.blocks.extend_from_slice(table);
            self.ends.push(self.blocks.len());
        }
        Ok(())
    }

    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    pub(super) fn check(&self, op: &'static str, rows: usize) -> Result<(), OpError> {
        if rows == self.len() {
            return Ok(());
        }
        let what = "number of rows against the step's";
        Err(OpError::Shape { op, what, found: rows, expected: self.len() })
    }

    /// Block ids of row `r`'s sequence.
    pub(super) fn table(&self, r: usize) -> &[u32] {
        let sequence = self.sequences[r] as usize;
        let from = if sequence == 0 { 0 } else { self.ends[sequence - 1] };
        &self.blocks[from..self.ends[sequence]]
    }
}
