// SPDX-License-Identifier: Apache-2.0

//! [`CpuStep`]: the row data of the current step, copied and checked once so that ops can index
//! it.

use ops::{OpError, Step};

/// Indices of the block table entries by which sequences are sorted. Sequences that share a block
/// usually share all earlier blocks. A few entries therefore show how long their common prefix is.
const PROBES: [usize; 4] = [0, 16, 64, 256];

#[derive(Debug, Default)]
pub(super) struct CpuStep {
    pub(super) tokens: Vec<u32>,
    pub(super) positions: Vec<u32>,
    /// The KV slots of group 0, then those of group 1, and so on.
    kv_slots: Vec<u32>,
    pub(super) outputs: Vec<u32>,
    pub(super) sequences: Vec<u32>,
    groups: usize,
    /// Block ids of all sequences in all groups, one table after the other.
    blocks: Vec<u32>,
    /// Where each table's block ids end.
    ends: Vec<usize>,
    /// All rows in the order of processing. Rows of one sequence are adjacent and ascending; next
    /// to them are rows of sequences with shared blocks.
    pub(super) order: Vec<u32>,
}

impl CpuStep {
    pub(super) fn set(&mut self, step: &Step<'_>) -> Result<(), OpError> {
        step.check("begin")?;
        let (rows, groups) = (step.rows(), step.groups());
        let copy = |to: &mut Vec<u32>, from: &[u32]| {
            to.clear();
            to.extend_from_slice(from);
        };
        copy(&mut self.tokens, step.tokens);
        copy(&mut self.positions, step.positions);
        self.groups = groups;
        if groups == 1 {
            copy(&mut self.kv_slots, step.kv_slots);
        } else {
            self.kv_slots.clear();
            for group in 0..groups {
                self.kv_slots.extend(step.kv_slots.iter().skip(group).step_by(groups));
            }
        }
        copy(&mut self.outputs, step.outputs);
        copy(&mut self.sequences, step.sequences);
        self.blocks.clear();
        self.ends.clear();
        for table in step.tables {
            self.blocks.extend_from_slice(table);
            self.ends.push(self.blocks.len());
        }
        self.order.clear();
        self.order.extend(0..rows as u32);
        let sequences = step.tables.len() / groups;
        if sequences > 1 {
            let probe =
                |sequence: u32| PROBES.map(|entry| step.tables[sequence as usize * groups].get(entry));
            let mut place: Vec<u32> = (0..sequences as u32).collect();
            place.sort_by_key(|&sequence| probe(sequence));
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

    /// Checks that the step has block tables for so many KV cache groups.
    pub(super) fn check_groups(&self, op: &'static str, groups: usize) -> Result<(), OpError> {
        if groups == self.groups || self.len() == 0 {
            return Ok(());
        }
        Err(OpError::Shape { op, what: "number of the step's groups", found: self.groups, expected: groups })
    }

    /// KV slots of the rows in `group`.
    pub(super) fn kv_slots(&self, group: usize) -> &[u32] {
        &self.kv_slots[group * self.len()..][..self.len()]
    }

    /// Block ids of row `r`'s sequence in `group`.
    pub(super) fn table(&self, r: usize, group: usize) -> &[u32] {
        let table = self.sequences[r] as usize * self.groups + group;
        let from = if table == 0 { 0 } else { self.ends[table - 1] };
        &self.blocks[from..self.ends[table]]
    }
}
