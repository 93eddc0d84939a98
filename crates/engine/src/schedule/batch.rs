// SPDX-License-Identifier: Apache-2.0

//! The rows of one step in the form that [`ops::Step`] borrows, built from a step plan. The buffers
//! are kept between steps.

use crate::kv::block_key::BlockId;
use crate::schedule::scheduler::Scheduler;
use crate::schedule::sequence::Sequence;
use crate::schedule::sequence_id::SequenceId;
use crate::schedule::step_plan::{ChunkOutputs, ScheduledChunk};
use ops::Step;

#[derive(Debug, Default)]
pub(crate) struct Batch {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    sequences: Vec<u32>,
    /// KV slots of each row: one for each KV cache group.
    kv_slots: Vec<u32>,
    outputs: Vec<u32>,
    /// The sequence and position of each output, in the same order.
    output_rows: Vec<OutputRow>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct OutputRow {
    pub(crate) sequence_id: SequenceId,
    pub(crate) position: usize,
    /// The draft token of the row. The row is valid only if its sequence then has this token at
    /// `position`.
    pub(crate) drafted: Option<u32>,
}

impl Batch {
    /// Fills the batch from the scheduler's plan. `drafts` yields the draft tokens of each chunk
    /// that has some, in order.
    pub(crate) fn fill<'a>(
        &mut self,
        scheduler: &Scheduler,
        block_tokens: usize,
        mut drafts: impl Iterator<Item = &'a [u32]>,
    ) {
        self.tokens.clear();
        self.positions.clear();
        self.sequences.clear();
        self.kv_slots.clear();
        self.outputs.clear();
        self.output_rows.clear();
        for (index, chunk) in scheduler.plan().chunks.iter().enumerate() {
            let Some(sequence) = scheduler.sequence(chunk.sequence_id) else {
                panic!("{:?} is in the plan but was removed", chunk.sequence_id)
            };
            let drafts = if chunk.drafts > 0 { drafts.next().unwrap_or_default() } else { &[] };
            self.append(index, chunk, sequence, block_tokens, drafts);
        }
    }

    fn append(
        &mut self,
        index: usize,
        chunk: &ScheduledChunk,
        sequence: &Sequence,
        block_tokens: usize,
        drafts: &[u32],
    ) {
        assert_eq!(chunk.drafts, drafts.len(), "the plan has a row for each draft token");
        let end = chunk.start + chunk.rows;
        self.tokens.extend_from_slice(&sequence.tokens()[chunk.start..end]);
        self.tokens.extend_from_slice(drafts);
        for position in chunk.start..end + drafts.len() {
            let drafted = position.checked_sub(end).map(|draft| drafts[draft]);
            if drafted.is_some()
                || chunk.outputs == ChunkOutputs::All
                || (chunk.outputs == ChunkOutputs::Last && position + 1 == end)
            {
                self.outputs.push(self.positions.len() as u32);
                self.output_rows.push(OutputRow { sequence_id: chunk.sequence_id, position, drafted });
            }
            self.positions.push(position as u32);
            self.sequences.push(index as u32);
            let (entry, place) = (position / block_tokens, (position % block_tokens) as u32);
            self.kv_slots
                .extend(sequence.blocks().tables().map(|table| table[entry] * block_tokens as u32 + place));
        }
    }

    /// `tables` has the block tables of the plan's sequences in order, for each sequence those of
    /// all KV cache groups.
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

    /// The sequence and position of each output, in order.
    pub(crate) fn output_rows(&self) -> &[OutputRow] {
        &self.output_rows
    }
}
