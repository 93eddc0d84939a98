//! Launcher of argmax.cu: the best token of each row of logits.

use ops::NO_ARGMAX;

use super::module::{arguments, image};
use super::norm::ensure_same_len;
use super::{CudaError, Device, Family, Launch, Stream, View, ViewMut};

/// As argmax.cu.
const THREADS: u32 = 1024;

pub struct ArgmaxKernels(Family);

impl ArgmaxKernels {
    pub fn new(device: &Device) -> Self {
        Self(Family::new(device, "argmax", image!("argmax")))
    }

    /// `out[r]` is the index of the largest of the `cols` values of row r, the lowest among equals; [`NO_ARGMAX`]
    /// if one of them is no number, or the largest is infinite.
    pub fn rows(
        &self,
        stream: &Stream,
        x: View<'_, f32>,
        cols: usize,
        out: &mut ViewMut<'_, u32>,
    ) -> Result<(), CudaError> {
        let rows = out.len();
        ensure_same_len("rows to choose from", x.len(), rows * cols)?;
        ensure_same_len("columns to choose from", cols.clamp(1, NO_ARGMAX as usize - 1), cols)?;
        if rows == 0 {
            return Ok(());
        }
        let launch =
            Launch { grid: (rows as u32, 1, 1), block: THREADS, shared_bytes: 0, overlaps_predecessor: true };
        let (x, cols, out) = (x.address(), cols as u32, out.address());
        let kernel = self.0.kernel(c"argmax_rows")?;
        // SAFETY: (const float *, uint32_t, uint32_t *); block r reads `cols` values at r * cols and writes value r.
        unsafe { kernel.launch(stream, launch, arguments![x, cols, out]) }
    }
}
