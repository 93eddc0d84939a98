//! Launcher of rope.cu: rotary position embedding in place.

use ops::RopePairing;

use super::module::{arguments, image};
use super::norm::{count_rows, ensure_same_len};
use super::{CudaError, Device, Family, Launch, Stream, View, ViewMut};

/// As rope.cu.
const THREADS: u32 = 256;

pub struct RopeKernels(Family);

/// How the pairs of a head turn.
#[derive(Clone, Copy)]
pub struct RopeAngles<'a> {
    pub pairing: RopePairing,
    /// One per pair.
    pub inverse_frequencies: View<'a, f32>,
    pub magnitude: f32,
}

impl RopeKernels {
    pub fn new(device: &Device) -> Self {
        Self(Family::new(device, "rope", image!("rope")))
    }

    /// Row r of `x` is `heads` heads of `head_dim` values and turns by `positions[r]`.
    pub fn launch(
        &self,
        stream: &Stream,
        x: &mut ViewMut<'_, f32>,
        positions: View<'_, u32>,
        turn: RopeAngles<'_>,
        head_dim: usize,
    ) -> Result<(), CudaError> {
        let (rows, pairs) = (positions.len(), turn.inverse_frequencies.len());
        if rows == 0 || pairs == 0 {
            return Ok(());
        }
        let heads = count_rows("rows of a rotation", x.len(), rows * head_dim)?;
        ensure_same_len("pairs of a head", (2 * pairs).max(head_dim), head_dim)?;
        let grid = (rows as u32, 1, 1);
        let launch = Launch { grid, block: THREADS, shared_bytes: 0, overlaps_predecessor: true };
        let (x, positions, frequencies) =
            (x.address(), positions.address(), turn.inverse_frequencies.address());
        let adjacent = i32::from(turn.pairing == RopePairing::Adjacent);
        let (pairs, head_dim, heads, magnitude) =
            (pairs as i32, head_dim as i32, heads as i32, turn.magnitude);
        let kernel = self.0.kernel(c"rope")?;
        // SAFETY: (float *, const uint32_t *, const float *, float, int, int, int, int); block r turns pairs of the heads
        // of row r, and both values of a pair lie in the head since 2 * pairs <= head_dim.
        unsafe {
            kernel.launch(
                stream,
                launch,
                arguments![x, positions, frequencies, magnitude, adjacent, pairs, head_dim, heads],
            )
        }
    }
}
