// SPDX-License-Identifier: Apache-2.0

//! Launcher of quantize.cu: converts activation rows to the format that a weight type is multiplied
//! with (`DType::activation`). That format is activation tiles of quants, activation tiles of
//! 16-bit floats, or unchanged f32 rows.

use ops::OpError;
use quant::DType;
use quant::layout::TILE_COLS;

use super::abi::elementwise::{QUANTIZE_WARPS, QuantizeActivations};
pub use super::abi::tiles::ACT_TILE_TOKENS;
use super::abi::tiles::{F16_SUMS_BYTES, F16Sums, QuantizedRows};
use super::error::device_error;
use super::launch::{kernel_name, launch_spread};
use super::module::image;
use super::{Device, DeviceView, DeviceViewMut, LaunchConfig, LazyModule, Stream};

const OP: &str = "quantize";

/// The length of F16 and BF16 weight rows is a multiple of this number of values: the depth of a
/// tensor-core step.
pub const FLOAT16_ROW_STEP: usize = 16;

/// Activations in the format that [`super::linear::LinearKernels`] takes.
#[derive(Clone, Copy)]
pub struct QuantizedActivations<'a> {
    pub(super) layout: ActivationLayout,
    pub(super) tokens: usize,
    pub(super) cols: usize,
    pub(super) data: DeviceView<'a, u8>,
}

/// What quantized activations consist of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ActivationLayout {
    pub format: DType,
    /// Whether the activation tiles are followed by their sums as f16 integers (linear/tile.cuh).
    /// Only Q8_K has these.
    pub f16_sums: bool,
}

impl From<DType> for ActivationLayout {
    /// Activation tiles alone.
    fn from(format: DType) -> Self {
        Self { format, f16_sums: false }
    }
}

impl ActivationLayout {
    /// Bytes that `tokens` rows need. None if no weight type has `format` as its activation.
    pub fn bytes(self, tokens: usize, cols: usize) -> Option<usize> {
        let tiles = activation_bytes(self.format, tokens, cols)?;
        let groups = tokens.div_ceil(ACT_TILE_TOKENS).checked_mul(cols.div_ceil(TILE_COLS))?;
        let sums = if self.f16_sums { groups.checked_mul(F16_SUMS_BYTES)? } else { 0 };
        tiles.checked_add(sums)
    }

    /// The addresses in `act_tiles`, which has [`Self::bytes`] bytes.
    pub(super) fn rows(self, act_tiles: u64, tokens: usize, cols: usize) -> QuantizedRows {
        let sums = self.sums(act_tiles, tokens, cols).unwrap_or(NO_SUMS);
        QuantizedRows { act_tiles, f16_sums: sums.data, f16_groups: sums.groups }
    }

    /// The f16 sums behind `act_tiles`.
    pub(super) fn sums(self, act_tiles: u64, tokens: usize, cols: usize) -> Option<F16Sums> {
        let tiles = activation_bytes(self.format, tokens, cols).filter(|_| self.f16_sums)?;
        Some(F16Sums { data: act_tiles + tiles as u64, groups: tokens.div_ceil(ACT_TILE_TOKENS) as i32 })
    }
}

/// For weights whose products need none.
pub(super) const NO_SUMS: F16Sums = F16Sums { data: 0, groups: 0 };

/// Bytes of one token's row of an activation tile in shared memory, equal to act_row_bytes in
/// linear/tile.cuh.
pub(super) fn act_row_bytes(format: DType) -> usize {
    match format {
        DType::Q8_K => 256 + 16 + 32,
        DType::Q8_1 => 256 + 32 + 32,
        _ => 256 + 32,
    }
}

