//! Launcher of repack.cu: block bytes to tiles and back, as `quant::layout` does it on the host.

use std::ffi::CStr;

use quant::layout::{TILE_ROWS, Tiles, planes};

use super::module::{arguments, image};
use super::planes::tile_planes;
use super::{CudaError, Device, Family, Launch, Stream, View, ViewMut};

const THREADS: u32 = 256;

const REPACK: &CStr = c"repack_rows_to_tiles";

pub struct RepackKernels(Family);

impl RepackKernels {
    pub fn new(device: &Device) -> Self {
        Self(Family::new(device, "repack", image!("repack")))
    }

    /// Brings the kernel of [`Self::repack`] to the device now rather than with the first launch.
    pub fn load(&self) -> Result<(), CudaError> {
        self.0.kernel(REPACK).map(drop)
    }

    /// `raw` holds the rows of `tiles` as the file has them, at an even address; a loader calls this for runs of rows that
    /// begin at multiples of 16.
    pub fn repack(
        &self,
        stream: &Stream,
        shape: &Tiles,
        raw: View<'_, u8>,
        tiles: &mut ViewMut<'_, u8>,
    ) -> Result<(), CudaError> {
        check(shape, raw.len(), tiles.len())?;
        if planes(shape.dtype()).is_none_or(<[_]>::is_empty) {
            return tiles.copy_from(stream, raw);
        }
        self.launch(stream, REPACK, shape, raw.address(), tiles.address())
    }

    /// The inverse of [`Self::repack`].
    pub fn restore(
        &self,
        stream: &Stream,
        shape: &Tiles,
        tiles: View<'_, u8>,
        raw: &mut ViewMut<'_, u8>,
    ) -> Result<(), CudaError> {
        check(shape, raw.len(), tiles.len())?;
        if planes(shape.dtype()).is_none_or(<[_]>::is_empty) {
            return raw.copy_from(stream, tiles);
        }
        self.launch(stream, c"unpack_tiles_to_rows", shape, raw.address(), tiles.address())
    }

    fn launch(
        &self,
        stream: &Stream,
        name: &'static CStr,
        shape: &Tiles,
        raw: u64,
        tiles: u64,
    ) -> Result<(), CudaError> {
        let planes = tile_planes(shape);
        let row_bytes = (shape.raw_bytes() / shape.rows().max(1)) as i64;
        let rows = shape.rows() as i32;
        let grid = (shape.col_tiles() as u32, shape.row_tiles() as u32, 1);
        if grid.0 == 0 || grid.1 == 0 {
            return Ok(());
        }
        let launch = Launch { grid, block: THREADS, shared_bytes: 0, overlaps_predecessor: false };
        let kernel = self.0.kernel(name)?;
        // SAFETY: both kernels take (TilePlanes, uint8_t *raw, int64_t, int, uint8_t *tiles). Block (c, r) touches tile
        // r * col_tiles + c, inside `tiles`, and bytes of `raw` below rows * row_bytes: lengths were checked.
        unsafe { kernel.launch(stream, launch, arguments![planes, raw, row_bytes, rows, tiles]) }
    }
}

fn check(shape: &Tiles, raw: usize, tiles: usize) -> Result<(), CudaError> {
    for (what, found, expected) in
        [("rows to repack", raw, shape.raw_bytes()), ("tiles", tiles, shape.bytes())]
    {
        if found != expected {
            return Err(CudaError::Length { what, found, expected });
        }
    }
    // A grid's second dimension.
    if shape.row_tiles() > 65_535 {
        let (found, expected) = (shape.row_tiles() * TILE_ROWS, 65_535 * TILE_ROWS);
        return Err(CudaError::Length { what: "rows of one repack", found, expected });
    }
    Ok(())
}
