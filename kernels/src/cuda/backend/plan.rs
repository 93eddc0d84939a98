// SPDX-License-Identifier: Apache-2.0

//! The attention plan: decides which kernel computes which rows of a step. A plan is a pure
//! function of positions, sequences and table starts.
//!
//! Every plan gives the same bits (attention.cu says why); a plan changes the speed alone.
//!
//! 1. A long run of consecutive tokens of one sequence goes to the prefill kernel.
//! 2. Decode rows and short runs are split along their keys, so that a few rows fill the device.
//! 3. When the partial results of a plan fill their buffer, the plan ends. The remaining rows get
//!    further plans.

pub(super) use crate::cuda::abi::attention::{KvSplit, PartialMerge, QueryTile};

/// Keys of a tile. A tile is the smallest split.
const TILE: u32 = 64;
/// Partial results of a plan: 32 decode rows of 32 splits, or 64 rows at 1,024 keys. Further rows
/// get another plan. With 512, 64 rows at 512 keys of an 8B model needed a second plan for the last
/// rows, which cost 14 us of 57 us a layer (H200). These results take 16.3 MiB.
pub(super) const PARTIALS_MAX: u32 = 1024;
/// The largest number of splits of a row. The length of a split grows with the position.
pub(super) const SPLITS_MAX: u32 = 32;
/// The smallest run of tokens that the prefill kernel computes. A shorter run would leave most of
/// the device idle in that kernel.
const PREFILL_TOKENS_MIN: usize = 64;

// SAFETY: these are repr(C) structs of u32 alone, so they have no padding (the assertions below
// check this). All zeros are valid values.
unsafe impl bytemuck::Zeroable for QueryTile {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for QueryTile {}
// SAFETY: as above.
unsafe impl bytemuck::Zeroable for KvSplit {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for KvSplit {}
// SAFETY: as above.
unsafe impl bytemuck::Zeroable for PartialMerge {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for PartialMerge {}

const _: () = assert!(size_of::<QueryTile>() == 5 * size_of::<u32>());
const _: () = assert!(size_of::<KvSplit>() == size_of::<[u32; 8]>());
const _: () = assert!(size_of::<PartialMerge>() == 4 * size_of::<u32>());

#[derive(Debug, Default)]
pub(super) struct AttentionPlan {
    pub(super) splits: Vec<KvSplit>,
    pub(super) merges: Vec<PartialMerge>,
    pub(super) prefill_tiles: Vec<QueryTile>,
    /// The number of partial results, one for each row and split.
    pub(super) partials: u32,
    /// Whether any split has more than one tile.
    pub(super) has_multi_tile_splits: bool,
}

/// Limits of a plan.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttentionPlanLimits {
    /// Tokens of one query tile: of the split-KV kernel, then of the prefill kernel.
    pub(super) split_tokens: usize,
    pub(super) prefill_tokens: usize,
    pub(super) partials_max: u32,
}

/// A split of a row at `position` has `TILE << split_shift(position)` keys.
pub(super) fn split_shift(position: u32) -> u32 {
    (position / (TILE * SPLITS_MAX) + 1).next_power_of_two().trailing_zeros()
}

impl AttentionPlan {
    /// Plans the rows of an [`ops::Step`] from row `start` on. The block ids of row r begin at
    /// `table_starts[r]`. Returns the first row that does not fit into this plan.
    pub(super) fn build(
        &mut self,
        mut start: usize,
        positions: &[u32],
        table_starts: &[u32],
        limits: AttentionPlanLimits,
    ) -> usize {
        self.splits.clear();
        self.merges.clear();
        self.prefill_tiles.clear();
        self.partials = 0;
        self.has_multi_tile_splits = false;
        while start < positions.len() {
            let shift = split_shift(positions[start]);
            let continues = |row: usize| {
                positions[row] == positions[start] + (row - start) as u32
                    && table_starts[row] == table_starts[start]
                    && split_shift(positions[row]) == shift
            };
            let end = (start + 1..positions.len()).find(|&row| !continues(row)).unwrap_or(positions.len());
            let run = QueryTile {
                row: start as u32,
                tokens: (end - start) as u32,
                position: positions[start],
                table: table_starts[start],
                split_shift: shift,
            };
            // The last row of a run has the most splits.
            let partials = run.tokens * count_splits(positions[end - 1], shift);
            if end - start >= PREFILL_TOKENS_MIN || partials > limits.partials_max {
                self.prefill_tiles.extend(split_into_tiles(run, limits.prefill_tokens));
            } else if self.partials + partials <= limits.partials_max {
                self.split(run, limits.split_tokens);
            } else {
                break;
            }
            start = end;
        }
        start
    }

