// SPDX-License-Identifier: Apache-2.0

//! Deferred logits: rows kept until the token mask of their request is ready.
//!
//! Invariants:
//!
//! 1. A request has at most one deferred row, that of its last token. Its sequence then lacks no
//!    rows, so it skips steps and no other request waits for it.
//! 2. The token is the one that the sampler would have drawn at once: from the same logits under
//!    the same mask. A preemption in between changes neither.

use crate::schedule::sequence_id::SequenceId;

#[derive(Debug, Default)]
pub(crate) struct DeferredLogits {
    rows: Vec<DeferredRow>,
    /// Buffers of removed rows, kept until `release_memory`.
    spare: Vec<Vec<f32>>,
}

#[derive(Debug)]
pub(crate) struct DeferredRow {
    pub(crate) sequence_id: SequenceId,
    pub(crate) position: usize,
    pub(crate) logits: Vec<f32>,
}

impl DeferredLogits {
    /// Defers the row after `position`. A row that is recomputed after a preemption is already
    /// present with equal logits.
    pub(crate) fn insert(&mut self, sequence_id: SequenceId, position: usize, logits: &[f32]) {
        if self.rows.iter().all(|row| row.sequence_id != sequence_id) {
            let mut own = self.spare.pop().unwrap_or_default();
            own.extend_from_slice(logits);
            self.rows.push(DeferredRow { sequence_id, position, logits: own });
        }
    }

    /// Removes the row, because its token was sampled or its request ended.
    pub(crate) fn remove(&mut self, sequence_id: SequenceId) {
        if let Some(index) = self.rows.iter().position(|row| row.sequence_id == sequence_id) {
            let row = self.rows.swap_remove(index);
            self.recycle(row);
        }
    }

    /// Removes and returns the first row from `index` on whose mask is ready. Earlier rows keep
    /// their index.
    pub(crate) fn take_ready(
        &mut self,
        index: &mut usize,
        mut is_mask_pending: impl FnMut(SequenceId) -> bool,
    ) -> Option<DeferredRow> {
        *index += self.rows.get(*index..)?.iter().take_while(|row| is_mask_pending(row.sequence_id)).count();
        (*index < self.rows.len()).then(|| self.rows.swap_remove(*index))
    }

    /// Releases the buffers of removed rows.
    pub(crate) fn release_memory(&mut self) {
        self.spare = Vec::new();
    }

    pub(crate) fn recycle(&mut self, row: DeferredRow) {
        let mut logits = row.logits;
        logits.clear();
        self.spare.push(logits);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deferred_rows_leave_once_when_their_mask_is_ready() {
        let mut deferred = DeferredLogits::default();
        for sequence_id in 0..6 {
            deferred.insert(SequenceId(sequence_id), 10 + sequence_id as usize, &[sequence_id as f32]);
        }
        deferred.insert(SequenceId(2), 12, &[2.0]);
        deferred.remove(SequenceId(4));
        deferred.remove(SequenceId(4));
        let (mut index, mut taken) = (0, Vec::new());
        while let Some(row) = deferred.take_ready(&mut index, |sequence_id| sequence_id.0 % 2 == 1) {
            assert_eq!(
                (row.position, &row.logits[..]),
                (10 + row.sequence_id.index(), &[row.sequence_id.0 as f32][..])
            );
            taken.push(row.sequence_id.0);
            deferred.recycle(row);
        }
        taken.sort_unstable();
        assert_eq!(taken, [0, 2]);
        assert_eq!(deferred.rows.len(), 3);
        deferred.insert(SequenceId(7), 1, &[7.0]);
        assert_eq!(deferred.rows.last().unwrap().logits, [7.0]);
        assert_eq!(deferred.spare.len(), 2);
        deferred.release_memory();
        assert_eq!((deferred.spare.capacity(), deferred.rows.len()), (0, 4));
    }
}
