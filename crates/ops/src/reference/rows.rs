//! The row data of the current step, copied and checked once, so that the ops may index without looking back.

use crate::{OpError, Step};

#[derive(Debug, Default)]
pub(super) struct Rows {
    pub(super) tokens: Vec<u32>,
    pub(super) positions: Vec<u32>,
    pub(super) kv_slots: Vec<u32>,
    pub(super) outputs: Vec<u32>,
    sequences: Vec<u32>,
    tables: Vec<Vec<u32>>,
}

impl Rows {
    pub(super) fn new(step: &Step<'_>) -> Result<Self, OpError> {
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
        Ok(Self {
            tokens: step.tokens.to_vec(),
            positions: step.positions.to_vec(),
            kv_slots: step.kv_slots.to_vec(),
            outputs: step.outputs.to_vec(),
            sequences: step.sequences.to_vec(),
            tables: step.tables.iter().map(|table| table.to_vec()).collect(),
        })
    }

    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    pub(super) fn check(&self, op: &'static str, rows: usize) -> Result<(), OpError> {
        if rows == self.len() {
            return Ok(());
        }
        Err(OpError::Shape {
            op,
            what: "number of rows against the step's",
            found: rows,
            expected: self.len(),
        })
    }

    /// The KV slots of positions `0..=position` of row `r`'s sequence, in that order.
    pub(super) fn history(
        &self,
        op: &'static str,
        r: usize,
        block_tokens: usize,
    ) -> Result<Vec<usize>, OpError> {
        let table = &self.tables[self.sequences[r] as usize];
        (0..=self.positions[r] as usize)
            .map(|position| {
                let index = position / block_tokens;
                let block = table.get(index).copied().ok_or(OpError::Index {
                    op,
                    what: "entry of the block table",
                    index,
                    len: table.len(),
                })?;
                Ok(block as usize * block_tokens + position % block_tokens)
            })
            .collect()
    }
}
