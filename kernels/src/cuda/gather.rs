// SPDX-License-Identifier: Apache-2.0

//! Launcher of gather.cu: copies chosen rows of a matrix.

use super::abi::elementwise::{GATHER_THREADS, GatherRows};
use super::launch::{kernel_name, launch_spread};
use super::module::image;
use super::norm::{count_rows, ensure_same_len};
use super::{CudaError, Device, DeviceView, DeviceViewMut, LaunchConfig, LazyModule, Stream};

pub struct GatherKernels(LazyModule);

impl GatherKernels {
    pub fn new(device: &Device) -> Self {
        Self(LazyModule::new(device, "gather", image!("gather")))
    }

    /// Computes `out[i] = x[rows[i]]` for rows of `cols` values.
    ///
    /// # Safety
    /// `rows` is in device memory. Each of its values is below the number of rows of `x`.
    pub unsafe fn rows(
        &self,
        stream: &Stream,
        x: DeviceView<'_, f32>,
        rows: DeviceView<'_, u32>,
        cols: usize,
        out: &mut DeviceViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        count_rows("input of a gather", x.len(), cols)?;
        ensure_same_len("output of a gather", out.len(), rows.len() * cols)?;
        if out.is_empty() {
            return Ok(());
        }
        let launch = LaunchConfig {
            grid: (rows.len() as u32, 1, 1),
            block: GATHER_THREADS,
            shared_bytes: 0,
            overlaps_predecessor: true,
            cluster: 1,
        };
        let arguments =
            GatherRows { x: x.address(), rows: rows.address(), out: out.address(), cols: cols as i32 };
        // SAFETY: block i copies `cols` values of row `rows[i]`, inside `x` by this function's
        // contract, to row i of `out`.
        unsafe { launch_spread(&self.0, kernel_name!("gather", "gather_rows"), stream, launch, &arguments) }
    }
}
