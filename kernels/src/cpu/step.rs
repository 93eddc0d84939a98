//! The row data of the current step, copied and checked once, so that the ops may index without looking back.

use ops::{OpError, Step};

/// Entries by which block tables are ordered. Whoever shares a block shares, as a rule, those before it; so few tell how
/// much of their past two sequences share.
const PROBES: [usize; 4] = [0, 16, 64, 256];

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
    /// All rows, those of one sequence together and ascending, and beside them those of sequences that share blocks with it.
    pub(super) order: Vec<u32>,
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
        self.order.clear();
        self.order.extend(0..expected as u32);
        if let [_, _, ..] = step.tables {
            let mut place: Vec<u32> = (0..step.tables.len() as u32).collect();
            place.sort_by_key(|&sequence| PROBES.map(|entry| step.tables[sequence as usize].get(entry)));
            let mut rank = vec![0; place.len()];
            place.iter().zip(0_u32..).for_each(|(&sequence, at)| rank[sequence as usize] = at);
            self.order.sort_by_key(|&row| rank[step.sequences[row as usize] as usize]);
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
