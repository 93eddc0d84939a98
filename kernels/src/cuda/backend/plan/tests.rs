// SPDX-License-Identifier: Apache-2.0

use super::*;
use proptest::prelude::*;

/// Of a device so large that no rows fill it.
const LIMITS: AttentionPlanLimits = AttentionPlanLimits {
    split_tokens: 4,
    prefill_tokens: 16,
    partials_max: 400,
    kv_heads: 8,
    multiprocessors: 1_000_000,
    group: 4,
    has_groups: false,
    clusters: [0; CLUSTERS.len()],
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
    /// The tables of a second group, which has a block for each block of the first one.
    second: Vec<u32>,
    written: BlockSet,
    /// 0 for none.
    window: u32,
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

    fn with_window(self, window: u32) -> Self {
        Self { window, ..self }
    }

    fn window(&self) -> u32 {
        if self.window == 0 { NO_WINDOW } else { self.window }
    }

    /// The plans of all rows.
    fn plans(&self, limits: AttentionPlanLimits) -> Vec<AttentionPlan> {
        let (mut plans, mut first) = (Vec::new(), 0);
        while first < self.positions.len() {
            let mut plan = AttentionPlan::default();
            let planned = PlannedRows {
                positions: &self.positions,
                table_starts: &self.table_starts,
                groups: if self.second.is_empty() { &[&self.blocks] } else { &[&self.blocks, &self.second] },
                block_tokens: BLOCK_TOKENS,
                written: &self.written,
                window: self.window(),
            };
            let end = plan.build(first, planned, limits);
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
        let shift = split_shift(position, NO_WINDOW);
        assert!(count_splits(position, shift) <= SPLITS_MAX, "position {position}");
        assert!(shift == 0 || count_splits(position, shift - 1) > SPLITS_MAX, "position {position}");
    }
}

#[test]
fn splits_grow_with_the_window_and_not_beyond_it() {
    for (window, shift) in [(1, 0), (512, 0), (1_024, 0), (1_904, 0), (1_905, 1), (4_096, 2), (8_192, 3)] {
        assert_eq!(split_shift(1_000_000, window), shift, "window of {window}");
        assert_eq!(split_shift(100, window), 0, "window of {window}");
    }
    let tile = |position, window| {
        let rows = Rows::new(&[(position, 16)]).with_window(window);
        let limits = AttentionPlanLimits { split_tokens: 16, partials_max: u32::MAX, ..LIMITS };
        rows.plans(limits)[0].split_tiles[0]
    };
    for window in (1..70).chain([500, 1_903, 1_904, 1_905, 3_823, 3_824, 3_825, 8_000]) {
        for position in (0..300).chain(9_000..9_200) {
            let all = tile(position, window);
            assert!(all.splits <= SPLITS_MAX, "window of {window} at {position}: {} splits", all.splits);
            assert_eq!(all.first, (position + 1).saturating_sub(window) / (TILE << all.queries.split_shift));
        }
    }
}

#[test]
fn a_row_with_a_window_is_split_from_its_first_key_on() {
    let plans = Rows::new(&[(700, 2)]).with_window(100).plans(LIMITS);
    let [plan] = &plans[..] else { panic!("{} plans", plans.len()) };
    // The first row sees keys 601 to 700, the second one 602 to 701.
    let splits: Vec<_> = plan.splits.iter().map(|block| (block.first, block.partial)).collect();
    assert_eq!(splits, [(9, 0), (10, 2)]);
    let merge = |row| PartialMerge { row, partial: row, stride: 2, splits: 2 };
    assert_eq!(plan.merges, [merge(0), merge(1)]);
    // Other rows write blocks that the window has left.
    let mut rows = Rows::new(&[(700, 1)]).with_window(100);
    rows.written.insert(36);
    assert!(rows.plans(LIMITS)[0].has_lone_rows);
    rows.written.insert(37);
    assert!(!rows.plans(LIMITS)[0].has_lone_rows);
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
fn old_tiles_and_lone_rows_are_so_in_every_group() {
    let lone = |rows: &Rows| {
        let plan = &rows.plans(LIMITS)[0];
        (plan.splits[0].is_first_tile_old, plan.has_lone_rows)
    };
    const SECOND: u32 = 10_000;
    let mut rows = Rows::new(&[(150, 1)]);
    rows.second = rows.blocks.iter().map(|&block| SECOND + block).collect();
    rows.written.insert(SECOND as usize + 150 / BLOCK_TOKENS);
    assert_eq!(lone(&rows), (1, true));
    // Another row writes keys 16 to 31 of the sequence, in the second group alone.
    rows.written.insert(SECOND as usize + 1);
    assert_eq!(lone(&rows), (0, false));
}

#[test]
fn a_tile_is_old_if_no_key_of_the_window_is_written() {
    // The row sees keys 601 to 700. Block 36 has keys 576 to 591, and block 37 keys 592 to 607.
    let old = |written: usize| {
        let mut rows = Rows::new(&[(700, 1)]).with_window(100);
        rows.written.insert(written);
        rows.plans(LIMITS)[0].splits[0].is_first_tile_old
    };
    assert_eq!([36, 37].map(old), [1, 0]);
}

/// An H200, without clusters.
const GROUPS: AttentionPlanLimits = AttentionPlanLimits { multiprocessors: 132, has_groups: true, ..LIMITS };

#[test]
fn groups_compute_few_short_rows() {
    let merge = |runs: &[(u32, u32)]| Rows::new(runs).plans(GROUPS)[0].merge;
    let groups = SplitMerge::Groups { blocks: 1 };
    assert_eq!(merge(&[(255, 1)]), groups);
    // A second round is slower, unless many multiprocessors have one.
    assert_eq!(merge(&[(256, 1)]), SplitMerge::Kernel);
    assert_eq!(merge(&[(256, 1); 7]), groups);
    assert_eq!(merge(&[(512, 1); 7]), SplitMerge::Kernel);
    assert_eq!(merge(&[(190, 1); 16]), groups);
    // More blocks than multiprocessors: two of them on one.
    assert_eq!(merge(&[(190, 1); 17]), SplitMerge::TwoGroups);
    // Two rows of one sequence.
    assert_eq!(merge(&[(190, 1), (40, 2)]), SplitMerge::Kernel);
}

#[test]
fn two_groups_compute_rows_of_up_to_1024_keys_if_they_fill_the_device() {
    let merge = |runs: &[(u32, u32)]| Rows::new(runs).plans(GROUPS)[0].merge;
    assert_eq!(merge(&[(1023, 1); 32]), SplitMerge::TwoGroups);
    assert_eq!(merge(&[(1024, 1); 32]), SplitMerge::Block);
    // A block for each multiprocessor.
    assert_eq!(merge(&[(600, 1); 16]), SplitMerge::Block);
    // Launches have blocks for 64 rows then, more than two on each multiprocessor.
    assert_eq!(merge(&[(190, 1); 33]), SplitMerge::Block);
    // Two rows of each sequence.
    assert_eq!(merge(&[(190, 2); 32]), SplitMerge::Block);
    // One row is much longer than the others.
    let mut uneven = [(20, 1); 32];
    uneven[0] = (1000, 1);
    assert_eq!(merge(&uneven), SplitMerge::Kernel);
    let without = AttentionPlanLimits { has_groups: false, ..GROUPS };
    assert_eq!(Rows::new(&[(190, 1); 32]).plans(without)[0].merge, SplitMerge::Block);
}

#[test]
fn clusters_compute_few_rows_of_up_to_2048_keys() {
    // An H200 has so many clusters of 2, 4 and 8 blocks with a multiprocessor each.
    let limits = AttentionPlanLimits { clusters: [66, 30, 15], ..GROUPS };
    let merge = |runs: &[(u32, u32)]| Rows::new(runs).plans(limits)[0].merge;
    let groups = |blocks: u32| SplitMerge::Groups { blocks };
    assert_eq!(merge(&[(255, 1)]), groups(1));
    assert_eq!(merge(&[(256, 1)]), groups(2));
    assert_eq!(merge(&[(511, 1)]), groups(2));
    assert_eq!(merge(&[(512, 1)]), groups(4));
    assert_eq!(merge(&[(1024, 1)]), groups(8));
    assert_eq!(merge(&[(2047, 1)]), groups(8));
    // A split has more than one tile.
    assert_eq!(merge(&[(2048, 1)]), SplitMerge::Kernel);
    // Eight KV heads of two rows do not have clusters of eight, and two rounds would leave half of
    // the device without work.
    assert_eq!(merge(&[(1024, 1); 2]), SplitMerge::Kernel);
    // Two rounds of clusters of two fill the device.
    assert_eq!(merge(&[(700, 1); 8]), groups(2));
    // As many blocks are launched for five rows, but three of eight have no row.
    assert_eq!(merge(&[(700, 1); 5]), SplitMerge::Kernel);
    assert_eq!(merge(&[(1024, 1); 8]), SplitMerge::Kernel);
    let many_heads = AttentionPlanLimits { group: 8, ..limits };
    assert_eq!(Rows::new(&[(256, 1)]).plans(many_heads)[0].merge, groups(2));
    assert_eq!(Rows::new(&[(512, 1)]).plans(many_heads)[0].merge, SplitMerge::Kernel);
}

#[test]
fn one_long_row_leaves_its_heads_to_another_kernel() {
    let prepares_heads = |runs: &[(u32, u32)]| Rows::new(runs).plans(GROUPS)[0].prepares_heads();
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
        clusters in prop::array::uniform3(0_u32..100),
        window in prop_oneof![Just(0), 1_u32..300, 1_u32..5000],
    ) {
        let rows = Rows::new(&runs).with_window(window);
        let mut seen = vec![0; rows.positions.len()];
        for plan in rows.plans(AttentionPlanLimits { multiprocessors, has_groups, clusters, ..LIMITS }) {
            check(&plan, &rows, &mut seen)?;
        }
        prop_assert!(seen.iter().all(|&times| times == 1));
    }
}

/// Checks a plan and counts its rows in `seen`.
fn check(plan: &AttentionPlan, rows: &Rows, seen: &mut [u32]) -> Result<(), TestCaseError> {
    let (positions, starts) = (&rows.positions, &rows.table_starts);
    let split: Vec<QueryTile> = plan.split_tiles.iter().map(|all| all.queries).collect();
    for (query_tiles, tokens) in [(&split, 4), (&plan.prefill_tiles, 16)] {
        for queries in query_tiles {
            prop_assert!(queries.tokens as usize <= tokens);
            for token in 0..queries.tokens {
                let row = (queries.row + token) as usize;
                seen[row] += 1;
                prop_assert_eq!(positions[row], queries.position + token);
                prop_assert_eq!(starts[row], queries.table);
                prop_assert_eq!(split_shift(positions[row], rows.window()), queries.split_shift);
            }
        }
    }
    for block in &plan.splits {
        let (queries, tiles) = (&block.queries, block.splits << block.queries.split_shift);
        let first = (queries.position + 1).saturating_sub(rows.window()) / (TILE << queries.split_shift);
        let all = count_splits(queries.position + queries.tokens - 1, queries.split_shift) - first;
        prop_assert!(block.first >= first);
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
        let position = positions[merge.row as usize];
        let tile = split.iter().find(|tile| (tile.row..tile.row + tile.tokens).contains(&merge.row));
        let first = (tile.expect("a tile of the row").position + 1).saturating_sub(rows.window());
        let shift = split_shift(position, rows.window());
        prop_assert_eq!(merge.splits, count_splits(position, shift) - first / (TILE << shift));
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
