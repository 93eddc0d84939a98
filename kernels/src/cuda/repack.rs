// SPDX-License-Identifier: Apache-2.0

//! Launcher of repack.cu: converts rows of blocks to tiles and back, as `quant::layout` does on the
//! host.

use quant::layout::{TILE_ROWS, Tiles, planes};

use super::abi::elementwise::{RepackRowsToTiles, UnpackTilesToRows};
use super::launch::{KernelName, kernel_name, launch_kernel};
use super::module::image;
use super::planes::tile_planes;
use super::{CudaError, Device, DeviceView, DeviceViewMut, LaunchConfig, LazyModule, Stream};

const THREADS: u32 = 256;
/// The limit of a grid's second dimension.
const ROW_TILES_MAX: usize = 65_535;

pub struct RepackKernels(LazyModule);

impl RepackKernels {
    const REPACK: KernelName<RepackRowsToTiles> = kernel_name!("repack", "repack_rows_to_tiles");

    pub fn new(device: &Device) -> Self {
        Self(LazyModule::new(device, "repack", image!("repack")))
    }

    /// Loads the kernel of [`Self::repack`] now, so that the first launch does not.
    pub fn load(&self) -> Result<(), CudaError> {
        self.0.kernel(Self::REPACK.as_c_str()).map(drop)
    }

    /// Converts `raw`, rows as in the file at an even address, to tiles. A loader calls this
    /// function for parts of a tensor that begin at a multiple of 16 rows.
    pub fn repack(
        &self,
        stream: &Stream,
        shape: &Tiles,
        raw: DeviceView<'_, u8>,
        tiles: &mut DeviceViewMut<'_, u8>,
    ) -> Result<(), CudaError> {
        check_lengths(shape, raw.len(), tiles.len())?;
        if planes(shape.dtype()).is_none_or(<[_]>::is_empty) {
            return tiles.copy_from(stream, raw);
        }
        let Some(launch) = launch_shape(shape) else { return Ok(()) };
        let arguments = RepackRowsToTiles {
            planes: tile_planes(shape),
            raw: raw.address(),
            row_bytes: row_bytes(shape),
            rows: shape.rows() as i32,
            tiles: tiles.address(),
        };
        // SAFETY: block (c, r) writes tile r * col_tiles + c, inside `tiles`, and reads bytes of
        // `raw` below rows * row_bytes: lengths were checked.
        unsafe { launch_kernel(&self.0, Self::REPACK, stream, launch, &arguments) }
    }

    /// The inverse of [`Self::repack`].
    pub fn restore(
        &self,
        stream: &Stream,
        shape: &Tiles,
        tiles: DeviceView<'_, u8>,
        raw: &mut DeviceViewMut<'_, u8>,
    ) -> Result<(), CudaError> {
        check_lengths(shape, raw.len(), tiles.len())?;
        if planes(shape.dtype()).is_none_or(<[_]>::is_empty) {
            return raw.copy_from(stream, tiles);
        }
        let Some(launch) = launch_shape(shape) else { return Ok(()) };
        let arguments = UnpackTilesToRows {
            planes: tile_planes(shape),
            raw: raw.address(),
            row_bytes: row_bytes(shape),
            rows: shape.rows() as i32,
            tiles: tiles.address(),
        };
        let name = kernel_name!("repack", "unpack_tiles_to_rows");
        // SAFETY: as for `repack`, with input and output exchanged.
        unsafe { launch_kernel(&self.0, name, stream, launch, &arguments) }
    }
}

fn row_bytes(shape: &Tiles) -> i64 {
    (shape.raw_bytes() / shape.rows().max(1)) as i64
}

/// The launch of a repack kernel, or None if there is no tile.
fn launch_shape(shape: &Tiles) -> Option<LaunchConfig> {
    let grid = (shape.col_tiles() as u32, shape.row_tiles() as u32, 1);
    let launch =
        LaunchConfig { grid, block: THREADS, shared_bytes: 0, overlaps_predecessor: false, cluster: 1 };
    (grid.0 > 0 && grid.1 > 0).then_some(launch)
}

fn check_lengths(shape: &Tiles, raw: usize, tiles: usize) -> Result<(), CudaError> {
    for (what, found, expected) in
        [("rows to repack", raw, shape.raw_bytes()), ("tiles", tiles, shape.bytes())]
    {
        if found != expected {
            return Err(CudaError::Length { what, found, expected });
        }
    }
    if shape.row_tiles() > ROW_TILES_MAX {
        let (found, expected) = (shape.row_tiles() * TILE_ROWS, ROW_TILES_MAX * TILE_ROWS);
        return Err(CudaError::Length { what: "rows of one repack", found, expected });
    }
    Ok(())
}
