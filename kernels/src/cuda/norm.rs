//! Launcher of norm.cu: root mean square norms of rows and heads, and sums.

use super::module::{arguments, image};
use super::quantized_output::{QuantizedOutput, select_kernel};
use super::{CudaError, Device, Family, Launch, Stream, View, ViewMut};

/// As norm.cu.
const ROW_THREADS: u32 = 512;
const HEADS_PER_BLOCK: usize = 4;
const ADD_THREADS: u32 = 256;
/// Longest row that is quantized: what a block keeps in registers.
const ROUNDED_COLS_MAX: usize = 16_384;

pub struct NormKernels(Family);

impl NormKernels {
    pub fn new(device: &Device) -> Self {
        Self(Family::new(device, "norm", image!("norm")))
    }

    /// Whether rows of this length can be quantized too.
    pub(super) fn can_quantize(cols: usize) -> bool {
        cols.is_multiple_of(32) && cols <= ROUNDED_COLS_MAX
    }

    /// `out = norm(x)`, rows of `weight.len()` values.
    pub fn rows(
        &self,
        stream: &Stream,
        x: View<'_, f32>,
        weight: View<'_, f32>,
        eps: f32,
        out: &mut ViewMut<'_, f32>,
        quantized: Option<QuantizedOutput<'_>>,
    ) -> Result<(), CudaError> {
        let rows = count_rows("x of a norm", x.len(), weight.len())?;
        let act_tiles = act_tiles(quantized.as_ref(), rows, weight.len())?;
        ensure_same_len("output of a norm", out.len(), x.len())?;
        if rows == 0 {
            return Ok(());
        }
        let (x, weight, out, cols) = (x.address(), weight.address(), out.address(), weight.len() as i32);
        let names = [c"rms_norm", c"rms_norm_q8_0", c"rms_norm_q8_1", c"rms_norm_q8_k"];
        let kernel = self.0.kernel(select_kernel(quantized.as_ref(), names))?;
        // SAFETY: (float *, const float *, float, float *, int, uint8_t *); block r reads and writes `cols` values at
        // r * cols, inside `x` and `out` by the checks above, and its token's part of the act_tiles; `x` is not written.
        unsafe { kernel.launch(stream, per_row(rows), arguments![x, weight, eps, out, cols, act_tiles]) }
    }

    /// `x += y; out = norm(x)`.
    #[expect(clippy::too_many_arguments, reason = "operands of one kernel, each of its own meaning")]
    pub fn add_rows(
        &self,
        stream: &Stream,
        x: &mut ViewMut<'_, f32>,
        y: View<'_, f32>,
        weight: View<'_, f32>,
        eps: f32,
        out: &mut ViewMut<'_, f32>,
        quantized: Option<QuantizedOutput<'_>>,
    ) -> Result<(), CudaError> {
        let rows = count_rows("x of a norm", x.len(), weight.len())?;
        let act_tiles = act_tiles(quantized.as_ref(), rows, weight.len())?;
        ensure_same_len("y of a norm", y.len(), x.len())?;
        ensure_same_len("output of a norm", out.len(), x.len())?;
        if rows == 0 {
            return Ok(());
        }
        let (x, y, weight, out, cols) =
            (x.address(), y.address(), weight.address(), out.address(), weight.len() as i32);
        let names = [c"add_rms_norm", c"add_rms_norm_q8_0", c"add_rms_norm_q8_1", c"add_rms_norm_q8_k"];
        let kernel = self.0.kernel(select_kernel(quantized.as_ref(), names))?;
        // SAFETY: (float *, const float *, const float *, float, float *, int, uint8_t *); as for `rows`.
        unsafe { kernel.launch(stream, per_row(rows), arguments![x, y, weight, eps, out, cols, act_tiles]) }
    }

    /// Every head of `weight.len()` values, in place.
    pub fn heads(
        &self,
        stream: &Stream,
        x: &mut ViewMut<'_, f32>,
        weight: View<'_, f32>,
        eps: f32,
    ) -> Result<(), CudaError> {
        let heads = count_rows("x of a norm of heads", x.len(), weight.len())?;
        if heads == 0 {
            return Ok(());
        }
        let grid = (heads.div_ceil(HEADS_PER_BLOCK) as u32, 1, 1);
        let launch = Launch { grid, block: 128, shared_bytes: 0, overlaps_predecessor: true };
        let (x, weight, count, head_dim) = (x.address(), weight.address(), heads as i32, weight.len() as i32);
        let kernel = self.0.kernel(c"rms_norm_heads")?;
        // SAFETY: (float *, const float *, float, int, int); warp h works on `head_dim` values at h * head_dim, h < heads.
        unsafe { kernel.launch(stream, launch, arguments![x, weight, eps, count, head_dim]) }
    }

    /// `x += y`.
    pub fn add(&self, stream: &Stream, x: &mut ViewMut<'_, f32>, y: View<'_, f32>) -> Result<(), CudaError> {
        ensure_same_len("y of a sum", y.len(), x.len())?;
        if x.is_empty() {
            return Ok(());
        }
        let grid = (x.len().div_ceil(ADD_THREADS as usize) as u32, 1, 1);
        let launch = Launch { grid, block: ADD_THREADS, shared_bytes: 0, overlaps_predecessor: true };
        let (x, y, values) = (x.address(), y.address(), x.len() as u64);
        let kernel = self.0.kernel(c"add_residual")?;
        // SAFETY: (float *, const float *, uint64_t); a thread has one value below `values`.
        unsafe { kernel.launch(stream, launch, arguments![x, y, values]) }
    }
}

/// The address of the act_tiles, 0 if there are none.
fn act_tiles(quantized: Option<&QuantizedOutput<'_>>, rows: usize, cols: usize) -> Result<u64, CudaError> {
    if quantized.is_some() && !NormKernels::can_quantize(cols) {
        return Err(CudaError::Length {
            what: "row to be quantized",
            found: 4 * cols,
            expected: 4 * ROUNDED_COLS_MAX,
        });
    }
    quantized.map_or(Ok(0), |quantized| quantized.address(rows, cols))
}

fn per_row(rows: usize) -> Launch {
    Launch { grid: (rows as u32, 1, 1), block: ROW_THREADS, shared_bytes: 0, overlaps_predecessor: true }
}

/// How many rows of `cols` values are `len` values.
pub(super) fn count_rows(what: &'static str, len: usize, cols: usize) -> Result<usize, CudaError> {
    let rows = len / cols.max(1);
    ensure_same_len(what, len, rows * cols)?;
    Ok(rows)
}

/// Lengths in f32 values.
pub(super) fn ensure_same_len(what: &'static str, found: usize, expected: usize) -> Result<(), CudaError> {
    if found == expected {
        return Ok(());
    }
    Err(CudaError::Length { what, found: found * size_of::<f32>(), expected: expected * size_of::<f32>() })
}
