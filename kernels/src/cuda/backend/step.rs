// SPDX-License-Identifier: Apache-2.0

//! The rows of the current step. They are checked once, kept for the checks of the ops, and
//! uploaded to the device.

use std::ops::Range;

use ops::{AttentionSpan, DRAWN_TOKEN, OpError, Step};

use super::block_set::BlockSet;
use super::plan::launch_bound;
use super::recorder::Recorder;
use super::upload::StepUpload;
use crate::cuda::error::device_error;
use crate::cuda::{CudaError, Stream};

/// A range of u32 words of a step in device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct WordRange {
    pub(super) address: u64,
    pub(super) len: usize,
}

/// The blocks of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KvBlocks {
    pub(super) count: usize,
    /// Tokens of a block.
    pub(super) tokens: usize,
}

/// The rows of a step. Each KV cache group has the block tables of all sequences, one sequence
/// after the other. A sequence's table begins at the same place in each group's, so one attention
/// plan serves several groups.
pub(super) struct StepRows {
    pub(super) positions: Vec<u32>,
    /// Where the block ids of each row begin among those of a group.
    pub(super) table_starts: Vec<u32>,
    groups: usize,
    /// The slots of all rows, one group after the other.
    kv_slots: Vec<u32>,
    /// The block ids of all sequences, one group after the other.
    blocks: Vec<u32>,
    /// The number of block ids of a group, with padding.
    group_blocks: usize,
    /// The number of block ids of each sequence in each group: entry `sequence * groups + group`.
    table_lens: Vec<usize>,
    sequences: Vec<SequenceRows>,
    token_max: u32,
    /// One more than the highest output whose drawn token is a token of this step.
    drawn_end: usize,
    slot_max: u32,
    outputs: usize,
    /// The blocks that the rows read, for the layers that asked.
    read: Vec<(BlocksReadKey, BlockSet)>,
    upload: StepUpload,
}

/// A sequence of a step.
struct SequenceRows {
    /// Where its block ids begin among those of a group.
    table_start: usize,
    /// The lowest position of a row. `usize::MAX` without rows.
    first: usize,
    /// One beyond the highest position of a row. 0 without rows.
    end: usize,
}

/// What decides which blocks the rows of a step read.
type BlocksReadKey = (KvBlocks, usize, AttentionSpan);

impl StepRows {
    pub(super) fn new(stream: &Stream) -> Result<Self, CudaError> {
        Ok(Self {
            positions: Vec::new(),
            table_starts: Vec::new(),
            groups: 1,
            kv_slots: Vec::new(),
            blocks: Vec::new(),
            group_blocks: 0,
            table_lens: Vec::new(),
            sequences: Vec::new(),
            token_max: 0,
            drawn_end: 0,
            slot_max: 0,
            outputs: 0,
            read: Vec::new(),
            upload: StepUpload::new(stream)?,
        })
    }

    pub(super) fn set(&mut self, recorder: &mut Recorder, step: &Step<'_>) -> Result<(), OpError> {
        const OP: &str = "begin";
        step.check(OP)?;
        self.read.clear();
        self.collect_tables(step);
        self.table_starts.clear();
        for (&sequence, &position) in step.sequences.iter().zip(step.positions) {
            let SequenceRows { table_start, first, end } = &mut self.sequences[sequence as usize];
            let position = position as usize;
            self.table_starts.push(*table_start as u32);
            *first = position.min(*first);
            *end = (position + 1).max(*end);
        }
        self.positions.clear();
        self.positions.extend_from_slice(step.positions);
        self.kv_slots.clear();
        for group in 0..self.groups {
            self.kv_slots.extend(step.kv_slots.iter().skip(group).step_by(self.groups));
        }
        let is_drawn = |token: &u32| token & DRAWN_TOKEN != 0;
        self.token_max = step.tokens.iter().copied().filter(|token| !is_drawn(token)).max().unwrap_or(0);
        let drawn = step.tokens.iter().filter(|token| is_drawn(token));
        self.drawn_end = drawn.map(|token| (token & !DRAWN_TOKEN) as usize + 1).max().unwrap_or(0);
        self.slot_max = step.kv_slots.iter().copied().max().unwrap_or(0);
        self.outputs = step.outputs.len();

        // The sections are written in this order. The tables come last, because their length
        // changes most.
        let words = self.words_before_outputs() + step.outputs.len() + self.blocks.len();
        let sections: [&[u32]; 6] =
            [step.tokens, step.positions, &self.table_starts, &self.kv_slots, step.outputs, &self.blocks];
        let fill = |mut to: &mut [u32]| {
            for section in sections {
                let (here, rest) = to.split_at_mut(section.len());
                here.copy_from_slice(section);
                to = rest;
            }
        };
        self.upload.send(recorder, words, fill).map_err(|error| device_error(OP)(error))
    }

