// SPDX-License-Identifier: Apache-2.0

//! Paused sequences, whose clients read too slowly. A paused sequence gets no rows. It keeps its
//! blocks and its place among the running sequences until another sequence needs one of them. Once
//! preempted, it stays out of the waiting queue until it continues.

use super::{Scheduler, expect_sequence};
use crate::schedule::sequence::{Sequence, SequenceState};
use crate::schedule::sequence_id::SequenceId;

impl Scheduler {
    /// Pauses a sequence, or lets it continue.
    pub fn set_paused(&mut self, sequence_id: SequenceId, is_paused: bool) {
        let sequence = expect_sequence(&mut self.sequences, sequence_id);
        let (was_paused, is_waiting) = (sequence.is_paused, sequence.state == SequenceState::Waiting);
        sequence.is_paused = is_paused;
        match (is_waiting, was_paused, is_paused) {
            (true, false, true) => {
                self.waiting.leave(sequence.rank);
                self.paused_waiting += 1;
            }
            (true, true, false) => {
                self.paused_waiting -= 1;
                self.waiting.enter(sequence.rank, sequence_id);
            }
            _ => {}
        }
        if is_paused {
            self.release_followers(sequence_id);
        }
    }

    /// Puts a sequence in state `Waiting` into the waiting queue, unless it is paused.
    pub(super) fn enter_waiting(&mut self, sequence_id: SequenceId) {
        let sequence = expect_sequence(&mut self.sequences, sequence_id);
        match sequence.is_paused {
            true => self.paused_waiting += 1,
            false => self.waiting.enter(sequence.rank, sequence_id),
        }
    }

    /// Undoes `enter_waiting`.
    pub(super) fn leave_waiting(&mut self, sequence: &Sequence) {
        match sequence.is_paused {
            true => self.paused_waiting -= 1,
            false => self.waiting.leave(sequence.rank),
        }
    }

    /// The paused sequence with the last rank among the running ones: it is preempted before all
    /// that compute.
    pub(super) fn last_paused(&self) -> Option<SequenceId> {
        let paused = |sequence_id: &SequenceId| {
            self.sequences[sequence_id.index()].as_ref().is_some_and(|sequence| sequence.is_paused)
        };
        self.running.iter().copied().rev().find(paused)
    }

    pub(super) fn is_running_full(&self) -> bool {
        self.running.len() >= self.limits.running_max
    }
}
