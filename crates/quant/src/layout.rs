// SPDX-License-Identifier: Apache-2.0

//! Memory layouts of a matrix. Layout 0 is that of a GGUF file: block bytes, row after row. Layout
//! 1 has tiles, for GPUs.
//!
//! ```text
//! matrix:  | tile 0,0 | tile 0,1 | ..  (rows 0 to 15)  | tile 1,0 | tile 1,1 | ..  (rows 16 to 31)
//! tile:    16 rows x 256 values   = | plane: quants | plane: high bits | plane: scales |
//! plane:   one field of the block = | row 0: 16-byte pieces | row 1 | .. | row 15 |
//! ```
//!
//! 1. The tiles of 16 rows are contiguous, so that one bulk copy loads a run of columns.
//! 2. In each row, the order of the 16-byte pieces of a plane is permuted (XOR swizzle). Eight
//!    lanes that read the same piece of eight rows then access eight different groups of shared
//!    memory banks.
//! 3. Rows are padded with zero bytes to a multiple of 16, columns to a multiple of 256.
//! 4. Layout 1 is a permutation of the bytes of layout 0: [`Tiles::restore`] inverts
//!    [`Tiles::repack`].
//! 5. F32, F16 and BF16 have the same bytes in both layouts.

mod plane;

use crate::{DType, SizeError};
pub use plane::{Plane, planes};

/// The layout of the file: block bytes, row after row.
pub const LAYOUT_GGML: u32 = 0;
/// Tiles of 16 rows by 256 values.
pub const LAYOUT_TILES: u32 = 1;

pub const TILE_ROWS: usize = 16;
pub const TILE_COLS: usize = 256;
/// The unit of bulk copies, of vector loads and of the permutation inside a plane.
pub const PIECE_BYTES: usize = 16;

/// Why a matrix cannot be converted between layouts.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    #[error(
        "tensor type {dtype} has no tile layout: only F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and Q2_K to Q6_K do"
    )]
    Unsupported { dtype: DType },
    #[error(transparent)]
    Size(#[from] SizeError),
    #[error(
        "a matrix of {rows} x {cols} values of {dtype} is {expected} bytes {form}, but {found} were given"
    )]
    Bytes { dtype: DType, cols: usize, rows: usize, form: &'static str, expected: u64, found: usize },
    #[error("row {row} is out of range: there are {rows}")]
    Row { row: usize, rows: usize },
}

/// The tile layout of a matrix of `rows` rows of `cols` values. Its sizes are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    dtype: DType,
    cols: usize,
    rows: usize,
    row_bytes: usize,
    /// Empty for types with the same bytes in both layouts.
    planes: &'static [Plane],
}

impl Tiles {
    pub fn new(dtype: DType, cols: usize, rows: usize) -> Result<Self, LayoutError> {
        let planes = planes(dtype).ok_or(LayoutError::Unsupported { dtype })?;
        let row_bytes = dtype.row_bytes(cols as u64)?;
        // The largest size that the methods compute: all rows padded to whole tiles.
        let overflow = SizeError::Overflow { dtype, values: cols as u64 };
        (cols as u64)
            .checked_add(TILE_COLS as u64)
            .and_then(|cols| cols.checked_mul((rows as u64).checked_add(TILE_ROWS as u64)?)?.checked_mul(4))
            .filter(|&bytes| usize::try_from(bytes).is_ok())
            .ok_or(overflow)?;
        Ok(Self { dtype, cols, rows, row_bytes: row_bytes as usize, planes })
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of the matrix in layout 0.
    pub fn raw_bytes(&self) -> usize {
        self.row_bytes * self.rows
    }

    /// Bytes of the matrix in layout 1.
    pub fn bytes(&self) -> usize {
        if self.planes.is_empty() { self.raw_bytes() } else { self.row_tiles() * self.row_tile_bytes() }
    }

    /// Groups of 16 rows.
    pub fn row_tiles(&self) -> usize {
        self.rows.div_ceil(TILE_ROWS)
    }

    /// Tiles across a row.
    pub fn col_tiles(&self) -> usize {
        self.cols.div_ceil(TILE_COLS)
    }

    /// Bytes of one tile. 0 for types with the same bytes in both layouts.
    pub fn tile_bytes(&self) -> usize {
        self.planes.iter().map(|plane| TILE_ROWS * plane.row_bytes()).sum()
    }

    /// Bytes of the tiles of 16 rows.
    pub fn row_tile_bytes(&self) -> usize {
        self.col_tiles() * self.tile_bytes()
    }

    /// Calls `copy` for each contiguous run of bytes of `row`, with its offset in the row, its
    /// offset in layout 1 and its length.
    fn runs(&self, row: usize, mut copy: impl FnMut(usize, usize, usize)) {
        let block_bytes = self.dtype.block_bytes();
        let blocks = self.cols / self.dtype.block_len();
        let blocks_per_tile = TILE_COLS / self.dtype.block_len();
        let row_base = row / TILE_ROWS * self.row_tile_bytes();
        for block in 0..blocks {
            let mut plane_base = row_base + block / blocks_per_tile * self.tile_bytes();
            for plane in self.planes {
                for (from, len) in plane.runs() {
                    let position = plane.position(row % TILE_ROWS, block % blocks_per_tile, from);
                    copy(block * block_bytes + plane.offset + from, plane_base + position, len);
                }
                plane_base += TILE_ROWS * plane.row_bytes();
            }
        }
    }

    fn check(&self, form: &'static str, expected: usize, found: usize) -> Result<(), LayoutError> {
        let Self { dtype, cols, rows, .. } = *self;
        if expected != found {
            return Err(LayoutError::Bytes { dtype, cols, rows, form, expected: expected as u64, found });
        }
        Ok(())
    }

    /// Converts layout 0 to layout 1. Padding is zero.
    pub fn repack(&self, raw: &[u8], tiles: &mut [u8]) -> Result<(), LayoutError> {
        self.check("in the file's layout", self.raw_bytes(), raw.len())?;
        self.check("in tiles", self.bytes(), tiles.len())?;
        if self.planes.is_empty() {
            tiles.copy_from_slice(raw);
            return Ok(());
        }
        tiles.fill(0);
        for (row, raw) in raw.chunks_exact(self.row_bytes.max(1)).enumerate() {
            self.runs(row, |from, to, len| tiles[to..to + len].copy_from_slice(&raw[from..from + len]));
        }
        Ok(())
    }

    /// Converts layout 1 to layout 0.
    pub fn restore(&self, tiles: &[u8], raw: &mut [u8]) -> Result<(), LayoutError> {
        self.check("in the file's layout", self.raw_bytes(), raw.len())?;
        for (row, raw) in raw.chunks_exact_mut(self.row_bytes.max(1)).enumerate() {
            self.gather(tiles, row, raw)?;
        }
        Ok(())
    }

    /// Copies the block bytes of one row out of layout 1.
    pub fn gather(&self, tiles: &[u8], row: usize, raw: &mut [u8]) -> Result<(), LayoutError> {
        self.check("in tiles", self.bytes(), tiles.len())?;
        if row >= self.rows {
            return Err(LayoutError::Row { row, rows: self.rows });
        }
        if raw.len() != self.row_bytes {
            let one = Self { rows: 1, ..*self };
            return one.check("in the file's layout", self.row_bytes, raw.len());
        }
        if self.planes.is_empty() {
            raw.copy_from_slice(&tiles[row * self.row_bytes..][..self.row_bytes]);
        }
        self.runs(row, |to, from, len| raw[to..to + len].copy_from_slice(&tiles[from..from + len]));
        Ok(())
    }
}
