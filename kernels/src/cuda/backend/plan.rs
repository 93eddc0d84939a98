// SPDX-License-Identifier: Apache-2.0

//! The attention plan: decides which kernel computes which rows of a step. A plan is a pure
//! function of positions, sequences and table starts.
//!
//! Every plan gives the same bits (attention.cu says why); a plan changes the speed alone.
//!
//! 1. A long run of consecutive tokens of one sequence goes to the prefill kernel.
//! 2. Few decode rows of few keys get a block for each row and KV head, whose groups of warps
//!    compute several splits at a time.
//! 3. Other decode rows and short runs are split along their keys. If there are so many that a
//!    block for each of them and each KV head fills the device, a block computes all splits of its
//!    rows and merges them.
//! 4. Otherwise, each split has a block, and a further kernel merges their partial results. When
//!    these fill their buffer, the plan ends. The remaining rows get further plans.

use std::cmp::Reverse;

use super::block_set::BlockSet;
use crate::cuda::abi::attention::ATTENTION_GROUPS;
pub(super) use crate::cuda::abi::attention::{KvSplits, PartialMerge, QueryTile};
use crate::cuda::attention::SplitMerge;

/// Keys of a tile. A tile is the smallest split.
const TILE: u32 = 64;
/// Partial results of a plan: 32 decode rows of 32 splits. Further rows get another plan, which
/// costs 14 us a layer of an 8B model (H200). So many rows fill most devices and need no partial
/// results, unless one of them is much longer than the others. These results take 16.3 MiB.
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
unsafe impl bytemuck::Zeroable for KvSplits {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for KvSplits {}
// SAFETY: as above.
unsafe impl bytemuck::Zeroable for PartialMerge {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for PartialMerge {}

const _: () = assert!(size_of::<QueryTile>() == 5 * size_of::<u32>());
const _: () = assert!(size_of::<KvSplits>() == size_of::<[u32; 12]>());
const _: () = assert!(size_of::<PartialMerge>() == 4 * size_of::<u32>());

#[derive(Debug, Default)]
pub(super) struct AttentionPlan {
    pub(super) splits: Vec<KvSplits>,
    /// All splits of each query tile that is split.
    split_tiles: Vec<KvSplits>,
    pub(super) merges: Vec<PartialMerge>,
    pub(super) prefill_tiles: Vec<QueryTile>,
    /// The number of partial results, one for each row and split.
    pub(super) partials: u32,
    /// Whether any block has more than one tile of keys.
    pub(super) has_multi_tile_blocks: bool,
    pub(super) merge: SplitMerge,
    /// Whether each query tile is one row, which reads its own key and otherwise keys of earlier
    /// steps.
    has_lone_rows: bool,
}

/// Limits of a plan.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttentionPlanLimits {
    /// Tokens of one query tile: of the split-KV kernel, then of the prefill kernel.
    pub(super) split_tokens: usize,
    pub(super) prefill_tokens: usize,
    pub(super) partials_max: u32,
    pub(super) kv_heads: u32,
    pub(super) multiprocessors: u32,
    /// Whether the device can compute splits in groups.
    pub(super) has_groups: bool,
}

/// The rows of a step, with what they read and write in a cache.
#[derive(Clone, Copy)]
pub(super) struct PlannedRows<'a> {
    pub(super) positions: &'a [u32],
    /// The block ids of row r begin at `blocks[table_starts[r]]`.
    pub(super) table_starts: &'a [u32],
    pub(super) blocks: &'a [u32],
    pub(super) block_tokens: usize,
    /// The blocks that the step's rows write.
    pub(super) written: &'a BlockSet,
}

impl PlannedRows<'_> {
    /// The blocks whose keys the row of `queries` reads. The last one has the row's own key.
    fn blocks_read(&self, queries: &QueryTile) -> &[u32] {
        &self.blocks[queries.table as usize..][..=queries.position as usize / self.block_tokens]
    }

    /// Whether earlier steps have written all keys of the tile that begins at `position`, and this
    /// step writes none of their blocks.
    fn is_old(&self, queries: &QueryTile, position: u32) -> bool {
        let end = position + TILE;
        let entries = position as usize / self.block_tokens..(end as usize).div_ceil(self.block_tokens);
        end <= queries.position
            && self.blocks[queries.table as usize..][entries]
                .iter()
                .all(|&block| !self.written.contains(block as usize))
    }
}

