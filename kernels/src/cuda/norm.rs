//! Launcher of norm.cu: root mean square norms of rows and heads, and sums.

use super::module::{arguments, image};
use super::rounded::{Rounded, kernel_name};
use super::{CudaError, Device, Family, Launch, Stream, View, ViewMut};

/// As norm.cu.
const ROW_THREADS: u32 = 512;
const HEADS_PER_BLOCK: usize = 4;
const ADD_THREADS: u32 = 256;
/// Longest row that is rounded: what a block keeps in registers.
const ROUNDED_COLS_MAX: usize = 16_384;

pub struct Norms(Family);

impl Norms {
    pub fn new(device: &Device) -> Self {
        Self(Family::new(device, "norm", image!("norm")))
    }

    /// Whether rows of this length can be rounded too.
    pub(super) fn can_round(cols: usize) -> bool {
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
        rounded: Option<Rounded<'_>>,
    ) -> Result<(), CudaError> {
        let rows = rows_of("x of a norm", x.len(), weight.len())?;
        let panels = panels(rounded.as_ref(), rows, weight.len())?;
        same("output of a norm", out.len(), x.len())?;
        if rows == 0 {
            return Ok(());
        }
        let (x, weight, out, cols) = (x.address(), weight.address(), out.address(), weight.len() as i32);
        let names = [c"rms_norm", c"rms_norm_q8_0", c"rms_norm_q8_1", c"rms_norm_q8_k"];
        let kernel = self.0.kernel(kernel_name(rounded.as_ref(), names))?;
        // SAFETY: (float *, const float *, float, float *, int, uint8_t *); block r reads and writes `cols` values at
        // r * cols, inside `x` and `out` by the checks above, and its token's part of the panels; `x` is not written.
        unsafe { kernel.launch(stream, per_row(rows), arguments![x, weight, eps, out, cols, panels]) }
    }

    /// `x += y; out = norm(x)`.
    #[expect(clippy::too_many_arguments, reason = "operands of one kernel, each of its own meaning")]
    pub fn sum_rows(
        &self,
        stream: &Stream,
        x: &mut ViewMut<'_, f32>,
        y: View<'_, f32>,
        weight: View<'_, f32>,
        eps: f32,
        out: &mut ViewMut<'_, f32>,
        rounded: Option<Rounded<'_>>,
    ) -> Result<(), CudaError> {
        let rows = rows_of("x of a norm", x.len(), weight.len())?;
        let panels = panels(rounded.as_ref(), rows, weight.len())?;
        same("y of a norm", y.len(), x.len())?;
        same("output of a norm", out.len(), x.len())?;
        if rows == 0 {
            return Ok(());
        }
        let (x, y, weight, out, cols) =
            (x.address(), y.address(), weight.address(), out.address(), weight.len() as i32);
        let names = [c"add_rms_norm", c"add_rms_norm_q8_0", c"add_rms_norm_q8_1", c"add_rms_norm_q8_k"];
        let kernel = self.0.kernel(kernel_name(rounded.as_ref(), names))?;
        // SAFETY: (float *, const float *, const float *, float, float *, int, uint8_t *); as for `rows`.
        unsafe { kernel.launch(stream, per_row(rows), arguments![x, y, weight, eps, out, cols, panels]) }
    }

    /// Every head of `weight.len()` values, in place.
    pub fn heads(
        &self,
        stream: &Stream,
        x: &mut ViewMut<'_, f32>,
        weight: View<'_, f32>,
        eps: f32,
    ) -> Result<(), CudaError> {
        let heads = rows_of("x of a norm of heads", x.len(), weight.len())?;
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
        same("y of a sum", y.len(), x.len())?;
        if x.is_empty() {
            return Ok(());
        }
        let grid = (x.len().div_ceil(ADD_THREADS as usize) as u32, 1, 1);
        let launch = Launch { grid, block: ADD_THREADS, shared_bytes: 0, overlaps_predecessor: true };
        let (x, y, values) = (x.address(), y.address(), x.len() as u64);
        let kernel = self.0.kernel(c"add")?;
        // SAFETY: (float *, const float *, uint64_t); a thread has one value below `values`.
        unsafe { kernel.launch(stream, launch, arguments![x, y, values]) }
    }
}

/// The address of the panels, 0 if there are none.
fn panels(rounded: Option<&Rounded<'_>>, rows: usize, cols: usize) -> Result<u64, CudaError> {
    if rounded.is_some() && !Norms::can_round(cols) {
        return Err(CudaError::Length {
            what: "row to be rounded",
            found: 4 * cols,
            expected: 4 * ROUNDED_COLS_MAX,
        });
    }
    rounded.map_or(Ok(0), |rounded| rounded.address(rows, cols))
}

fn per_row(rows: usize) -> Launch {
    Launch { grid: (rows as u32, 1, 1), block: ROW_THREADS, shared_bytes: 0, overlaps_predecessor: true }
}

/// How many rows of `cols` values are `len` values.
pub(super) fn rows_of(what: &'static str, len: usize, cols: usize) -> Result<usize, CudaError> {
    let rows = len / cols.max(1);
    same(what, len, rows * cols)?;
    Ok(rows)
}

/// Lengths in f32 values.
pub(super) fn same(what: &'static str, found: usize, expected: usize) -> Result<(), CudaError> {
    if found == expected {
        return Ok(());
    }
    Err(CudaError::Length { what, found: found * size_of::<f32>(), expected: expected * size_of::<f32>() })
}
