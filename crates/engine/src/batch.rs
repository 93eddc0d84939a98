//! The row data of one step, made from a plan: what [`ops::Step`] borrows. Buffers are kept between steps.

use crate::pool::BlockId;
use crate::scheduler::{Chunk, ChunkOutputs, Scheduler, Slot};
use crate::sequence::Sequence;
use ops::Step;

#[derive(Debug, Default)]
pub(crate) struct Batch {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    sequences: Vec<u32>,
    kv_slots: Vec<u32>,
    outputs: Vec<u32>,
    /// Whose rows the outputs are, in the same order: slot and position of the row.
    wanted: Vec<(Slot, usize)>,
}

impl Batch {
    /// Fills the batch from the scheduler's plan.
    pub(crate) fn fill(&mut self, scheduler: &Scheduler, block_tokens: usize) {
        self.tokens.clear();
        self.positions.clear();
        self.sequences.clear();
        self.kv_slots.clear();
        self.outputs.clear();
        self.wanted.clear();
        for (index, chunk) in scheduler.plan().chunks.iter().enumerate() {
            if let Some(sequence) = scheduler.sequence(chunk.slot) {
                self.append(index, chunk, sequence, block_tokens);
            }
        }
    }

    fn append(&mut self, index: usize, chunk: &Chunk, sequence: &Sequence, block_tokens: usize) {
        let end = chunk.start + chunk.rows;
        self.tokens.extend_from_slice(&sequence.tokens()[chunk.start..end]);
        for position in chunk.start..end {
            let block = sequence.table()[position / block_tokens];
            if chunk.outputs == ChunkOutputs::All
                || (chunk.outputs == ChunkOutputs::Last && position + 1 == end)
            {
                self.outputs.push(self.positions.len() as u32);
                self.wanted.push((chunk.slot, position));
            }
            self.positions.push(position as u32);
            self.sequences.push(index as u32);
            self.kv_slots.push(block * block_tokens as u32 + (position % block_tokens) as u32);
        }
    }

    /// `tables` are those of the plan's sequences, in order.
    pub(crate) fn step<'a>(&'a self, tables: &'a [&'a [BlockId]]) -> Step<'a> {
        Step {
            tokens: &self.tokens,
            positions: &self.positions,
            sequences: &self.sequences,
            kv_slots: &self.kv_slots,
            tables,
            outputs: &self.outputs,
        }
    }

    /// Slot and position of each output row.
    pub(crate) fn wanted(&self) -> &[(Slot, usize)] {
        &self.wanted
    }
}
