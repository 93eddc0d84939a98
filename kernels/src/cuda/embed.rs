// SPDX-License-Identifier: Apache-2.0

//! Launcher of embed.cu: copies rows of the embedding table and converts them to f32.

use ops::{DRAWN_TOKEN, OpError};
use quant::layout::{TILE_COLS, Tiles, planes};

use super::abi::elementwise::{self, EmbedFloat, EmbedQuantized};
use super::error::device_error;
use super::launch::{kernel_name, launch_spread};
use super::module::image;
use super::planes::tile_planes;
use super::{Device, DeviceView, DeviceViewMut, LaunchConfig, LazyModule, Stream};

const OP: &str = "embed";
/// The limit of a grid's second dimension.
const TOKENS_MAX: usize = 65_535;

const _: () = assert!(elementwise::DRAWN_TOKEN == DRAWN_TOKEN);

pub struct EmbedKernels(LazyModule);

impl EmbedKernels {
    pub fn new(device: &Device) -> Self {
        Self(LazyModule::new(device, "embed", image!("embed")))
    }

    /// Computes `out[i] = table[tokens[i]]`, `[tokens, cols]`. `table` is in layout 1. An entry
    /// `DRAWN_TOKEN | n` of `tokens` stands for `drawn[n]`. The kernel skips a token beyond the
    /// table; callers check tokens, and each n, on the host.
    pub fn launch(
        &self,
        stream: &Stream,
        shape: &Tiles,
        table: DeviceView<'_, u8>,
        tokens: DeviceView<'_, u32>,
        drawn: DeviceView<'_, u32>,
        out: &mut DeviceViewMut<'_, f32>,
    ) -> Result<(), OpError> {
        let (cols, rows) = (shape.cols(), shape.rows());
        for (what, found, expected) in [
            ("bytes of the table", table.len(), shape.bytes()),
            ("misalignment of the table", (table.address() % 16) as usize, 0),
        ] {
            if found != expected {
                return Err(OpError::Shape { op: OP, what, found, expected });
            }
        }
        for (what, found, expected) in [
            ("values of the output", out.len(), tokens.len() * cols),
            ("rows", i32::MAX as usize, rows),
            ("tokens of one launch", TOKENS_MAX, tokens.len()),
        ] {
            if found < expected {
                return Err(OpError::Shape { op: OP, what, found, expected });
            }
        }
        if tokens.is_empty() || cols == 0 {
            return Ok(());
        }
        let launch = LaunchConfig {
            grid: (shape.col_tiles() as u32, tokens.len() as u32, 1),
            block: TILE_COLS as u32,
            shared_bytes: 0,
            // The first kernel of a step. Those behind it may read what the host sent before they
            // wait, so it must have arrived when this one starts.
            overlaps_predecessor: false,
            cluster: 1,
        };
        let dtype = shape.dtype().id() as i32;
        let (cols, rows) = (cols as i32, rows as i32);
        let (table, out) = (table.address(), out.address());
        let (tokens, drawn) = (tokens.address(), drawn.address());
        let is_float = planes(shape.dtype()).is_none_or(<[_]>::is_empty);
        if is_float {
            let name = kernel_name!("embed", "embed_float");
            let arguments = EmbedFloat { dtype, table, tokens, drawn, out, cols, rows };
            // SAFETY: block (c, t) reads 256 columns of one row below `rows` and writes those of
            // row t of `out`, inside lengths that were checked.
            unsafe { launch_spread(&self.0, name, stream, launch, &arguments) }
        } else {
            let name = kernel_name!("embed", "embed_quantized");
            let planes = tile_planes(shape);
            let arguments = EmbedQuantized { planes, dtype, tiles: table, tokens, drawn, out, cols, rows };
            // SAFETY: as for `embed_float`.
            unsafe { launch_spread(&self.0, name, stream, launch, &arguments) }
        }
        .map_err(device_error(OP))
    }
}