/// Bytes that `tokens` rows need. None if no weight type has `format` as its activation.
pub fn activation_bytes(format: DType, tokens: usize, cols: usize) -> Option<usize> {
    let act_tile = match format {
        DType::F32 => return tokens.checked_mul(cols)?.checked_mul(4),
        DType::F16 | DType::BF16 => ACT_TILE_TOKENS * TILE_COLS * 2,
        DType::Q8_0 => ACT_TILE_TOKENS * (TILE_COLS + 8 * 4),
        DType::Q8_1 => ACT_TILE_TOKENS * (TILE_COLS + 8 * 4 + 8 * 4),
        DType::Q8_K => ACT_TILE_TOKENS * (TILE_COLS + 4 + 16 * 2),
        _ => return None,
    };
    tokens.div_ceil(ACT_TILE_TOKENS).checked_mul(cols.div_ceil(TILE_COLS))?.checked_mul(act_tile)
}

pub struct QuantizeKernels(LazyModule);

impl QuantizeKernels {
    pub fn new(device: &Device) -> Self {
        Self(LazyModule::new(device, "quantize", image!("quantize")))
    }

    /// Converts `x`, `[tokens, cols]`. `out` is scratch memory at a multiple of 128 bytes. It may
    /// be longer than needed.
    pub fn launch<'a>(
        &self,
        stream: &Stream,
        layout: impl Into<ActivationLayout>,
        x: DeviceView<'_, f32>,
        tokens: usize,
        cols: usize,
        out: &'a mut DeviceViewMut<'_, u8>,
    ) -> Result<QuantizedActivations<'a>, OpError> {
        let layout = layout.into();
        let format = layout.format;
        let name = match format {
            DType::F32 => None,
            DType::F16 => Some(kernel_name!("quantize", "quantize_f16")),
            DType::BF16 => Some(kernel_name!("quantize", "quantize_bf16")),
            DType::Q8_0 => Some(kernel_name!("quantize", "quantize_q8_0")),
            DType::Q8_1 => Some(kernel_name!("quantize", "quantize_q8_1")),
            DType::Q8_K => Some(kernel_name!("quantize", "quantize_q8_k")),
            dtype => return Err(OpError::Type { op: OP, dtype }),
        };
        let shape = |what, found, expected| Err(OpError::Shape { op: OP, what, found, expected });
        let is_float16 = matches!(format, DType::F16 | DType::BF16);
        let step = if is_float16 { FLOAT16_ROW_STEP } else { format.block_len() };
        if !cols.is_multiple_of(step) {
            return shape("values beyond whole blocks in a row", cols % step, 0);
        }
        if x.len() < tokens * cols {
            return shape("values of the input", x.len(), tokens * cols);
        }
        let bytes = layout.bytes(tokens, cols).unwrap_or(usize::MAX);
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
        match name {
            None => {
                if let (Some(x), Some(mut out)) = (x.slice(0, tokens * cols), out.slice_mut(0, bytes)) {
                    out.copy_from(stream, x.bytes()).map_err(device_error(OP))?;
                }
            }
            Some(name) if warps > 0 => {
                let launch = LaunchConfig {
                    grid: (warps.div_ceil(QUANTIZE_WARPS) as u32, 1, 1),
                    block: 32 * QUANTIZE_WARPS as u32,
                    shared_bytes: 0,
                    overlaps_predecessor: true,
                    cluster: 1,
                };
                let quantized = layout.rows(out.address(), tokens, cols);
                let (tokens, cols) = (tokens as i32, cols as i32);
                let arguments = QuantizeActivations { x: x.address(), tokens, cols, quantized };
                // SAFETY: a warp reads 256 values of one row inside `x`. It writes its token's part
                // of one activation tile inside `out`. Lengths and alignment were checked.
                unsafe { launch_spread(&self.0, name, stream, launch, &arguments) }
                    .map_err(device_error(OP))?;
            }
            Some(_) => {}
        }
        // SAFETY: the range is inside `out`, which stays borrowed for 'a.
        let data = unsafe { DeviceView::from_raw(out.address(), bytes) };
        Ok(QuantizedActivations { layout, tokens, cols, data })
    }
}
