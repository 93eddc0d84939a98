// SPDX-License-Identifier: Apache-2.0

//! Planning a step before the tokens of the step before are known.
//!
//! 1. Such a step has decodes alone, so it is planned only if nothing else could be in it: no
//!    prompt is incomplete, and no sequence can be admitted.
//! 2. It preempts no sequence: there are blocks for all of its rows.
//! 3. A block that it fills enters the prefix cache when its last token is known.

use super::{Scheduler, expect_sequence};
use crate::kv::group::KvGroupKind;
use crate::schedule::sequence::{Sequence, SequenceKind, SequenceState};
use crate::schedule::sequence_id::SequenceId;

impl Scheduler {
    /// Whether the next step can be planned before the tokens of the committed plan are known. That
    /// plan had `rows` rows, and the sequences `of_rows` still run. The next step then has as many
    /// rows at most.
    pub fn can_plan_ahead(&self, rows: usize, mut of_rows: impl Iterator<Item = SequenceId>) -> bool {
        let outlasts = |sequence_id| self.sequence(sequence_id).is_some_and(Sequence::outlasts_next_token);
        // A sequence that ends makes room for one that waits.
        let is_closed = self.is_running_full() && self.last_paused().is_none() && of_rows.all(outlasts);
        let decodes = |sequence_id: &SequenceId| {
            self.sequence(*sequence_id).is_some_and(|sequence| {
                sequence.kind == SequenceKind::Generate
                    && sequence.state == SequenceState::Running
                    && sequence.remaining() <= 1
            })
        };
        // A row needs at most one block of each group.
        let blocks = self.running.len() * self.groups.len();
        // States of rows that turn out to be superfluous could not be taken back.
        let groups_allow = self.groups.iter().all(|group| *group == KvGroupKind::Full);
        self.running.len() <= rows
            && (self.waiting.is_empty() || is_closed)
            && groups_allow
            && blocks <= self.pool.free_blocks()
            && self.running.iter().all(decodes)
    }

    /// The sequences that are running, in order of rank.
    pub fn running(&self) -> &[SequenceId] {
        &self.running
    }

    /// Announces the token that the device has drawn for an output of the committed plan, unless it
    /// is the last token of the sequence.
    pub fn push_drawn(&mut self, sequence_id: SequenceId, output: usize) {
        let sequence = expect_sequence(&mut self.sequences, sequence_id);
        if sequence.outlasts_next_token() {
            sequence.push_drawn(output);
        }
    }
}