    fn split(&mut self, run: QueryTile, tokens: usize) {
        self.has_multi_tile_splits |= run.split_shift > 0;
        for queries in split_into_tiles(run, tokens) {
            let splits = count_splits(queries.position + queries.tokens - 1, queries.split_shift);
            let first = self.partials;
            let kv_split =
                |split| KvSplit { queries, split, partial: first + split * queries.tokens, unused: 0 };
            self.splits.extend((0..splits).map(kv_split));
            self.merges.extend((0..queries.tokens).map(|token| PartialMerge {
                row: queries.row + token,
                partial: first + token,
                stride: queries.tokens,
                splits: count_splits(queries.position + token, queries.split_shift),
            }));
            self.partials += splits * queries.tokens;
        }
    }
}

fn count_splits(position: u32, shift: u32) -> u32 {
    position / (TILE << shift) + 1
}

fn split_into_tiles(run: QueryTile, tokens: usize) -> impl Iterator<Item = QueryTile> {
    (0..run.tokens).step_by(tokens.max(1)).map(move |first| QueryTile {
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

    const LIMITS: AttentionPlanLimits =
        AttentionPlanLimits { split_tokens: 4, prefill_tokens: 16, partials_max: 400 };

    #[test]
    fn a_row_has_at_most_32_splits_of_at_least_a_tile() {
        for position in (0..70_000).chain((0..1000).map(|i| 4_000_000 + i)) {
            let shift = split_shift(position);
            assert!(count_splits(position, shift) <= SPLITS_MAX, "position {position}");
            assert!(shift == 0 || count_splits(position, shift - 1) > SPLITS_MAX, "position {position}");
        }
    }

    #[test]
    fn a_decode_row_is_split_and_a_prompt_is_not() {
        let positions: Vec<u32> = std::iter::once(700).chain(0..100).collect();
        let starts: Vec<u32> = std::iter::once(5).chain((0..100).map(|_| 60)).collect();
        let mut plan = AttentionPlan::default();
        assert_eq!(plan.build(0, &positions, &starts, LIMITS), positions.len());
        let queries = QueryTile { row: 0, tokens: 1, position: 700, table: 5, split_shift: 0 };
        assert!(plan.splits.iter().all(|kv_split| kv_split.queries == queries));
        assert_eq!((plan.splits.len(), plan.partials), (11, 11));
        assert_eq!(plan.merges, [PartialMerge { row: 0, partial: 0, stride: 1, splits: 11 }]);
        assert_eq!(plan.prefill_tiles.len(), 7);
        assert_eq!(
            plan.prefill_tiles[6],
            QueryTile { row: 97, tokens: 4, position: 96, table: 60, split_shift: 0 }
        );
    }

    proptest! {
        /// Every row is in one query tile. The tokens of a tile are consecutive and have splits of
        /// one length. Partial results of different rows and splits do not overlap.
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
                let mut plan = AttentionPlan::default();
                let end = plan.build(first, &positions, &starts, LIMITS);
                prop_assert!(end > first);
                first = end;
                check(&plan, &positions, &starts, &mut seen)?;
            }
            prop_assert!(seen.iter().all(|&times| times == 1));
        }
    }

    /// Checks a plan and counts its rows in `seen`.
    fn check(
        plan: &AttentionPlan,
        positions: &[u32],
        starts: &[u32],
        seen: &mut [u32],
    ) -> Result<(), TestCaseError> {
        prop_assert!(plan.partials <= LIMITS.partials_max);
        let split: Vec<QueryTile> = plan
            .splits
            .iter()
            .filter(|kv_split| kv_split.split == 0)
            .map(|kv_split| kv_split.queries)
            .collect();
        for (query_tiles, tokens) in [(&split, 4), (&plan.prefill_tiles, 16)] {
            for queries in query_tiles {
                prop_assert!(queries.tokens as usize <= tokens);
                for token in 0..queries.tokens {
                    let row = (queries.row + token) as usize;
                    seen[row] += 1;
                    prop_assert_eq!(positions[row], queries.position + token);
                    prop_assert_eq!(starts[row], queries.table);
                    prop_assert_eq!(split_shift(positions[row]), queries.split_shift);
                }
            }
        }
        let mut partials = vec![0; plan.partials as usize];
        for merge in &plan.merges {
            let shift = split_shift(positions[merge.row as usize]);
            prop_assert_eq!(merge.splits, count_splits(positions[merge.row as usize], shift));
            for split in 0..merge.splits {
                partials[(merge.partial + split * merge.stride) as usize] += 1;
            }
        }
        prop_assert!(partials.iter().all(|&times| times <= 1));
        let mut written = vec![0; plan.partials as usize];
        for kv_split in &plan.splits {
            for token in 0..kv_split.queries.tokens {
                written[(kv_split.partial + token) as usize] += 1;
            }
        }
        prop_assert!(written.iter().all(|&times| times == 1));
        Ok(())
    }
}