/// A split of a row at `position` has `TILE << split_shift(position)` keys.
pub(super) fn split_shift(position: u32) -> u32 {
    (position / (TILE * SPLITS_MAX) + 1).next_power_of_two().trailing_zeros()
}

impl AttentionPlan {
    /// Plans the rows of an [`ops::Step`] from row `start` on. Returns the first row that does not
    /// fit into this plan.
    pub(super) fn build(
        &mut self,
        start: usize,
        rows: PlannedRows<'_>,
        limits: AttentionPlanLimits,
    ) -> usize {
        let mut end = self.collect(start, rows, limits, u32::MAX);
        self.has_lone_rows = self.prefill_tiles.is_empty() && self.are_lone(rows);
        self.merge = if self.fits_groups(limits) {
            SplitMerge::Groups
        } else if self.fills_device(limits) {
            SplitMerge::Block
        } else {
            SplitMerge::Kernel
        };
        if self.merge == SplitMerge::Kernel {
            end = self.collect(start, rows, limits, limits.partials_max);
        }
        self.place_splits(rows);
        end
    }

    /// Whether blocks of attention prepare the heads of their rows. With one row and a block for
    /// each split, norm_rope_kv.cu is faster: one stream of a 0.6B model reaches 1,615 instead of
    /// 1,593 tokens a second (H200).
    pub(super) fn prepares_heads(&self) -> bool {
        self.has_lone_rows && (self.merge != SplitMerge::Kernel || self.split_tiles.len() > 1)
    }

    /// Whether groups are the fastest for these rows. Each of their blocks needs a multiprocessor,
    /// and computes a round of splits in some 4 us. With one round, it is faster than a block for
    /// each split and the merge kernel. With two rounds, it is faster if there are blocks for two
    /// fifths of the device. On an H200, 8 rows of an 8B model take 5.1 instead of 6.9 us at 190
    /// keys and 9.7 instead of 9.9 at 512; one row takes 8.2 instead of 4.3 at 512.
    fn fits_groups(&self, limits: AttentionPlanLimits) -> bool {
        const ROUND: u32 = ATTENTION_GROUPS as u32;
        let rows = self.split_tiles.len();
        let launched = launch_bound(rows) as u32 * limits.kv_heads;
        let rounds = if 5 * rows as u32 * limits.kv_heads >= 2 * limits.multiprocessors { 2 } else { 1 };
        limits.has_groups
            && self.has_lone_rows
            && launched <= limits.multiprocessors
            && self.split_tiles.iter().all(|all| all.queries.split_shift == 0 && all.splits <= rounds * ROUND)
    }

    /// Whether each query tile is one row, and the row is the only one that writes blocks which it
    /// reads.
    fn are_lone(&self, rows: PlannedRows<'_>) -> bool {
        let queries = || self.split_tiles.iter().map(|all| &all.queries);
        let mut own: Vec<u32> = Vec::with_capacity(self.split_tiles.len());
        let are_lone = queries().all(|queries| {
            let (last, others) = rows.blocks_read(queries).split_last().expect("a row reads its own key");
            own.push(*last);
            queries.tokens == 1 && others.iter().all(|&block| !rows.written.contains(block as usize))
        });
        own.sort_unstable();
        are_lone && own.windows(2).all(|pair| pair[0] != pair[1])
    }

    /// Whether there is work for two fifths of the device while the longest block runs, if each
    /// block computes all splits of a query tile. Two blocks fill a multiprocessor. With less work,
    /// a block for each split is faster: on an H200, 8 rows at 512 keys of an 8B model take 9.8 us
    /// with a block for each split and 11.9 us without, 16 rows take 16.7 and 13.7 us.
    fn fills_device(&self, limits: AttentionPlanLimits) -> bool {
        let tiles = || self.split_tiles.iter().map(|all| u64::from(all.splits << all.queries.split_shift));
        let longest = tiles().max().unwrap_or(0);
        let places = 2 * u64::from(limits.multiprocessors);
        longest > 0 && 5 * u64::from(limits.kv_heads) * tiles().sum::<u64>() >= 2 * places * longest
    }

