//! Launcher of gather.cu: rows picked out of a matrix.

use super::module::{arguments, image};
use super::norm::count_rows;
use super::{CudaError, Device, Family, Launch, Stream, View, ViewMut};

/// As gather.cu.
const THREADS: u32 = 256;

pub struct GatherKernels(Family);

impl GatherKernels {
    pub fn new(device: &Device) -> Self {
        Self(Family::new(device, "gather", image!("gather")))
    }

    /// `out[i] = x[rows[i]]`, rows of `cols` values.
    ///
    /// # Safety
    /// Every one of `rows`, which are on the device, is below the number of rows of `x`.
    pub unsafe fn rows(
        &self,
        stream: &Stream,
        x: View<'_, f32>,
        rows: View<'_, u32>,
        cols: usize,
        out: &mut ViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        count_rows("x of a gather", x.len(), cols)?;
        super::norm::ensure_same_len("output of a gather", out.len(), rows.len() * cols)?;
        if out.is_empty() {
            return Ok(());
        }
        let launch = Launch {
            grid: (rows.len() as u32, 1, 1),
            block: THREADS,
            shared_bytes: 0,
            overlaps_predecessor: true,
        };
        let (x, rows, out, cols) = (x.address(), rows.address(), out.address(), cols as i32);
        let kernel = self.0.kernel(c"gather_rows")?;
        // SAFETY: (const float *, const uint32_t *, float *, int); block i copies `cols` values of row `rows[i]`, inside
        // `x` by this function's contract, to row i of `out`.
        unsafe { kernel.launch(stream, launch, arguments![x, rows, out, cols]) }
    }
}
