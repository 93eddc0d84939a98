//! Launcher of embed.cu: rows of the embedding table as f32.

use ops::OpError;
use quant::layout::{TILE_COLS, Tiles, planes};

use super::error::device_error;
use super::module::{arguments, image};
use super::planes::tile_planes;
use super::{Device, Family, Launch, Stream, View, ViewMut};

const OP: &str = "embed";
/// A grid's second dimension.
const TOKENS_MAX: usize = 65_535;

pub struct EmbedKernels(Family);

impl EmbedKernels {
    pub fn new(device: &Device) -> Self {
        Self(Family::new(device, "embed", image!("embed")))
    }

    /// `out[i] = table[tokens[i]]`, `[tokens, cols]`. `table` is in layout 1. Rows of tokens beyond the table are not
    /// written: callers check tokens where they are known.
    pub fn launch(
        &self,
        stream: &Stream,
        shape: &Tiles,
        table: View<'_, u8>,
        tokens: View<'_, u32>,
        out: &mut ViewMut<'_, f32>,
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
        let launch = Launch {
            grid: (shape.col_tiles() as u32, tokens.len() as u32, 1),
            block: TILE_COLS as u32,
            shared_bytes: 0,
            overlaps_predecessor: true,
        };
        let dtype = shape.dtype().id() as i32;
        let (cols, rows) = (cols as i32, rows as i32);
        let (table, tokens, out) = (table.address(), tokens.address(), out.address());
        let is_plain = planes(shape.dtype()).is_none_or(<[_]>::is_empty);
        let kernel = self.0.kernel(if is_plain { c"embed_float" } else { c"embed_quantized" });
        let kernel = kernel.map_err(device_error(OP))?;
        // SAFETY: embed_quantized takes (TilePlanes, int, const uint8_t *, const uint32_t *, float *, int, int), embed_float the
        // ensure_same_len without planes; block (c, t) reads the 256 columns of one row below `rows` and writes those of row t of
        // `out`: lengths were checked.
        unsafe {
            if is_plain {
                kernel.launch(stream, launch, arguments![dtype, table, tokens, out, cols, rows])
            } else {
                let planes = tile_planes(shape);
                kernel.launch(stream, launch, arguments![planes, dtype, table, tokens, out, cols, rows])
            }
        }
        .map_err(device_error(OP))
    }
}
