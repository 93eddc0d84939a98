//! Launcher of gated.cu: the gate of a feed-forward layer.

use quant::layout::TILE_COLS;

use super::module::{arguments, image};
use super::norm::{rows_of, same};
use super::rounded::{Rounded, kernel_name};
use super::{CudaError, Device, Family, Launch, Stream, View, ViewMut};

/// As gated.cu.
const THREADS: u32 = 256;
/// Values that a thread takes at once.
const VECTOR: usize = 4;
const WARPS: usize = 8;

pub struct Gates(Family);

impl Gates {
    pub fn new(device: &Device) -> Self {
        Self(Family::new(device, "gated", image!("gated")))
    }

    /// `out = silu(gate) * up`.
    pub fn silu(
        &self,
        stream: &Stream,
        gate: View<'_, f32>,
        up: View<'_, f32>,
        out: &mut ViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        same("up of a gate", up.len(), gate.len())?;
        same("output of a gate", out.len(), gate.len())?;
        if gate.is_empty() {
            return Ok(());
        }
        let odd = !gate.len().is_multiple_of(VECTOR);
        let (name, units) =
            if odd { (c"silu_gated_odd", gate.len()) } else { (c"silu_gated", gate.len() / VECTOR) };
        let grid = (units.div_ceil(THREADS as usize) as u32, 1, 1);
        let launch = Launch { grid, block: THREADS, shared_bytes: 0, overlaps_predecessor: true };
        let (gate, up, out, units) = (gate.address(), up.address(), out.address(), units as u64);
        let kernel = self.0.kernel(name)?;
        // SAFETY: (const float *, const float *, float *, uint64_t), the odd kernel's unit being a value, the other's four;
        // a thread has one unit below `units`. Tensors start at multiples of 256 bytes.
        unsafe { kernel.launch(stream, launch, arguments![gate, up, out, units]) }
    }

    /// The same over rows of `cols` values, which are also rounded.
    pub fn silu_rounded(
        &self,
        stream: &Stream,
        gate: View<'_, f32>,
        up: View<'_, f32>,
        cols: usize,
        out: &mut ViewMut<'_, f32>,
        rounded: &Rounded<'_>,
    ) -> Result<(), CudaError> {
        same("up of a gate", up.len(), gate.len())?;
        same("output of a gate", out.len(), gate.len())?;
        let tokens = rows_of("rows of a gate", gate.len(), cols)?;
        let panels = rounded.address(tokens, cols)?;
        if gate.is_empty() {
            return Ok(());
        }
        let warps = tokens * cols.div_ceil(TILE_COLS);
        let grid = (warps.div_ceil(WARPS) as u32, 1, 1);
        let launch = Launch { grid, block: 32 * WARPS as u32, shared_bytes: 0, overlaps_predecessor: true };
        let (gate, up, out, tokens, cols) =
            (gate.address(), up.address(), out.address(), tokens as i32, cols as i32);
        let names = [c"silu_gated", c"silu_gated_q8_0", c"silu_gated_q8_1", c"silu_gated_q8_k"];
        let kernel = self.0.kernel(kernel_name(Some(rounded), names))?;
        // SAFETY: (const float *, const float *, float *, int, int, uint8_t *), `Rounded::address` having refused other
        // forms; a warp works on 256 columns of a token and its part of a panel.
        unsafe { kernel.launch(stream, launch, arguments![gate, up, out, tokens, cols, panels]) }
    }
}
