//! Launcher of silu_and_mul.cu: the gate of a feed-forward layer.

use quant::layout::TILE_COLS;

use super::module::{arguments, image};
use super::norm::{count_rows, ensure_same_len};
use super::quantized_output::{QuantizedOutput, select_kernel};
use super::{CudaError, Device, Family, Launch, Stream, View, ViewMut};

/// As silu_and_mul.cu.
const THREADS: u32 = 256;
/// Values that a thread takes at once.
const VECTOR: usize = 4;
const WARPS: usize = 8;

pub struct SiluKernels(Family);

impl SiluKernels {
    pub fn new(device: &Device) -> Self {
        Self(Family::new(device, "silu_and_mul", image!("silu_and_mul")))
    }

    /// `out = silu(gate) * up`.
    pub fn silu(
        &self,
        stream: &Stream,
        gate: View<'_, f32>,
        up: View<'_, f32>,
        out: &mut ViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        ensure_same_len("up of a gate", up.len(), gate.len())?;
        ensure_same_len("output of a gate", out.len(), gate.len())?;
        if gate.is_empty() {
            return Ok(());
        }
        let odd = !gate.len().is_multiple_of(VECTOR);
        let (name, units) =
            if odd { (c"silu_and_mul_scalar", gate.len()) } else { (c"silu_and_mul", gate.len() / VECTOR) };
        let grid = (units.div_ceil(THREADS as usize) as u32, 1, 1);
        let launch = Launch { grid, block: THREADS, shared_bytes: 0, overlaps_predecessor: true };
        let (gate, up, out, units) = (gate.address(), up.address(), out.address(), units as u64);
        let kernel = self.0.kernel(name)?;
        // SAFETY: (const float *, const float *, float *, uint64_t), the odd kernel's unit being a value, the other's four;
        // a thread has one unit below `units`. Tensors start at multiples of 256 bytes.
        unsafe { kernel.launch(stream, launch, arguments![gate, up, out, units]) }
    }

    /// The ensure_same_len over rows of `cols` values, which are also quantized.
    pub fn silu_quantized(
        &self,
        stream: &Stream,
        gate: View<'_, f32>,
        up: View<'_, f32>,
        cols: usize,
        out: &mut ViewMut<'_, f32>,
        quantized: &QuantizedOutput<'_>,
    ) -> Result<(), CudaError> {
        ensure_same_len("up of a gate", up.len(), gate.len())?;
        ensure_same_len("output of a gate", out.len(), gate.len())?;
        let tokens = count_rows("rows of a gate", gate.len(), cols)?;
        let act_tiles = quantized.address(tokens, cols)?;
        if gate.is_empty() {
            return Ok(());
        }
        let warps = tokens * cols.div_ceil(TILE_COLS);
        let grid = (warps.div_ceil(WARPS) as u32, 1, 1);
        let launch = Launch { grid, block: 32 * WARPS as u32, shared_bytes: 0, overlaps_predecessor: true };
        let (gate, up, out, tokens, cols) =
            (gate.address(), up.address(), out.address(), tokens as i32, cols as i32);
        let names = [c"silu_and_mul", c"silu_and_mul_q8_0", c"silu_and_mul_q8_1", c"silu_and_mul_q8_k"];
        let kernel = self.0.kernel(select_kernel(Some(quantized), names))?;
        // SAFETY: (const float *, const float *, float *, int, int, uint8_t *), `QuantizedOutput::address` having refused other
        // forms; a warp works on 256 columns of a token and its part of a act_tile.
        unsafe { kernel.launch(stream, launch, arguments![gate, up, out, tokens, cols, act_tiles]) }
    }
}
