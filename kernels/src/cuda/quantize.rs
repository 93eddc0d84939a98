//! Launcher of quantize.cu: activation rows to the form that a weight type is multiplied with
//! (`DType::activation`): quants, halves, or for F32 the rows as they are.

use ops::OpError;
use quant::DType;
use quant::layout::TILE_COLS;

use super::error::device_error;
use super::module::arguments;
use super::module::image;
use super::{Device, Family, Launch, Stream, View, ViewMut};

const OP: &str = "quantize";

/// Tokens that share a act_tile, as in linear/tile.cuh.
pub const ACT_TILE_TOKENS: usize = 8;
const WARPS: u32 = 8;
/// Rows of F16 and BF16 weights are multiples of this long.
pub const HALVES: usize = 16;

/// Rows of activations ready for [`super::linear::Linear`]: a view with what it holds.
#[derive(Clone, Copy)]
pub struct QuantizedActivations<'a> {
    pub(super) format: DType,
    pub(super) tokens: usize,
    pub(super) cols: usize,
    pub(super) data: View<'a, u8>,
}

/// Bytes that `tokens` rows need; none if `format` is not what some weight type names as its activation.
pub fn activation_bytes(format: DType, tokens: usize, cols: usize) -> Option<usize> {
    let act_tile = match format {
        DType::F32 => return tokens.checked_mul(cols)?.checked_mul(4),
        // Two or three 16-bit parts of a value.
        DType::F16 => ACT_TILE_TOKENS * (TILE_COLS * 2 * 2 + 4),
        DType::BF16 => ACT_TILE_TOKENS * TILE_COLS * 3 * 2,
        DType::Q8_0 => ACT_TILE_TOKENS * (TILE_COLS + 8 * 4),
        DType::Q8_1 => ACT_TILE_TOKENS * (TILE_COLS + 8 * 4 + 8 * 4),
        DType::Q8_K => ACT_TILE_TOKENS * (TILE_COLS + 4 + 16 * 2),
        _ => return None,
    };
    tokens.div_ceil(ACT_TILE_TOKENS).checked_mul(cols.div_ceil(TILE_COLS))?.checked_mul(act_tile)
}

pub struct QuantizeKernels(Family);

impl QuantizeKernels {
    pub fn new(device: &Device) -> Self {
        Self(Family::new(device, "quantize", image!("quantize")))
    }

    /// `x` is `[tokens, cols]`. `out` is the start of scratch memory, at a multiple of 128 bytes, and may be longer than
    /// needed.
    pub fn launch<'a>(
        &self,
        stream: &Stream,
        format: DType,
        x: View<'_, f32>,
        tokens: usize,
        cols: usize,
        out: &'a mut ViewMut<'_, u8>,
    ) -> Result<QuantizedActivations<'a>, OpError> {
        let kernel = match format {
            DType::F32 => c"",
            DType::F16 => c"quantize_f16",
            DType::BF16 => c"quantize_bf16",
            DType::Q8_0 => c"quantize_q8_0",
            DType::Q8_1 => c"quantize_q8_1",
            DType::Q8_K => c"quantize_q8_k",
            dtype => return Err(OpError::Type { op: OP, dtype }),
        };
        let shape = |what, found, expected| Err(OpError::Shape { op: OP, what, found, expected });
        // Bulk copies of halves need rows of 16 values.
        let whole = if matches!(format, DType::F16 | DType::BF16) { HALVES } else { format.block_len() };
        if !cols.is_multiple_of(whole) {
            return shape("values beyond whole blocks in a row", cols % whole, 0);
        }
        if x.len() < tokens * cols {
            return shape("values of the input", x.len(), tokens * cols);
        }
        let bytes = activation_bytes(format, tokens, cols).unwrap_or(usize::MAX);
        if out.len() < bytes {
            return shape("bytes of scratch memory", out.len(), bytes);
        }
        for (what, address, align) in [
            ("misalignment of the input", x.address(), 16),
            ("misalignment of scratch memory", out.address(), 128),
        ] {
            if !address.is_multiple_of(align) {
                return shape(what, (address % align) as usize, 0);
            }
        }
        let warps = tokens * cols.div_ceil(TILE_COLS);
        if format == DType::F32 {
            if let (Some(x), Some(mut out)) = (x.slice(0, tokens * cols), out.slice_mut(0, bytes)) {
                out.copy_from(stream, x.bytes()).map_err(device_error(OP))?;
            }
        } else if warps > 0 {
            let grid = ((warps as u32).div_ceil(WARPS), 1, 1);
            let launch = Launch { grid, block: 32 * WARPS, shared_bytes: 0, overlaps_predecessor: true };
            let kernel = self.0.kernel(kernel).map_err(device_error(OP))?;
            let (x, tokens, cols, out) = (x.address(), tokens as i32, cols as i32, out.address());
            // SAFETY: (const float *, int, int, uint8_t *); a warp reads 256 values of one row inside `x` and writes its
            // token's part of one act_tile inside `out`: lengths and alignment were checked.
            unsafe { kernel.launch(stream, launch, arguments![x, tokens, cols, out]) }
                .map_err(device_error(OP))?;
        }
        // SAFETY: the range is inside `out`, which stays borrowed for 'a.
        let data = unsafe { View::from_raw(out.address(), bytes) };
        Ok(QuantizedActivations { format, tokens, cols, data })
    }
}
