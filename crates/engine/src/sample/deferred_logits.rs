//! Rows of logits whose draw waits: their requests' constraints cannot say yet what is allowed.
//!
//! Invariant: at most one row for each live request, that of its last token. Such a sequence has nothing left to compute,
//! so it takes no rows of a step and nobody waits for it. What is drawn in the end is what would have been drawn at once,
//! from the same logits under the same mask; a preemption in between changes neither.

use crate::schedule::sequence_id::Slot;

#[derive(Debug, Default)]
pub(crate) struct LateRows {
    rows: Vec<LateRow>,
    /// Memory of rows that were here: as many as were late at once, until it is released.
    spare: Vec<Vec<f32>>,
}

#[derive(Debug)]
pub(crate) struct LateRow {
    pub(crate) slot: Slot,
    pub(crate) position: usize,
    pub(crate) logits: Vec<f32>,
}

impl LateRows {
    /// The row after `position`. One that was computed again after a preemption is here already, and the same.
    pub(crate) fn keep(&mut self, slot: Slot, position: usize, logits: &[f32]) {
        if self.rows.iter().all(|row| row.slot != slot) {
            let mut own = self.spare.pop().unwrap_or_default();
            own.extend_from_slice(logits);
            self.rows.push(LateRow { slot, position, logits: own });
        }
    }

    /// The request has drawn from the row, or has ended.
    pub(crate) fn forget(&mut self, slot: Slot) {
        if let Some(index) = self.rows.iter().position(|row| row.slot == slot) {
            let row = self.rows.swap_remove(index);
            self.give_back(row);
        }
    }

    /// Takes out the first row from `index` on that is not late any more; rows before `index` stay where they are.
    pub(crate) fn take(
        &mut self,
        index: &mut usize,
        mut is_late: impl FnMut(Slot) -> bool,
    ) -> Option<LateRow> {
        *index += self.rows.get(*index..)?.iter().take_while(|row| is_late(row.slot)).count();
        (*index < self.rows.len()).then(|| self.rows.swap_remove(*index))
    }

    /// Gives back the memory of rows that are not here any more.
    pub(crate) fn release(&mut self) {
        self.spare = Vec::new();
    }

    pub(crate) fn give_back(&mut self, row: LateRow) {
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
        let mut late = LateRows::default();
        for slot in 0..6 {
            late.keep(Slot(slot), 10 + slot as usize, &[slot as f32]);
        }
        late.keep(Slot(2), 12, &[2.0]);
        late.forget(Slot(4));
        late.forget(Slot(4));
        let (mut index, mut taken) = (0, Vec::new());
        while let Some(row) = late.take(&mut index, |slot| slot.0 % 2 == 1) {
            assert_eq!((row.position, &row.logits[..]), (10 + row.slot.0 as usize, &[row.slot.0 as f32][..]));
            taken.push(row.slot.0);
            late.give_back(row);
        }
        taken.sort_unstable();
        assert_eq!(taken, [0, 2]);
        assert_eq!(late.rows.len(), 3);
        late.keep(Slot(7), 1, &[7.0]);
        assert_eq!(late.rows.last().unwrap().logits, [7.0]);
        assert_eq!(late.spare.len(), 2);
        late.release();
        assert_eq!((late.spare.capacity(), late.rows.len()), (0, 4));
    }
}
