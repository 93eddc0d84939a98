//! Which kernel computes the attention of which rows of a step: a pure function of positions, sequences and table starts.
//!
//! Any plan gives the same bits (attention.cu says why); it only decides how fast. Runs of consecutive tokens of one sequence
//! go to the chunk kernel when they are long; decode rows and short runs are split along their keys, so that a few rows
//! fill the device. A plan ends where the room for partial results does: the rows behind it get plans of their own.

/// Keys of the smallest split, and of a tile.
const TILE: u32 = 64;
/// Splits that a row has at most: a split grows with the position.
pub(super) const SPLITS_MAX: u32 = 32;
/// Tokens of a run from which on the chunk kernel takes it. Shorter ones leave most of the device idle there.
const CHUNK_TOKENS_MIN: usize = 64;

/// `Item` of attention.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub(super) struct Item {
    pub(super) row: u32,
    pub(super) tokens: u32,
    pub(super) position: u32,
    pub(super) table: u32,
    pub(super) split_shift: u32,
}

/// `Work` of attention.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub(super) struct Work {
    pub(super) item: Item,
    pub(super) split: u32,
    pub(super) partial: u32,
    pub(super) unused: u32,
}

/// `Merge` of attention.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub(super) struct Merge {
    pub(super) row: u32,
    pub(super) partial: u32,
    pub(super) stride: u32,
    pub(super) splits: u32,
}

#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) works: Vec<Work>,
    pub(super) merges: Vec<Merge>,
    pub(super) chunks: Vec<Item>,
    /// Partial results of one row and split.
    pub(super) partials: u32,
    /// Whether a split of `works` has more than one tile.
    pub(super) long_splits: bool,
}

/// What a plan may use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Tokens of one item of the split kernel, and of the chunk kernel.
    pub(super) split_tokens: usize,
    pub(super) chunk_tokens: usize,
    pub(super) partials_max: u32,
}

/// A split of a row at `position` has `TILE << split_shift(position)` keys.
pub(super) fn split_shift(position: u32) -> u32 {
    (position / (TILE * SPLITS_MAX) + 1).next_power_of_two().trailing_zeros()
}

impl Plan {
    /// Rows as in [`ops::Step`], from row `start` on; `table_starts[r]` is where row r's block ids start. Returns the first
    /// row that has no place in this plan.
    pub(super) fn make(
        &mut self,
        mut start: usize,
        positions: &[u32],
        table_starts: &[u32],
        bounds: Bounds,
    ) -> usize {
        self.works.clear();
        self.merges.clear();
        self.chunks.clear();
        self.partials = 0;
        self.long_splits = false;
        while start < positions.len() {
            let shift = split_shift(positions[start]);
            let continues = |row: usize| {
                positions[row] == positions[start] + (row - start) as u32
                    && table_starts[row] == table_starts[start]
                    && split_shift(positions[row]) == shift
            };
            let end = (start + 1..positions.len()).find(|&row| !continues(row)).unwrap_or(positions.len());
            let run = Item {
                row: start as u32,
                tokens: (end - start) as u32,
                position: positions[start],
                table: table_starts[start],
                split_shift: shift,
            };
            // No row of the run has more splits than its last one.
            let partials = run.tokens * splits(positions[end - 1], shift);
            if end - start >= CHUNK_TOKENS_MIN || partials > bounds.partials_max {
                self.chunks.extend(pieces(run, bounds.chunk_tokens));
            } else if self.partials + partials <= bounds.partials_max {
                self.split(run, bounds.split_tokens);
            } else {
                break;
            }
            start = end;
        }
        start
    }

    fn split(&mut self, run: Item, tokens: usize) {
        self.long_splits |= run.split_shift > 0;
        for item in pieces(run, tokens) {
            let splits = splits(item.position + item.tokens - 1, item.split_shift);
            let first = self.partials;
            let work = |split| Work { item, split, partial: first + split * item.tokens, unused: 0 };
            self.works.extend((0..splits).map(work));
            self.merges.extend((0..item.tokens).map(|token| Merge {
                row: item.row + token,
                partial: first + token,
                stride: item.tokens,
                splits: self::splits(item.position + token, item.split_shift),
            }));
            self.partials += splits * item.tokens;
        }
    }
}

fn splits(position: u32, shift: u32) -> u32 {
    position / (TILE << shift) + 1
}

