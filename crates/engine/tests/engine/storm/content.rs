// SPDX-License-Identifier: Apache-2.0

//! The content of every slot of every block, as a model would leave it, and what the rows of a step
//! read.

use super::{Storm, mix, next_key};
use crate::kv::block_key::{BlockId, NULL_BLOCK};
use crate::kv::group::KvGroupKind;
use crate::schedule::sequence_id::SequenceId;
use crate::schedule::step_plan::ScheduledChunk;
use std::collections::HashMap;
use std::ops::Range;

impl Storm {
    /// Applies the step to the cells as a model does to the KV cache: copies, then all keys, then
    /// all reads. The storm reads all states before it writes any, since sequences run side by
    /// side.
    pub(super) fn compute(&mut self) {
        let bt = self.limits.block_tokens;
        for copy in &self.scheduler.plan().copies {
            let (from, to) = (copy.from as usize * bt, copy.to as usize * bt);
            self.cells.copy_within(from..from + bt, to);
        }
        let mut writers: HashMap<BlockId, (SequenceId, usize, usize)> = HashMap::new();
        for group in 0..self.groups.len() {
            if self.groups[group] != KvGroupKind::State {
                self.write_keys(group, &mut writers);
            }
        }
        for group in 0..self.groups.len() {
            self.read(group);
        }
        for group in 0..self.groups.len() {
            if self.groups[group] == KvGroupKind::State {
                self.write_states(group, &mut writers);
            }
        }
        self.check_sharing(&writers);
    }

    /// Simulates a failed step: the slots of its rows get wrong content.
    pub(super) fn spoil(&mut self) {
        let bt = self.limits.block_tokens;
        for &ScheduledChunk { sequence_id, start, rows, drafts, .. } in &self.scheduler.plan().chunks {
            let blocks = self.scheduler.sequence(sequence_id).unwrap().blocks();
            for group in 0..self.groups.len() {
                for position in start..start + rows + drafts {
                    let block = blocks.group(group)[position / bt];
                    if block != NULL_BLOCK {
                        self.cells[block as usize * bt + position % bt] = mix(position as u64 ^ 1);
                    }
                }
            }
        }
    }

    fn write_keys(&mut self, group: usize, writers: &mut HashMap<BlockId, (SequenceId, usize, usize)>) {
        let bt = self.limits.block_tokens;
        for (&ScheduledChunk { sequence_id, start, rows, .. }, drafts) in
            self.scheduler.plan().chunks.iter().zip(&self.drafts)
        {
            let table = self.scheduler.sequence(sequence_id).unwrap().blocks().group(group);
            let own = &self.live[&sequence_id].keys[start..start + rows];
            let last = own[rows - 1];
            let guessed = drafts.iter().scan(last, |key, &draft| {
                *key = next_key(*key, draft);
                Some(*key)
            });
            for (position, key) in (start..).zip(own.iter().copied().chain(guessed)) {
                let block = table[position / bt];
                assert_ne!(block, NULL_BLOCK, "a key is written to the null block");
                let writer = *writers.entry(block).or_insert((sequence_id, group, position / bt));
                assert_eq!(writer, (sequence_id, group, position / bt), "two sequences write block {block}");
                self.cells[block as usize * bt + position % bt] = key ^ group as u64;
            }
        }
    }

    fn read(&self, group: usize) {
        let bt = self.limits.block_tokens;
        for &ScheduledChunk { sequence_id, start, rows, .. } in &self.scheduler.plan().chunks {
            let table = self.scheduler.sequence(sequence_id).unwrap().blocks().group(group);
            let keys = &self.live[&sequence_id].keys;
            for position in reads(self.groups[group], start, rows) {
                let block = table[position / bt] as usize;
                let place = if self.groups[group] == KvGroupKind::State { 0 } else { position % bt };
                let found = self.cells[block * bt + place];
                assert_eq!(found, keys[position] ^ group as u64, "what is read at {position} is not its own");
            }
        }
    }

    fn write_states(&mut self, group: usize, writers: &mut HashMap<BlockId, (SequenceId, usize, usize)>) {
        let bt = self.limits.block_tokens;
        for &ScheduledChunk { sequence_id, start, rows, .. } in &self.scheduler.plan().chunks {
            let last = start + rows - 1;
            let block = self.scheduler.sequence(sequence_id).unwrap().blocks().group(group)[last / bt];
            assert_ne!(block, NULL_BLOCK, "a state is written to the null block");
            assert!(
                writers.insert(block, (sequence_id, group, last / bt)).is_none(),
                "two write block {block}"
            );
            self.cells[block as usize * bt] = self.live[&sequence_id].keys[last] ^ group as u64;
        }
    }

    /// Checks the users of each written block. Another sequence may use the block only if it found
    /// the block's content in the prefix cache in this step. Then both sequences have the same
    /// tokens up to the block's end.
    fn check_sharing(&mut self, writers: &HashMap<BlockId, (SequenceId, usize, usize)>) {
        let bt = self.limits.block_tokens;
        for (&other, theirs) in &self.live {
            let blocks = self.scheduler.sequence(other).unwrap().blocks();
            for group in 0..self.groups.len() {
                for (index, block) in blocks.group(group).iter().enumerate() {
                    let Some(&(writer, ..)) = writers.get(block) else { continue };
                    if writer != other {
                        let last = (index + 1) * bt - 1;
                        let ours = self.live[&writer].keys.get(last);
                        let same = ours.is_some() && ours == theirs.keys.get(last);
                        assert!(
                            same && self.groups[group] != KvGroupKind::State,
                            "a writable block is shared"
                        );
                        self.summary.shared += 1;
                    }
                }
            }
        }
    }
}

/// Positions that the rows from `start` on read. The rows' own positions are among them, except for
/// a state.
pub(super) fn reads(kind: KvGroupKind, start: usize, rows: usize) -> Range<usize> {
    match kind {
        KvGroupKind::Full => 0..start + rows,
        KvGroupKind::Window { tokens } => (start + 1).saturating_sub(tokens)..start + rows,
        KvGroupKind::State => start.saturating_sub(1)..start,
    }
}
