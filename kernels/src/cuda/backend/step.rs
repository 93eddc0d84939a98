// SPDX-License-Identifier: Apache-2.0

//! The rows of the current step. They are checked once, kept for the checks of the ops, and
//! uploaded to the device.

use std::ops::Range;

use ops::{DRAWN_TOKEN, OpError, Step};

use super::block_set::BlockSet;
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

pub(super) struct StepRows {
    pub(super) positions: Vec<u32>,
    /// Where the block ids of each row begin in `blocks`.
    pub(super) table_starts: Vec<u32>,
    kv_slots: Vec<u32>,
    /// The block ids of all sequences, one sequence after the other.
    pub(super) blocks: Vec<u32>,
    /// The range of each sequence's block ids in `blocks`.
    tables: Vec<Range<usize>>,
    /// The number of keys that the rows of each sequence attend to.
    keys: Vec<usize>,
    token_max: u32,
    /// One more than the highest output whose drawn token is a token of this step.
    drawn_end: usize,
    slot_max: u32,
    outputs: usize,
    /// The blocks of a cache that the rows read, if they were asked for.
    read: Option<(KvBlocks, BlockSet)>,
    upload: StepUpload,
}

impl StepRows {
    pub(super) fn new(stream: &Stream) -> Result<Self, CudaError> {
        Ok(Self {
            positions: Vec::new(),
            table_starts: Vec::new(),
            kv_slots: Vec::new(),
            blocks: Vec::new(),
            tables: Vec::new(),
            keys: Vec::new(),
            token_max: 0,
            drawn_end: 0,
            slot_max: 0,
            outputs: 0,
            read: None,
            upload: StepUpload::new(stream)?,
        })
    }

    pub(super) fn set(&mut self, recorder: &mut Recorder, step: &Step<'_>) -> Result<(), OpError> {
        const OP: &str = "begin";
        let rows = step.rows();
        for (what, found) in [
            ("number of positions", step.positions.len()),
            ("number of sequences", step.sequences.len()),
            ("number of kv slots", step.kv_slots.len()),
        ] {
            if found != rows {
                return Err(OpError::Shape { op: OP, what, found, expected: rows });
            }
        }
        for (what, indices, len) in
            [("sequence", step.sequences, step.tables.len()), ("output row", step.outputs, rows)]
        {
            if let Some(&index) = indices.iter().find(|&&index| index as usize >= len) {
                return Err(OpError::Index { op: OP, what, index: index as usize, len });
            }
        }
        self.read = None;
        self.blocks.clear();
        self.tables.clear();
        for table in step.tables {
            let start = self.blocks.len();
            self.blocks.extend_from_slice(table);
            self.tables.push(start..self.blocks.len());
        }
        self.keys.clear();
        self.keys.resize(step.tables.len(), 0);
        self.table_starts.clear();
        for (&sequence, &position) in step.sequences.iter().zip(step.positions) {
            let sequence = sequence as usize;
            self.table_starts.push(self.tables[sequence].start as u32);
            self.keys[sequence] = self.keys[sequence].max(position as usize + 1);
        }
        self.positions.clear();
        self.positions.extend_from_slice(step.positions);
        self.kv_slots.clear();
        self.kv_slots.extend_from_slice(step.kv_slots);
        let is_drawn = |token: &u32| token & DRAWN_TOKEN != 0;
        self.token_max = step.tokens.iter().copied().filter(|token| !is_drawn(token)).max().unwrap_or(0);
        let drawn = step.tokens.iter().filter(|token| is_drawn(token));
        self.drawn_end = drawn.map(|token| (token & !DRAWN_TOKEN) as usize + 1).max().unwrap_or(0);
        self.slot_max = step.kv_slots.iter().copied().max().unwrap_or(0);
        self.outputs = step.outputs.len();

        // The sections are written in this order. The tables come last, because their length
        // changes most.
        let words = 4 * rows + step.outputs.len() + self.blocks.len();
        let sections: [&[u32]; 6] =
            [step.tokens, step.positions, step.kv_slots, &self.table_starts, step.outputs, &self.blocks];
        let fill = |mut to: &mut [u32]| {
            for section in sections {
                let (here, rest) = to.split_at_mut(section.len());
                here.copy_from_slice(section);
                to = rest;
            }
        };
        self.upload.send(recorder, words, fill).map_err(|error| device_error(OP)(error))
    }

    pub(super) fn len(&self) -> usize {
        self.positions.len()
    }

    pub(super) fn outputs(&self) -> usize {
        self.outputs
    }

    pub(super) fn kv_slots(&self) -> &[u32] {
        &self.kv_slots
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

    /// Returns the blocks that the rows of this step read from a cache.
    pub(super) fn blocks_read(&mut self, op: &'static str, of: KvBlocks) -> Result<&BlockSet, OpError> {
        let read = match self.read.take() {
            Some((known, read)) if known == of => read,
            _ => self.collect_blocks_read(op, of)?,
        };
        Ok(&self.read.insert((of, read)).1)
    }

    /// The blocks that the rows of this step write in a cache with blocks of `block_tokens`.
    pub(super) fn blocks_written(&self, block_tokens: usize) -> BlockSet {
        let mut written = BlockSet::default();
        self.kv_slots.iter().for_each(|&slot| written.insert(slot as usize / block_tokens));
        written
    }

    fn collect_blocks_read(&self, op: &'static str, of: KvBlocks) -> Result<BlockSet, OpError> {
        let mut read = BlockSet::default();
        for (table, &keys) in self.tables.iter().zip(&self.keys) {
            let (index, len) = (keys.div_ceil(of.tokens), table.len());
            if index > len {
                return Err(OpError::Index { op, what: "entry of the block table", index: index - 1, len });
            }
            for &block in &self.blocks[table.start..][..index] {
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

    pub(super) fn slots_on_device(&self) -> WordRange {
        self.section(2 * self.len(), self.len())
    }

    pub(super) fn table_starts_on_device(&self) -> WordRange {
        self.section(3 * self.len(), self.len())
    }

    /// A range of the step's outputs. There are [`Self::outputs`] of them.
    pub(super) fn outputs_on_device(&self, run: Range<usize>) -> WordRange {
        self.section(4 * self.len() + run.start, run.len())
    }

    /// Returns only the address, because the length of the tables is not part of a launch.
    pub(super) fn tables_on_device(&self) -> u64 {
        self.section(4 * self.len() + self.outputs, 0).address
    }

    /// Bytes of device memory.
    pub(super) fn bytes(&self) -> u64 {
        self.upload.bytes()
    }

    fn section(&self, start: usize, len: usize) -> WordRange {
        WordRange { address: self.upload.address() + (start * size_of::<u32>()) as u64, len }
    }
}