fn pieces(run: Item, tokens: usize) -> impl Iterator<Item = Item> {
    (0..run.tokens).step_by(tokens.max(1)).map(move |first| Item {
        row: run.row + first,
        tokens: (run.tokens - first).min(tokens as u32),
        position: run.position + first,
        ..run
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BOUNDS: Bounds = Bounds { split_tokens: 4, chunk_tokens: 16, partials_max: 400 };

    #[test]
    fn a_row_has_at_most_32_splits_of_at_least_a_tile() {
        for position in (0..70_000).chain((0..1000).map(|i| 4_000_000 + i)) {
            let shift = split_shift(position);
            assert!(splits(position, shift) <= SPLITS_MAX, "position {position}");
            assert!(shift == 0 || splits(position, shift - 1) > SPLITS_MAX, "position {position}");
        }
    }

    #[test]
    fn a_decode_row_is_split_and_a_prompt_is_not() {
        let positions: Vec<u32> = std::iter::once(700).chain(0..100).collect();
        let starts: Vec<u32> = std::iter::once(5).chain((0..100).map(|_| 60)).collect();
        let mut plan = Plan::default();
        assert_eq!(plan.make(0, &positions, &starts, BOUNDS), positions.len());
        let item = Item { row: 0, tokens: 1, position: 700, table: 5, split_shift: 0 };
        assert!(plan.works.iter().all(|work| work.item == item));
        assert_eq!((plan.works.len(), plan.partials), (11, 11));
        assert_eq!(plan.merges, [Merge { row: 0, partial: 0, stride: 1, splits: 11 }]);
        assert_eq!(plan.chunks.len(), 7);
        assert_eq!(plan.chunks[6], Item { row: 97, tokens: 4, position: 96, table: 60, split_shift: 0 });
    }

    proptest! {
        /// Every row is in one item; an item's tokens follow each other and have splits of one length; partials of
        /// different rows and splits do not meet.
        #[test]
        fn every_row_is_computed_once(runs in prop::collection::vec((0_u32..9000, 1_u32..200), 1..12)) {
            let (mut positions, mut starts) = (Vec::new(), Vec::new());
            for (sequence, &(first, len)) in runs.iter().enumerate() {
                positions.extend(first..first + len);
                starts.extend((0..len).map(|_| sequence as u32 * 1000));
            }
            let mut seen = vec![0; positions.len()];
            let mut first = 0;
            while first < positions.len() {
                let mut plan = Plan::default();
                let end = plan.make(first, &positions, &starts, BOUNDS);
                prop_assert!(end > first);
                first = end;
                check(&plan, &positions, &starts, &mut seen)?;
            }
            prop_assert!(seen.iter().all(|&times| times == 1));
        }
    }

    /// Counts the rows of a plan in `seen`.
    fn check(plan: &Plan, positions: &[u32], starts: &[u32], seen: &mut [u32]) -> Result<(), TestCaseError> {
        prop_assert!(plan.partials <= BOUNDS.partials_max);
        let split: Vec<Item> =
            plan.works.iter().filter(|work| work.split == 0).map(|work| work.item).collect();
        for (items, tokens) in [(&split, 4), (&plan.chunks, 16)] {
            for item in items {
                prop_assert!(item.tokens as usize <= tokens);
                for token in 0..item.tokens {
                    let row = (item.row + token) as usize;
                    seen[row] += 1;
                    prop_assert_eq!(positions[row], item.position + token);
                    prop_assert_eq!(starts[row], item.table);
                    prop_assert_eq!(split_shift(positions[row]), item.split_shift);
                }
            }
        }
        let mut partials = vec![0; plan.partials as usize];
        for merge in &plan.merges {
            let shift = split_shift(positions[merge.row as usize]);
            prop_assert_eq!(merge.splits, splits(positions[merge.row as usize], shift));
            for split in 0..merge.splits {
                partials[(merge.partial + split * merge.stride) as usize] += 1;
            }
        }
        prop_assert!(partials.iter().all(|&times| times <= 1));
        let mut written = vec![0; plan.partials as usize];
        for work in &plan.works {
            for token in 0..work.item.tokens {
                written[(work.partial + token) as usize] += 1;
            }
        }
        prop_assert!(written.iter().all(|&times| times == 1));
        Ok(())
    }
}
