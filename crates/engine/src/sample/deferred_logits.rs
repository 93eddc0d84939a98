//! Rows of logits whose draw waits: their requests' constraints cannot say yet what is allowed.
//!
//! Invariant: at most one row for each live request, that of its last token. Such a sequence has nothing left to compute,
//! so it takes no rows of a step and nobody waits for it. What is drawn in the end is what would have been drawn at once,
//! from the same logits under the same mask; a preemption in between changes neither.

use crate::schedule::sequence_id::SequenceId;

#[derive(Debug, Default)]
pub(crate) struct DeferredLogits {
    rows: Vec<DeferredRow>,
    /// Memory of rows that were here: as many as were late at once, until it is released.
    spare: Vec<Vec<f32>>,
}

#[derive(Debug)]
pub(crate) struct DeferredRow {
    pub(crate) sequence_id: SequenceId,
    pub(crate) position: usize,
    pub(crate) logits: Vec<f32>,
}

impl DeferredLogits {
    /// The row after `position`. One that was computed again after a preemption is here already, and the same.
    pub(crate) fn insert(&mut self, sequence_id: SequenceId, position: usize, logits: &[f32]) {
        if self.rows.iter().all(|row| row.sequence_id != sequence_id) {
            let mut own = self.spare.pop().unwrap_or_default();
            own.extend_from_slice(logits);
            self.rows.push(DeferredRow { sequence_id, position, logits: own });
        }
    }

    /// The request has drawn from the row, or has ended.
    pub(crate) fn remove(&mut self, sequence_id: SequenceId) {
        if let Some(index) = self.rows.iter().position(|row| row.sequence_id == sequence_id) {
            let row = self.rows.swap_remove(index);
            self.recycle(row);
        }
    }

    /// Takes out the first row from `index` on that is not late any more; rows before `index` stay where they are.
    pub(crate) fn take_ready(
        &mut self,
        index: &mut usize,
        mut is_mask_pending: impl FnMut(SequenceId) -> bool,
    ) -> Option<DeferredRow> {
        *index += self.rows.get(*index..)?.iter().take_while(|row| is_mask_pending(row.sequence_id)).count();
        (*index < self.rows.len()).then(|| self.rows.swap_remove(*index))
    }

    /// Gives back the memory of rows that are not here any more.
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
    fn rows_leave_when_they_are_not_late_any_more_and_only_once() {
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
