// SPDX-License-Identifier: Apache-2.0

//! [`ReferenceStep`]: the row data of the current step, copied and checked once so that ops can
//! index it.

use crate::{AttentionSpan, OpError, Step};

#[derive(Debug, Default)]
pub(super) struct ReferenceStep {
    pub(super) tokens: Vec<u32>,
    pub(super) positions: Vec<u32>,
    pub(super) outputs: Vec<u32>,
    groups: usize,
    kv_slots: Vec<u32>,
    sequences: Vec<u32>,
    tables: Vec<Vec<u32>>,
}

impl ReferenceStep {
    pub(super) fn new(step: &Step<'_>) -> Result<Self, OpError> {
        step.check("begin")?;
        Ok(Self {
            tokens: step.tokens.to_vec(),
            positions: step.positions.to_vec(),
            outputs: step.outputs.to_vec(),
            groups: step.groups(),
            kv_slots: step.kv_slots.to_vec(),
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

    /// Checks that the step has block tables for so many KV cache groups.
    pub(super) fn check_groups(&self, op: &'static str, groups: usize) -> Result<(), OpError> {
        if groups == self.groups || self.len() == 0 {
            return Ok(());
        }
        Err(OpError::Shape { op, what: "number of the step's groups", found: self.groups, expected: groups })
    }

    /// KV slot of row `r` in `group`.
    pub(super) fn kv_slot(&self, r: usize, group: usize) -> usize {
        self.kv_slots[r * self.groups + group] as usize
    }

    /// KV slots in `group` of the positions that row `r` attends to, in order of position.
    pub(super) fn history(
        &self,
        op: &'static str,
        r: usize,
        group: usize,
        span: AttentionSpan,
        block_tokens: usize,
    ) -> Result<Vec<usize>, OpError> {
        let table = &self.tables[self.sequences[r] as usize * self.groups + group];
        let position = self.positions[r] as usize;
        (span.first_position(position)..=position)
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
