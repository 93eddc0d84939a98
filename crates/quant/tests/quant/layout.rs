// SPDX-License-Identifier: Apache-2.0

//! Tests that layout 1 is a permutation with zero padding, for every type and for odd shapes.

use proptest::prelude::*;
use quant::layout::{LayoutError, TILE_COLS, TILE_ROWS, Tiles, planes};
use quant::{DType, SizeError};

fn tiled_types() -> Vec<DType> {
    DType::ALL.into_iter().filter(|&dtype| planes(dtype).is_some()).collect()
}

fn matrix() -> impl Strategy<Value = (Tiles, Vec<u8>)> {
    (proptest::sample::select(tiled_types()), 1..21_usize, 1..50_usize).prop_flat_map(
        |(dtype, blocks, rows)| {
            let tiles = Tiles::new(dtype, blocks * dtype.block_len(), rows).expect("a small matrix");
            (Just(tiles), proptest::collection::vec(any::<u8>(), tiles.raw_bytes()))
        },
    )
}

proptest! {
    #[test]
    fn restore_inverts_repack((tiles, raw) in matrix()) {
        let mut packed = vec![0xAA; tiles.bytes()];
        tiles.repack(&raw, &mut packed).unwrap();
        let mut back = vec![0x55; raw.len()];
        tiles.restore(&packed, &mut back).unwrap();
        prop_assert_eq!(&back, &raw);
        // The packed bytes are the same bytes in another order, plus zeros.
        let mut counts = [0_isize; 256];
        packed.iter().for_each(|&byte| counts[usize::from(byte)] += 1);
        raw.iter().for_each(|&byte| counts[usize::from(byte)] -= 1);
        counts[0] -= (packed.len() - raw.len()) as isize;
        prop_assert!(counts.iter().all(|&count| count == 0));
    }

    #[test]
    fn gather_finds_each_row((tiles, raw) in matrix()) {
        let mut packed = vec![0; tiles.bytes()];
        tiles.repack(&raw, &mut packed).unwrap();
        let row_bytes = raw.len() / tiles.rows();
        for (row, expected) in raw.chunks_exact(row_bytes).enumerate() {
            let mut found = vec![0; row_bytes];
            tiles.gather(&packed, row, &mut found).unwrap();
            prop_assert_eq!(found, expected);
        }
    }

    /// A group of 16 rows is contiguous and does not depend on other groups. Therefore a loader may
    /// divide a matrix between groups.
    #[test]
    fn row_groups_are_independent((tiles, raw) in matrix()) {
        let mut whole = vec![0; tiles.bytes()];
        tiles.repack(&raw, &mut whole).unwrap();
        let group = TILE_ROWS * raw.len() / tiles.rows();
        let mut parts = Vec::new();
        for raw in raw.chunks(group) {
            let rows = raw.len() / (group / TILE_ROWS);
            let tiles = Tiles::new(tiles.dtype(), tiles.cols(), rows).unwrap();
            let mut part = vec![0; tiles.bytes()];
            tiles.repack(raw, &mut part).unwrap();
            parts.extend(part);
        }
        prop_assert_eq!(parts, whole);
    }
}

/// Records the positions of two bytes. Manifests carry the layout's number, so a change of the
/// layout must fail a test.
#[test]
fn places_of_layout_1_are_fixed() {
    let tiles = Tiles::new(DType::Q4_K, 2 * TILE_COLS, 20).unwrap();
    assert_eq!((tiles.tile_bytes(), tiles.bytes()), (16 * 144, 2 * 2 * 16 * 144));
    let mut raw = vec![0; tiles.raw_bytes()];
    // In the second block of row 19: byte 35 of the 128 quant bytes (piece 2, byte 3), and byte 2
    // of the 16 bytes before them.
    let block = 19 * 288 + 144;
    raw[block + 16 + 35] = 1;
    raw[block + 2] = 2;
    let mut packed = vec![0; tiles.bytes()];
    tiles.repack(&raw, &mut packed).unwrap();
    let tile = 3 * 16 * 144;
    // The XOR swizzle moves piece 2 of the tile's row 3 to piece 2 ^ 3 = 1.
    assert_eq!(packed[tile + 3 * 128 + 16 + 3], 1);
    assert_eq!(packed[tile + 16 * 128 + 3 * 16 + 2], 2);
}

#[test]
fn whole_tiles_grow_by_nothing() {
    for dtype in tiled_types() {
        let tiles = Tiles::new(dtype, 4 * TILE_COLS, 3 * TILE_ROWS).unwrap();
        assert_eq!(tiles.bytes(), tiles.raw_bytes(), "{dtype}");
    }
}

#[test]
fn refusals_are_named() {
    assert_eq!(Tiles::new(DType::IQ4_NL, 256, 1), Err(LayoutError::Unsupported { dtype: DType::IQ4_NL }));
    assert!(matches!(
        Tiles::new(DType::Q4_K, 100, 1),
        Err(LayoutError::Size(SizeError::PartialBlock { values: 100, .. }))
    ));
    assert!(matches!(
        Tiles::new(DType::Q4_K, 1 << 40, 1 << 30),
        Err(LayoutError::Size(SizeError::Overflow { .. }))
    ));
    let tiles = Tiles::new(DType::Q8_0, 256, 2).unwrap();
    assert!(matches!(
        tiles.repack(&[0; 271], &mut vec![0; tiles.bytes()]),
        Err(LayoutError::Bytes { expected: 544, found: 271, .. })
    ));
    assert_eq!(
        tiles.gather(&vec![0; tiles.bytes()], 2, &mut [0; 272]),
        Err(LayoutError::Row { row: 2, rows: 2 })
    );
}