    fn collect_tables(&mut self, step: &Step<'_>) {
        self.groups = step.groups();
        self.table_lens.clear();
        self.table_lens.extend(step.tables.iter().map(|table| table.len()));
        self.sequences.clear();
        let mut blocks = 0;
        for lens in self.table_lens.chunks(self.groups) {
            self.sequences.push(SequenceRows { table_start: blocks, first: usize::MAX, end: 0 });
            blocks += lens.iter().copied().max().unwrap_or(0);
        }
        // The tables of the second group begin behind those of the first. That place must not move
        // with each new block, since it is part of launches.
        self.group_blocks = if self.groups > 1 { launch_bound(blocks) } else { blocks };
        self.blocks.clear();
        self.blocks.resize(self.groups * self.group_blocks, 0);
        for (tables, sequence) in step.tables.chunks(self.groups).zip(&self.sequences) {
            for (group, table) in tables.iter().enumerate() {
                let start = group * self.group_blocks + sequence.table_start;
                self.blocks[start..start + table.len()].copy_from_slice(table);
            }
        }
    }

    pub(super) fn len(&self) -> usize {
        self.positions.len()
    }

    pub(super) fn outputs(&self) -> usize {
        self.outputs
    }

    /// Checks that the step has block tables for so many KV cache groups.
    pub(super) fn check_groups(&self, op: &'static str, groups: usize) -> Result<(), OpError> {
        if groups == self.groups || self.len() == 0 {
            return Ok(());
        }
        Err(OpError::Shape { op, what: "number of the step's groups", found: self.groups, expected: groups })
    }

    /// The block ids of all sequences in a group.
    pub(super) fn blocks(&self, group: usize) -> &[u32] {
        &self.blocks[group * self.group_blocks..][..self.group_blocks]
    }

    pub(super) fn kv_slots(&self, group: usize) -> &[u32] {
        &self.kv_slots[group * self.len()..][..self.len()]
    }

    pub(super) fn slot_max(&self) -> u32 {
        self.slot_max
    }

    pub(super) fn token_max(&self) -> u32 {
        self.token_max
    }

    pub(super) fn drawn_end(&self) -> usize {
        self.drawn_end
    }

    pub(super) fn check(&self, op: &'static str, rows: usize) -> Result<(), OpError> {
        if rows == self.len() {
            return Ok(());
        }
        let expected = self.len();
        Err(OpError::Shape { op, what: "number of rows against the step's", found: rows, expected })
    }

    /// Returns the blocks that the rows of this step read from a cache, in layers of one group.
    pub(super) fn blocks_read(
        &mut self,
        op: &'static str,
        of: KvBlocks,
        group: usize,
        span: AttentionSpan,
    ) -> Result<&BlockSet, OpError> {
        let key = (of, group, span);
        let at = match self.read.iter().position(|(known, _)| *known == key) {
            Some(at) => at,
            None => {
                self.read.push((key, self.collect_blocks_read(op, key)?));
                self.read.len() - 1
            }
        };
        Ok(&self.read[at].1)
    }

    /// The blocks that the rows of this step write in a cache with blocks of `block_tokens`.
    pub(super) fn blocks_written(&self, block_tokens: usize) -> BlockSet {
        let mut written = BlockSet::default();
        self.kv_slots.iter().for_each(|&slot| written.insert(slot as usize / block_tokens));
        written
    }

    fn collect_blocks_read(&self, op: &'static str, key: BlocksReadKey) -> Result<BlockSet, OpError> {
        let (of, group, span) = key;
        let mut read = BlockSet::default();
        for (sequence, lens) in self.sequences.iter().zip(self.table_lens.chunks(self.groups)) {
            let SequenceRows { table_start, first, end } = *sequence;
            if end == 0 {
                continue;
            }
            let (first, end) = (span.first_position(first) / of.tokens, end.div_ceil(of.tokens));
            let len = lens[group];
            if end > len {
                return Err(OpError::Index { op, what: "entry of the block table", index: end - 1, len });
            }
            for &block in &self.blocks(group)[table_start..][first..end] {
                if block as usize >= of.count {
                    return Err(OpError::Index { op, what: "block", index: block as usize, len: of.count });
                }
                read.insert(block as usize);
            }
        }
        Ok(read)
    }

    pub(super) fn tokens_on_device(&self) -> WordRange {
        self.section(0, self.len())
    }

    pub(super) fn positions_on_device(&self) -> WordRange {
        self.section(self.len(), self.len())
    }

    pub(super) fn table_starts_on_device(&self) -> WordRange {
        self.section(2 * self.len(), self.len())
    }

    pub(super) fn slots_on_device(&self, group: usize) -> WordRange {
        self.section((3 + group) * self.len(), self.len())
    }

    /// A range of the step's outputs. There are [`Self::outputs`] of them.
    pub(super) fn outputs_on_device(&self, run: Range<usize>) -> WordRange {
        self.section(self.words_before_outputs() + run.start, run.len())
    }

    /// Returns only the address, because the length of the tables is not part of a launch.
    pub(super) fn tables_on_device(&self, group: usize) -> u64 {
        self.section(self.words_before_outputs() + self.outputs + group * self.group_blocks, 0).address
    }

    fn words_before_outputs(&self) -> usize {
        (3 + self.groups) * self.len()
    }

    /// Bytes of device memory.
    pub(super) fn bytes(&self) -> u64 {
        self.upload.bytes()
    }

    fn section(&self, start: usize, len: usize) -> WordRange {
        WordRange { address: self.upload.address() + (start * size_of::<u32>()) as u64, len }
    }
}
