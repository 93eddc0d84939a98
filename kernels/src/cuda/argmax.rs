// SPDX-License-Identifier: Apache-2.0

//! Launcher of argmax.cu: finds the most likely token of each row of logits.

use ops::NO_ARGMAX;

use super::abi::elementwise::{ARGMAX_BLOCKS, ARGMAX_THREADS, ArgmaxRows};
use super::launch::{kernel_name, launch_spread};
use super::module::image;
use super::norm::ensure_same_len;
use super::{CudaError, Device, DeviceView, DeviceViewMut, LaunchConfig, LazyModule, Stream};

pub struct ArgmaxKernels(LazyModule);

impl ArgmaxKernels {
    pub fn new(device: &Device) -> Self {
        Self(LazyModule::new(device, "argmax", image!("argmax")))
    }

    /// Writes to `out[r]` the index of the largest of the `cols` values of row r. Among equal
    /// values the lowest index wins. If the row holds a NaN or its largest value is infinite,
    /// `out[r]` is [`NO_ARGMAX`].
    pub fn rows(
        &self,
        stream: &Stream,
        x: DeviceView<'_, f32>,
        cols: usize,
        out: &mut DeviceViewMut<'_, u32>,
    ) -> Result<(), CudaError> {
        let rows = out.len();
        ensure_same_len("input of an argmax", x.len(), rows * cols)?;
        ensure_same_len("columns of an argmax", cols.clamp(1, NO_ARGMAX as usize - 1), cols)?;
        if rows == 0 {
            return Ok(());
        }
        let launch = LaunchConfig {
            grid: (rows as u32 * ARGMAX_BLOCKS, 1, 1),
            block: ARGMAX_THREADS,
            shared_bytes: 0,
            overlaps_predecessor: true,
            cluster: 1,
        };
        let arguments = ArgmaxRows { x: x.address(), cols: cols as u32, out: out.address() };
        // SAFETY: cluster r reads `cols` values at r * cols and writes value r. If `cols` is a
        // multiple of 4, it reads vectors of 16 bytes; tensors begin at multiples of 256 bytes.
        unsafe { launch_spread(&self.0, kernel_name!("argmax", "argmax_rows"), stream, launch, &arguments) }
    }
}
