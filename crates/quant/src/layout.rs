//! How a matrix stands in memory. Layout 0: block bytes row after row, as in a GGUF file. Layout 1: tiles for GPUs.
//!
//! A tile is 16 rows by 256 values, and tiles of the same rows follow each other: whole columns of work are contiguous,
//! so that one bulk copy brings them, and a warp has one row per lane. Inside a tile stand planes, one per field of the
//! block format: quants of 16 rows, then high bits, then scales. A row's part of a plane is cut into pieces of 16 bytes,
//! whose order is permuted by the row so that eight lanes that read the same piece of eight rows meet eight different
//! banks of shared memory. Rows are padded with zero bytes to a multiple of 16, columns to one of 256.
//!
//! Layout 1 is a permutation of layout 0's bytes: nothing is computed, and [`restore`] undoes [`repack`]. F32, F16 and
//! BF16 are the same in both.

mod plane;

use crate::{DType, SizeError};
pub use plane::{Plane, planes};

/// Block bytes as they stand in the file.
pub const LAYOUT_GGML: u32 = 0;
/// Tiles of 16 rows by 256 values.
pub const LAYOUT_TILES: u32 = 1;

pub const TILE_ROWS: usize = 16;
pub const TILE_COLS: usize = 256;
/// What bulk copies, 16-byte loads and the planes' permutation work in.
pub const PIECE_BYTES: usize = 16;

/// Why a matrix was not laid out.
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
    #[error("row {row} is beyond the {rows} there are")]
    Row { row: usize, rows: usize },
}

/// A matrix whose sizes are checked: `rows` rows of `cols` values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    dtype: DType,
    cols: usize,
    rows: usize,
    row_bytes: usize,
    /// Empty for types that are the same in both layouts.
    planes: &'static [Plane],
}

impl Tiles {
    pub fn new(dtype: DType, cols: usize, rows: usize) -> Result<Self, LayoutError> {
        let planes = planes(dtype).ok_or(LayoutError::Unsupported { dtype })?;
        let row_bytes = dtype.row_bytes(cols as u64)?;
        // The largest size that is formed below: every row padded to whole tiles.
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

    /// Tiles that a row goes through.
    pub fn col_tiles(&self) -> usize {
        self.cols.div_ceil(TILE_COLS)
    }

    /// Bytes of one tile; 0 for types that are the same in both layouts.
    pub fn tile_bytes(&self) -> usize {
        self.planes.iter().map(|plane| TILE_ROWS * plane.row_bytes()).sum()
    }

    /// Bytes of the tiles of 16 rows.
    pub fn row_tile_bytes(&self) -> usize {
        self.col_tiles() * self.tile_bytes()
    }

    /// Calls `copy` with the raw position (in its row's bytes), the position in layout 1 and the length of every run of
    /// bytes of `row`.
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

    /// Layout 0 to layout 1. Padding becomes zero.
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

    /// Layout 1 to layout 0.
    pub fn restore(&self, tiles: &[u8], raw: &mut [u8]) -> Result<(), LayoutError> {
        self.check("in the file's layout", self.raw_bytes(), raw.len())?;
        for (row, raw) in raw.chunks_exact_mut(self.row_bytes.max(1)).enumerate() {
            self.gather(tiles, row, raw)?;
        }
        Ok(())
    }

    /// The block bytes of one row out of layout 1.
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
