// SPDX-License-Identifier: Apache-2.0

//! Launcher of rope.cu: applies rotary position embedding in place.

use ops::RopePairing;

use super::abi::elementwise::{ROPE_THREADS, Rope};
use super::launch::{kernel_name, launch_spread};
use super::module::image;
use super::norm::{count_rows, ensure_same_len};
use super::{CudaError, Device, DeviceView, DeviceViewMut, LaunchConfig, LazyModule, Stream};

pub struct RopeKernels(LazyModule);

/// How the pairs of a head are rotated.
#[derive(Clone, Copy)]
pub struct RopeAngles<'a> {
    pub pairing: RopePairing,
    /// One for each pair.
    pub inverse_frequencies: DeviceView<'a, f32>,
    pub magnitude: f32,
}

impl RopeKernels {
    pub fn new(device: &Device) -> Self {
        Self(LazyModule::new(device, "rope", image!("rope")))
    }

    /// Rotates row r of `x`, which has `heads` heads of `head_dim` values, by `positions[r]`.
    pub fn launch(
        &self,
        stream: &Stream,
        x: &mut DeviceViewMut<'_, f32>,
        positions: DeviceView<'_, u32>,
        angles: RopeAngles<'_>,
        head_dim: usize,
    ) -> Result<(), CudaError> {
        let (rows, pairs) = (positions.len(), angles.inverse_frequencies.len());
        if rows == 0 || pairs == 0 {
            return Ok(());
        }
        let heads = count_rows("rows of a rotation", x.len(), rows * head_dim)?;
        ensure_same_len("pairs of a head", (2 * pairs).max(head_dim), head_dim)?;
        let launch = LaunchConfig {
            grid: (rows as u32, 1, 1),
            block: ROPE_THREADS,
            shared_bytes: 0,
            overlaps_predecessor: true,
            cluster: 1,
        };
        let arguments = Rope {
            x: x.address(),
            positions: positions.address(),
            inverse_frequencies: angles.inverse_frequencies.address(),
            magnitude: angles.magnitude,
            adjacent: i32::from(angles.pairing == RopePairing::Adjacent),
            pairs: pairs as i32,
            head_dim: head_dim as i32,
            heads: heads as i32,
        };
        // SAFETY: block r rotates pairs of the heads of row r. Both values of a pair lie in the
        // head, because 2 * pairs <= head_dim.
        unsafe { launch_spread(&self.0, kernel_name!("rope", "rope"), stream, launch, &arguments) }
    }
}