    /// Decides which kernel computes which rows, until there are more than `partials_max` partial
    /// results.
    fn collect(
        &mut self,
        mut start: usize,
        rows: PlannedRows<'_>,
        limits: AttentionPlanLimits,
        partials_max: u32,
    ) -> usize {
        let PlannedRows { positions, table_starts, .. } = rows;
        self.split_tiles.clear();
        self.merges.clear();
        self.prefill_tiles.clear();
        self.partials = 0;
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
            } else if self.partials + partials <= partials_max {
                self.split(run, limits.split_tokens);
            } else {
                break;
            }
            start = end;
        }
        start
    }

    /// Divides the splits of the query tiles into blocks.
    fn place_splits(&mut self, rows: PlannedRows<'_>) {
        self.splits.clear();
        for all in &self.split_tiles {
            let step = if self.merge == SplitMerge::Kernel { 1 } else { all.splits };
            self.splits.extend((0..all.splits).step_by(step as usize).map(|first| {
                let first_key = first * (TILE << all.queries.split_shift);
                KvSplits {
                    first,
                    splits: step,
                    partial: all.partial + first * all.queries.tokens,
                    is_first_tile_old: rows.is_old(&all.queries, first_key).into(),
                    ..*all
                }
            }));
        }
        let tiles = |block: &KvSplits| block.splits << block.queries.split_shift;
        self.has_multi_tile_blocks = self.splits.iter().any(|block| tiles(block) > 1);
        if self.merge != SplitMerge::Kernel {
            self.merges.clear();
            // The longest blocks start first.
            self.splits.sort_by_key(|block| Reverse(tiles(block)));
        }
    }

    fn split(&mut self, run: QueryTile, tokens: usize) {
        for queries in split_into_tiles(run, tokens) {
            let splits = count_splits(queries.position + queries.tokens - 1, queries.split_shift);
            let first = self.partials;
            self.split_tiles.push(KvSplits {
                queries,
                first: 0,
                splits,
                partial: first,
                is_first_tile_old: 0,
                unused: [0; 3],
            });
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

/// The upper bound that launches use for `count`. A bound that changes makes another graph, and
/// blocks beyond `count` start for nothing. So small counts are rounded up to a power of two, large
/// ones to an eighth of it: 576 splits of 8 KV heads would otherwise start 3,584 idle blocks.
pub(super) fn launch_bound(count: usize) -> usize {
    let power = count.next_power_of_two();
    match count {
        0 => 0,
        1..=64 => power,
        _ => count.next_multiple_of(power / 8),
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

    /// Of a device so large that no rows fill it.
    const LIMITS: AttentionPlanLimits = AttentionPlanLimits {
        split_tokens: 4,
        prefill_tokens: 16,
        partials_max: 400,
        kv_heads: 8,
        multiprocessors: 1_000_000,
        has_groups: false,
    };
    const BLOCK_TOKENS: usize = 16;
    /// Entries of the table of each sequence.
    const TABLE: u32 = 1000;

    /// Rows of sequences, each with a table of its own.
    #[derive(Default)]
    struct Rows {
        positions: Vec<u32>,
        table_starts: Vec<u32>,
        blocks: Vec<u32>,
        written: BlockSet,
    }

    impl Rows {
        /// A sequence for each (first position, number of rows).
        fn new(runs: &[(u32, u32)]) -> Self {
            let mut rows = Self::default();
            for (sequence, &(first, len)) in runs.iter().enumerate() {
                let table = sequence as u32 * TABLE;
                rows.blocks.extend(table..table + TABLE);
                for position in first..first + len {
                    rows.positions.push(position);
                    rows.table_starts.push(table);
                    rows.written.insert(table as usize + position as usize / BLOCK_TOKENS);
                }
            }
            rows
        }

        fn planned(&self) -> PlannedRows<'_> {
            PlannedRows {
                positions: &self.positions,
                table_starts: &self.table_starts,
                blocks: &self.blocks,
                block_tokens: BLOCK_TOKENS,
                written: &self.written,
            }
        }

        /// The plans of all rows.
        fn plans(&self, limits: AttentionPlanLimits) -> Vec<AttentionPlan> {
            let (mut plans, mut first) = (Vec::new(), 0);
            while first < self.positions.len() {
                let mut plan = AttentionPlan::default();
                let end = plan.build(first, self.planned(), limits);
                assert!(end > first);
                first = end;
                plans.push(plan);
            }
            plans
        }
    }

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
        let plans = Rows::new(&[(700, 1), (0, 100)]).plans(LIMITS);
        let [plan] = &plans[..] else { panic!("{} plans", plans.len()) };
        let queries = QueryTile { row: 0, tokens: 1, position: 700, table: 0, split_shift: 0 };
        assert!(plan.splits.iter().all(|block| block.queries == queries && block.splits == 1));
        assert_eq!((plan.splits.len(), plan.partials), (11, 11));
        assert_eq!(plan.merges, [PartialMerge { row: 0, partial: 0, stride: 1, splits: 11 }]);
        assert_eq!(plan.prefill_tiles.len(), 7);
        assert_eq!(
            plan.prefill_tiles[6],
            QueryTile { row: 97, tokens: 4, position: 96, table: TABLE, split_shift: 0 }
        );
    }

    #[test]
    fn rows_that_fill_the_device_are_merged_in_their_blocks() {
        let limits = AttentionPlanLimits { multiprocessors: 132, ..LIMITS };
        let merges = |runs: &[(u32, u32)]| Rows::new(runs).plans(limits)[0].merge == SplitMerge::Block;
        assert!(!merges(&[(511, 1); 13]));
        assert!(merges(&[(511, 1); 14]));
        // One long row keeps its blocks busy while the others have ended.
        assert!(!merges(&[&[(511, 1); 63][..], &[(15_999, 1)]].concat()));
        // 64 rows at 1,100 keys have more partial results than a plan, but need none.
        let plans = Rows::new(&[&[(1_099, 1); 64][..], &[(299, 3)]].concat()).plans(limits);
        let [plan] = &plans[..] else { panic!("{} plans", plans.len()) };
        let splits: Vec<u32> = plan.splits.iter().map(|block| block.splits).collect();
        assert_eq!(splits, [vec![18; 64], vec![5]].concat());
        assert!(plan.merges.is_empty() && plan.has_multi_tile_blocks);
    }

    #[test]
    fn only_tiles_that_the_step_does_not_write_are_old() {
        let old = |rows: &Rows| -> Vec<u32> {
            rows.plans(LIMITS)[0].splits.iter().map(|block| block.is_first_tile_old).collect()
        };
        // Keys 128 to 191 have the row's own.
        assert_eq!(old(&Rows::new(&[(150, 1)])), [1, 1, 0]);
        // Query tiles begin at 120, 124, 128 and 132. The step also writes keys 120 to 127.
        assert_eq!(old(&Rows::new(&[(120, 13)])), [1, 0, 1, 0, 1, 0, 0, 1, 0, 0]);
        // Another row writes block 5 of the first sequence, which has keys 80 to 95.
        let mut rows = Rows::new(&[(150, 1), (40, 1)]);
        rows.written.insert(5);
        assert_eq!(old(&rows), [1, 0, 0, 0]);
    }

    #[test]
    fn lone_decode_rows_read_old_keys_and_their_own() {
        let reads_old_keys = |rows: &Rows| rows.plans(LIMITS)[0].has_lone_rows;
        assert!(reads_old_keys(&Rows::new(&[(150, 1), (0, 1), (63, 1), (2_100, 1)])));
        // Two rows of one sequence, and a prompt.
        assert!(!reads_old_keys(&Rows::new(&[(150, 1), (40, 2)])));
        assert!(!reads_old_keys(&Rows::new(&[(150, 1), (0, 100)])));
        // Another row writes block 5 of the first sequence, which has keys 80 to 95.
        let mut rows = Rows::new(&[(150, 1), (40, 1)]);
        rows.written.insert(5);
        assert!(!reads_old_keys(&rows));
        // Block 9 has the own keys of both rows.
        let mut rows = Rows::new(&[(150, 1), (151, 1)]);
        rows.blocks[TABLE as usize + 9] = 9;
        assert!(!reads_old_keys(&rows));
    }

    #[test]
    fn groups_compute_few_short_rows() {
        let limits = AttentionPlanLimits { multiprocessors: 132, has_groups: true, ..LIMITS };
        let merge = |runs: &[(u32, u32)]| Rows::new(runs).plans(limits)[0].merge;
        assert_eq!(merge(&[(255, 1)]), SplitMerge::Groups);
        // A second round is slower, unless many multiprocessors have one.
        assert_eq!(merge(&[(256, 1)]), SplitMerge::Kernel);
        assert_eq!(merge(&[(256, 1); 7]), SplitMerge::Groups);
        assert_eq!(merge(&[(512, 1); 7]), SplitMerge::Kernel);
        assert_eq!(merge(&[(190, 1); 16]), SplitMerge::Groups);
        // More blocks than multiprocessors.
        assert_eq!(merge(&[(190, 1); 17]), SplitMerge::Block);
        // Two rows of one sequence.
        assert_eq!(merge(&[(190, 1), (40, 2)]), SplitMerge::Kernel);
    }

    #[test]
    fn one_long_row_leaves_its_heads_to_another_kernel() {
        let prepares_heads = |runs: &[(u32, u32)]| {
            let limits = AttentionPlanLimits { multiprocessors: 132, has_groups: true, ..LIMITS };
            Rows::new(runs).plans(limits)[0].prepares_heads()
        };
        assert!(prepares_heads(&[(200, 1)]));
        assert!(!prepares_heads(&[(600, 1)]));
        assert!(prepares_heads(&[(600, 1), (600, 1)]));
    }

    proptest! {
        /// Every row is in one query tile. The tokens of a tile are consecutive and have splits of
        /// one length. Partial results of different rows and splits do not overlap.
        #[test]
        fn every_row_is_computed_once(
            runs in prop::collection::vec((0_u32..9000, 1_u32..200), 1..12),
            multiprocessors in 1_u32..300,
            has_groups: bool,
        ) {
            let rows = Rows::new(&runs);
            let mut seen = vec![0; rows.positions.len()];
            for plan in rows.plans(AttentionPlanLimits { multiprocessors, has_groups, ..LIMITS }) {
                check(&plan, &rows, &mut seen)?;
            }
            prop_assert!(seen.iter().all(|&times| times == 1));
        }
    }

    /// Checks a plan and counts its rows in `seen`.
    fn check(plan: &AttentionPlan, rows: &Rows, seen: &mut [u32]) -> Result<(), TestCaseError> {
        let (positions, starts) = (&rows.positions, &rows.table_starts);
        let split: Vec<QueryTile> =
            plan.splits.iter().filter(|block| block.first == 0).map(|block| block.queries).collect();
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
        for block in &plan.splits {
            let (queries, tiles) = (&block.queries, block.splits << block.queries.split_shift);
            let all = count_splits(queries.position + queries.tokens - 1, queries.split_shift);
            prop_assert_eq!(block.splits, if plan.merge == SplitMerge::Kernel { 1 } else { all });
            prop_assert!(plan.has_multi_tile_blocks || tiles == 1);
        }
        if plan.merge != SplitMerge::Kernel {
            prop_assert!(plan.merges.is_empty());
            return Ok(());
        }
        prop_assert!(plan.partials <= LIMITS.partials_max);
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
        for block in &plan.splits {
            for token in 0..block.queries.tokens {
                written[(block.partial + token) as usize] += 1;
            }
        }
        prop_assert!(written.iter().all(|&times| times == 1));
        Ok(())
    }
}
