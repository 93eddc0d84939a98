// SPDX-License-Identifier: Apache-2.0

//! The attention plan: decides which kernel computes which rows of a step. A plan is a pure
//! function of positions, sequences, table starts and the length of the attention window. It serves
//! all layers of one span.
//!
//! Every plan gives the same bits (attention.cu says why); a plan changes the speed alone.
//!
//! 1. A long run of consecutive tokens of one sequence goes to the prefill kernel.
//! 2. Few decode rows of few keys get a block for each row and KV head, or a cluster of blocks. The
//!    groups of warps of these blocks compute several splits at a time.
//! 3. Other decode rows and short runs are split along their keys. If there are so many that a
//!    block for each of them and each KV head fills the device, a block computes all splits of its
//!    rows and merges them; of few keys, two at a time, if two blocks fit each multiprocessor.
//! 4. Otherwise, each split has a block, and a further kernel merges their partial results. When
//!    these fill their buffer, the plan ends. The remaining rows get further plans.

use std::cmp::Reverse;

use super::block_set::BlockSet;
use crate::cuda::abi::attention::{ATTENTION_GROUPS, NO_WINDOW, SPLIT_KV_PAIRS};
pub(super) use crate::cuda::abi::attention::{KvSplits, PartialMerge, QueryTile};
use crate::cuda::attention::{CLUSTERS, SplitMerge};

/// Keys of a tile. A tile is the smallest split.
const TILE: u32 = 64;
/// Partial results of a plan: 32 decode rows of 32 splits. Further rows get another plan, which
/// costs 14 us a layer of an 8B model (H200). So many rows fill most devices and need no partial
/// results, unless one of them is much longer than the others. These results take 16.3 MiB.
pub(super) const PARTIALS_MAX: u32 = 1024;
/// The largest number of splits of a row. The length of a split grows with the position, or with
/// the window.
pub(super) const SPLITS_MAX: u32 = 32;
/// The largest number of tokens of a query tile of the split-KV kernels.
const SPLIT_TOKENS_MAX: u32 = SPLIT_KV_PAIRS as u32;
/// The most query heads of a KV head with which clusters may have more than two blocks.
const CLUSTER_GROUP_MAX: u32 = 4;
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
    /// Query heads of a KV head.
    pub(super) group: u32,
    pub(super) multiprocessors: u32,
    /// Whether there are kernels that compute splits in groups, and the device has room for them.
    pub(super) has_groups: bool,
    /// How many clusters of each size of [`CLUSTERS`] the device runs at the same time.
    pub(super) clusters: [u32; CLUSTERS.len()],
}

/// The rows of a step, with what they read and write in a cache.
#[derive(Clone, Copy)]
pub(super) struct PlannedRows<'a> {
    pub(super) positions: &'a [u32],
    /// The block ids of row r begin at `blocks[table_starts[r]]`.
    pub(super) table_starts: &'a [u32],
    /// The block ids of each KV cache group that the plan serves.
    pub(super) groups: &'a [&'a [u32]],
    pub(super) block_tokens: usize,
    /// The blocks that the step's rows write.
    pub(super) written: &'a BlockSet,
    /// How many keys a row sees, its own included: [`NO_WINDOW`] for all.
    pub(super) window: u32,
}

impl PlannedRows<'_> {
    /// The first key that the first row of `queries` sees.
    fn first_key(&self, queries: &QueryTile) -> u32 {
        (queries.position + 1).saturating_sub(self.window)
    }

    /// The number of the first split of `queries`.
    fn first_split(&self, queries: &QueryTile) -> u32 {
        self.first_key(queries) / (TILE << queries.split_shift)
    }

    /// The number of splits of `queries`.
    fn count_splits(&self, queries: &QueryTile) -> u32 {
        count_splits(queries.position + queries.tokens - 1, queries.split_shift) - self.first_split(queries)
    }

    /// The blocks of a group whose keys the row of `queries` reads. The last one has the row's own
    /// key.
    fn blocks_read<'a>(&self, blocks: &'a [u32], queries: &QueryTile) -> &'a [u32] {
        let [first, last] =
            [self.first_key(queries), queries.position].map(|key| key as usize / self.block_tokens);
        &blocks[queries.table as usize..][first..=last]
    }

    /// Whether earlier steps have written all keys of the tile that begins at `position`, and this
    /// step writes none of their blocks.
    fn is_old(&self, queries: &QueryTile, position: u32) -> bool {
        let end = position + TILE;
        let first = position.max(self.first_key(queries));
        let entries = first as usize / self.block_tokens..(end as usize).div_ceil(self.block_tokens);
        end <= queries.position
            && self.groups.iter().all(|blocks| {
                let mut read = blocks[queries.table as usize..][entries.clone()].iter();
                read.all(|&block| !self.written.contains(block as usize))
            })
    }
}

