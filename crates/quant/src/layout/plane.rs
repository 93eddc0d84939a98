// SPDX-License-Identifier: Apache-2.0

//! [`Plane`]: one field of a block format, for the 16 rows of a tile.

use super::{PIECE_BYTES, TILE_COLS, TILE_ROWS};
use crate::DType;

/// Lanes that access shared memory in one phase: eight lanes of 16 bytes cover all 32 banks.
const LANES_PER_PHASE: usize = 8;

/// The field at bytes `offset..offset + len` of each block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plane {
    pub offset: usize,
    pub len: usize,
    /// Blocks of one row in a tile.
    pub blocks: usize,
}

impl Plane {
    /// Bytes of one row in a tile: 2, 4 or 12, or a power of two of pieces up to 16.
    pub const fn row_bytes(&self) -> usize {
        self.len * self.blocks
    }

    /// Offset in the plane of byte `at` of the field, for block `block` of row `row`. The bytes of
    /// a piece stay contiguous.
    pub fn position(&self, row: usize, block: usize, at: usize) -> usize {
        let byte = block * self.len + at;
        let pieces = self.row_bytes() / PIECE_BYTES;
        if pieces < 2 {
            return row * self.row_bytes() + byte;
        }
        // Rows that start at the same bank would conflict, so each gets another permutation.
        let rows_per_group = (LANES_PER_PHASE / pieces).max(1);
        let turn = row / rows_per_group % pieces.min(LANES_PER_PHASE);
        let piece = (byte / PIECE_BYTES) ^ turn;
        row * self.row_bytes() + piece * PIECE_BYTES + byte % PIECE_BYTES
    }

    /// Start and length of the contiguous runs of the field, each at most one piece.
    pub(super) fn runs(&self) -> impl Iterator<Item = (usize, usize)> {
        let step = self.len.min(PIECE_BYTES);
        (0..self.len).step_by(step).map(move |from| (from, step))
    }
}

/// The planes of a type, in the order of a tile. Empty for F32, F16 and BF16, which have no tiles.
/// `None` for a type without a layout.
pub fn planes(dtype: DType) -> Option<&'static [Plane]> {
    const fn small(offset: usize, len: usize) -> Plane {
        Plane { offset, len, blocks: TILE_COLS / 32 }
    }
    const fn large(offset: usize, len: usize) -> Plane {
        Plane { offset, len, blocks: 1 }
    }
    Some(match dtype {
        DType::F32 | DType::F16 | DType::BF16 => &[],
        // Quants, scale.
        DType::Q8_0 => const { &[small(2, 32), small(0, 2)] },
        DType::Q4_0 => const { &[small(2, 16), small(0, 2)] },
        // Quants, scale and minimum.
        DType::Q4_1 => const { &[small(4, 16), small(0, 4)] },
        // Quants, fifth bits, scale (and minimum).
        DType::Q5_0 => const { &[small(6, 16), small(2, 4), small(0, 2)] },
        DType::Q5_1 => const { &[small(8, 16), small(4, 4), small(0, 4)] },
        // Quants, sub-scales and minima, scale and minimum.
        DType::Q2_K => const { &[large(16, 64), large(0, 16), large(80, 4)] },
        // Low bits, high bits, sub-scales, scale.
        DType::Q3_K => const { &[large(32, 64), large(0, 32), large(96, 12), large(108, 2)] },
        // Quants, (fifth bits,) scale and minimum with their sub-scales.
        DType::Q4_K => const { &[large(16, 128), large(0, 16)] },
        DType::Q5_K => const { &[large(48, 128), large(16, 32), large(0, 16)] },
        // Low bits, high bits, sub-scales, scale.
        DType::Q6_K => const { &[large(0, 128), large(128, 64), large(192, 16), large(208, 2)] },
        _ => return None,
    })
}

const _: () = assert!(TILE_ROWS.is_multiple_of(LANES_PER_PHASE));

#[cfg(test)]
mod tests {
    use super::*;

    /// Each byte of a block is in exactly one plane, and planes start at multiples of 16.
    #[test]
    fn planes_cover_the_block() {
        for dtype in DType::ALL {
            let Some(planes) = planes(dtype).filter(|planes| !planes.is_empty()) else { continue };
            let mut covered = vec![0; dtype.block_bytes()];
            for plane in planes {
                assert_eq!(plane.blocks * dtype.block_len(), TILE_COLS, "{dtype}");
                assert_eq!(TILE_ROWS * plane.row_bytes() % PIECE_BYTES, 0, "{dtype}");
                covered[plane.offset..plane.offset + plane.len].iter_mut().for_each(|times| *times += 1);
            }
            assert!(covered.iter().all(|&times| times == 1), "{dtype}: {covered:?}");
        }
    }

    #[test]
    fn eight_rows_access_eight_bank_groups() {
        for dtype in DType::ALL {
            for plane in planes(dtype).unwrap_or_default() {
                if !plane.row_bytes().is_multiple_of(PIECE_BYTES) {
                    continue;
                }
                for (piece, first) in
                    (0..plane.row_bytes()).step_by(PIECE_BYTES).zip([0, 8].into_iter().cycle())
                {
                    let (block, at) = (piece / plane.len, piece % plane.len);
                    let mut groups: Vec<usize> = (first..first + 8)
                        .map(|row| plane.position(row, block, at) / PIECE_BYTES % 8)
                        .collect();
                    groups.sort();
                    assert_eq!(groups, (0..8).collect::<Vec<_>>(), "{dtype} piece {piece}");
                }
            }
        }
    }
}