/// A split of a row at `position` has `TILE << split_shift(position, window)` keys.
pub(super) fn split_shift(position: u32, window: u32) -> u32 {
    let shift = |parts: u32| parts.next_power_of_two().trailing_zeros();
    let of_all = shift(position / (TILE * SPLITS_MAX) + 1);
    if window >= NO_WINDOW {
        return of_all;
    }
    // The keys that a query tile sees begin and end inside of splits, so they touch two splits more
    // than they fill.
    of_all.min(shift((window + SPLIT_TOKENS_MAX).div_ceil(TILE * (SPLITS_MAX - 2))))
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
        self.merge = if let Some(blocks) = self.group_blocks(limits) {
            SplitMerge::Groups { blocks }
        } else if self.fills_device(limits) {
            if self.takes_two_groups(limits) { SplitMerge::TwoGroups } else { SplitMerge::Block }
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

    /// How many blocks a row and KV head have, if groups are the fastest for these rows. Each of
    /// these blocks needs a multiprocessor, and computes a round of splits in some 4 us.
    ///
    /// - One block with one round is faster than a block for each split and the merge kernel. With
    ///   two rounds, it is faster if there are blocks for two fifths of the device. On an H200, 8
    ///   rows of an 8B model take 5.1 instead of 6.9 us at 190 keys and 9.7 instead of 9.9 at 512;
    ///   one row takes 8.2 instead of 4.3 at 512.
    /// - A cluster with one round is faster in a step, where the merge kernel is one launch more:
    ///   one row of that model decodes 1.5% faster at 300 keys and 4.4% at 1,500. With more than
    ///   [`CLUSTER_GROUP_MAX`] query heads on a KV head, larger clusters than of two are slower:
    ///   one row of 30B-A3B 1.9% at 700 keys.
    /// - A cluster with two rounds is faster if there are blocks for most of the device: 8 rows
    ///   decode 4.7% faster at 700 keys, and 4 rows 2.6% slower.
    fn group_blocks(&self, limits: AttentionPlanLimits) -> Option<u32> {
        const ROUND: u32 = ATTENTION_GROUPS as u32;
        let AttentionPlanLimits { kv_heads, group, multiprocessors, .. } = limits;
        let has_long_splits = self.split_tiles.iter().any(|all| all.queries.split_shift > 0);
        if !limits.has_groups || !self.has_lone_rows || has_long_splits {
            return None;
        }
        let rows = self.split_tiles.len();
        let splits = self.split_tiles.iter().map(|all| all.splits).max()?;
        // Of these, some have no row (`launch_bound`).
        let launched = launch_bound(rows) as u32 * kv_heads;
        let busy = rows as u32 * kv_heads;
        let rounds = if 5 * busy >= 2 * multiprocessors { 2 } else { 1 };
        if launched <= multiprocessors && splits <= rounds * ROUND {
            return Some(1);
        }
        let clusters_max = if group > CLUSTER_GROUP_MAX { 1 } else { CLUSTERS.len() };
        let clusters = CLUSTERS.iter().zip(limits.clusters).take(clusters_max);
        let fitting: Vec<u32> = clusters
            .filter(|&(blocks, fitting)| launched <= fitting.min(multiprocessors / blocks))
            .map(|(&blocks, _)| blocks)
            .collect();
        let one_round = fitting.iter().find(|&blocks| splits <= blocks * ROUND);
        let two_rounds = fitting
            .last()
            .filter(|&blocks| splits <= 2 * blocks * ROUND && 5 * busy * blocks >= 4 * multiprocessors);
        one_round.or(two_rounds).copied()
    }

    /// Whether blocks compute two splits at a time, if the rows fill the device and two of these
    /// blocks share a multiprocessor. A decode step waits for the last tile of a row. On an H200,
    /// 32 rows of an 8B model decode 1.7% faster at 128 to 256 keys than with one split at a time,
    /// 0.6% at 900 to 1,028, and 0.3% slower at 1,500 to 1,628. Launches of attention alone, which
    /// overlap, are up to 28% slower (24 rows at 190 keys).
    fn takes_two_groups(&self, limits: AttentionPlanLimits) -> bool {
        const SPLITS: u32 = 16;
        let launched = launch_bound(self.split_tiles.len()) as u32 * limits.kv_heads;
        limits.has_groups
            && self.has_lone_rows
            && (limits.multiprocessors + 1..=2 * limits.multiprocessors).contains(&launched)
            && self.split_tiles.iter().all(|all| all.queries.split_shift == 0 && all.splits <= SPLITS)
    }

    /// Whether each query tile is one row, and the row is the only one that writes blocks which it
    /// reads.
    fn are_lone(&self, rows: PlannedRows<'_>) -> bool {
        let queries = || self.split_tiles.iter().map(|all| &all.queries);
        rows.groups.iter().all(|blocks| {
            let mut own: Vec<u32> = Vec::with_capacity(self.split_tiles.len());
            let are_lone = queries().all(|queries| {
                let read = rows.blocks_read(blocks, queries);
                let (last, others) = read.split_last().expect("a row reads its own key");
                own.push(*last);
                queries.tokens == 1 && others.iter().all(|&block| !rows.written.contains(block as usize))
            });
            own.sort_unstable();
            are_lone && own.windows(2).all(|pair| pair[0] != pair[1])
        })
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
            let shift = split_shift(positions[start], rows.window);
            let continues = |row: usize| {
                positions[row] == positions[start] + (row - start) as u32
                    && table_starts[row] == table_starts[start]
                    && split_shift(positions[row], rows.window) == shift
            };
            let end = (start + 1..positions.len()).find(|&row| !continues(row)).unwrap_or(positions.len());
            let run = QueryTile {
                row: start as u32,
                tokens: (end - start) as u32,
                position: positions[start],
                table: table_starts[start],
                split_shift: shift,
            };
            let partials = run.tokens * rows.count_splits(&run);
            if end - start >= PREFILL_TOKENS_MIN || partials > limits.partials_max {
                self.prefill_tiles.extend(split_into_tiles(run, limits.prefill_tokens));
            } else if self.partials + partials <= partials_max {
                self.split(run, rows, limits.split_tokens);
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
            let first_tile = rows.first_key(&all.queries) / TILE * TILE;
            self.splits.extend((0..all.splits).step_by(step as usize).map(|number| {
                let first = all.first + number;
                let first_key = first_tile.max(first * (TILE << all.queries.split_shift));
                KvSplits {
                    first,
                    splits: step,
                    partial: all.partial + number * all.queries.tokens,
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

    fn split(&mut self, run: QueryTile, rows: PlannedRows<'_>, tokens: usize) {
        for queries in split_into_tiles(run, tokens) {
            let (first, splits) = (rows.first_split(&queries), rows.count_splits(&queries));
            let partial = self.partials;
            self.split_tiles.push(KvSplits {
                queries,
                first,
                splits,
                partial,
                is_first_tile_old: 0,
                unused: [0; 3],
            });
            // A later token may not see the first split. That split then adds nothing.
            self.merges.extend((0..queries.tokens).map(|token| PartialMerge {
                row: queries.row + token,
                partial: partial + token,
                stride: queries.tokens,
                splits: count_splits(queries.position + token, queries.split_shift) - first,
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

/// The number of splits up to the one with `position`.
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
mod tests;
