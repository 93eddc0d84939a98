// SPDX-License-Identifier: Apache-2.0

//! Launcher of experts/fused.cuh: a layer of experts for up to 8 rows.

use ops::OpError;
use quant::DType;
use quant::layout::{TILE_ROWS, Tiles};

use super::abi::experts::{
    EXPERT_FUSED_COUNT_STRIDE, EXPERT_FUSED_DOWN_GROUPS, EXPERT_FUSED_MATRICES, EXPERT_FUSED_PAIRS_MAX,
    EXPERT_FUSED_ROUTING_BYTES, EXPERT_FUSED_ROWS, EXPERT_FUSED_THREADS, EXPERT_STACKS_MAX, EXPERTS_MAX,
    ExpertFused, ExpertFusedParams,
};
use super::abi::linear::{SKINNY_STAGE_TILES, SKINNY_VALUE_BUFFERS, SKINNY_WARPS};
use super::abi::tiles::ACT_TILE_TOKENS;
use super::error::device_error;
use super::experts::{COMBINE, ExpertKernels, ExpertWeights, OP, ensure_equal};
use super::launch::{KernelName, kernel_name, launch_kernel};
use super::linear::BARRIER_BYTES;
use super::linear_names::quant_types;
use super::quantize::{QuantizedActivations, activation_bytes};
use super::skinny_linear::{ROUND_STAGES, ROUNDS_MAX, TILE_VALUE_BYTES};
use super::{Device, DeviceView, DeviceViewMut, LaunchConfig, Stream};

/// Lanes of a warp: each has a rank of a row.
const USED_MAX: usize = 32;

/// The number of words of [`FusedExperts::finished`].
pub const FINISHED_WORDS: usize = EXPERT_FUSED_PAIRS_MAX * EXPERT_FUSED_COUNT_STRIDE;

/// The size of a layer of experts, and what computes it.
#[derive(Clone, Copy, Debug)]
pub struct ExpertLayer {
    /// The shape of one expert's gate and up matrices, and of its down matrix.
    pub gate: Tiles,
    pub up: Tiles,
    pub down: Tiles,
    /// The number of experts, and how many of them compute a row.
    pub count: usize,
    pub used: usize,
}

/// A layer of experts for a few rows, in device memory.
pub struct FusedExperts<'a> {
    /// `[rows, count]`.
    pub logits: DeviceView<'a, f32>,
    pub used: usize,
    /// Rows in the format of gate and up.
    pub x: QuantizedActivations<'a>,
    /// Their outputs are scratch memory, `[pairs, hidden]`.
    pub gate_and_up: [ExpertWeights<'a>; EXPERT_STACKS_MAX],
    /// Its output is scratch memory, `[pairs, width]`.
    pub down: ExpertWeights<'a>,
    /// Scratch memory for the weight of each pair.
    pub pair_weights: DeviceViewMut<'a, f32>,
    /// Zeros. They are zeros again when the sum has ended.
    pub finished: DeviceViewMut<'a, u32>,
}

/// Pipeline stages, and bytes of shared memory. The kernel divides shared memory in the same way.
/// None if a round of stages does not fit.
fn pipeline(device: &Device, gate: Tiles, down: Tiles) -> Option<(usize, usize)> {
    let act_tiles =
        |shape: Tiles| activation_bytes(shape.dtype().activation()?, ACT_TILE_TOKENS, shape.cols());
    let values = SKINNY_VALUE_BUFFERS * SKINNY_WARPS * TILE_VALUE_BYTES;
    let barriers = (2 * SKINNY_VALUE_BUFFERS + 1 + 2 * EXPERT_FUSED_DOWN_GROUPS) * BARRIER_BYTES;
    let stage_bytes = SKINNY_STAGE_TILES * gate.tile_bytes().max(down.tile_bytes()) + 2 * BARRIER_BYTES;
    let rest = act_tiles(gate)?
        .checked_add(EXPERT_FUSED_DOWN_GROUPS.checked_mul(act_tiles(down)?)?)?
        .checked_add(values + barriers + EXPERT_FUSED_ROUTING_BYTES)?;
    let available = (device.shared_bytes_max() as usize).checked_sub(rest)?;
    let rounds = (available / (ROUND_STAGES * stage_bytes)).min(ROUNDS_MAX);
    let stages = rounds * ROUND_STAGES;
    (stages > 0).then(|| (stages, rest + stages * stage_bytes))
}

impl ExpertLayer {
    /// Whether expert_fused_* computes this many rows. Its blocks wait for each other, so a device
    /// must run one on each multiprocessor at the same time. It does not if it gives
    /// multiprocessors to other processes meanwhile.
    fn can_fuse(self, device: &Device, rows: usize) -> bool {
        let Self { gate, up, down, count, used } = self;
        let pairs = rows * used;
        let has_round = |shape: Tiles| shape.row_tiles() * shape.col_tiles() >= SKINNY_WARPS;
        !device.info().mps
            && rows <= EXPERT_FUSED_ROWS
            && (1..=USED_MAX.min(count)).contains(&used)
            && count <= EXPERTS_MAX
            && pairs <= EXPERT_FUSED_PAIRS_MAX
            // Then a block has row tiles of down of at most two groups, and each row has a block
            // that computes its weights.
            && pairs <= device.multiprocessors() as usize
            && gate == up
            && (gate.cols(), gate.rows()) == (down.rows(), down.cols())
            && gate.rows().is_multiple_of(TILE_ROWS)
            && [gate, down].into_iter().all(has_round)
            && fused_name(gate.dtype(), down.dtype()).is_some()
            && pipeline(device, gate, down).is_some()
    }
}

impl ExpertKernels {
    /// Whether [`Self::fused`] computes this many rows of a layer.
    pub fn can_fuse(&self, layer: ExpertLayer, rows: usize) -> bool {
        layer.can_fuse(&self.device, rows)
    }

    /// Computes a layer of experts with SiLU: `out = sum over ranks of expert weight times down
    /// (silu(gate(row)) * up(row))`.
    ///
    /// # Safety
    /// `layer.finished` is zeros, and nothing else writes it. No other launch of this function is
    /// in flight on the device, not on another stream either: blocks of both would wait for
    /// multiprocessors that the other has.
    pub unsafe fn fused(
        &self,
        stream: &Stream,
        layer: &mut FusedExperts<'_>,
        out: &mut DeviceViewMut<'_, f32>,
    ) -> Result<(), OpError> {
        let FusedExperts { logits, used, x, gate_and_up, down, pair_weights, finished } = layer;
        let (rows, used, [gate, up]) = (x.tokens, *used, &*gate_and_up);
        let count = logits.len() / rows.max(1);
        let (pairs, hidden, width) = (rows * used, gate.shape.rows(), gate.shape.cols());
        ensure_equal("values of the router", logits.len(), rows * count)?;
        if rows == 0 {
            return Ok(());
        }
        let shapes = ExpertLayer { gate: gate.shape, up: up.shape, down: down.shape, count, used };
        let dtype = down.shape.dtype();
        let name = fused_name(gate.shape.dtype(), dtype).filter(|_| self.can_fuse(shapes, rows));
        let (Some(name), Some((stages, shared_bytes)), Some(down_format)) =
            (name, pipeline(&self.device, gate.shape, down.shape), dtype.activation())
        else {
            return Err(OpError::Type { op: OP, dtype });
        };
        let kernels = self.check_stacks(*x, count, gate_and_up)?;
        self.check_weights(down_format, count, std::slice::from_ref(down))?;
        for (output, cols) in [(&gate.out, hidden), (&up.out, hidden), (&down.out, width)] {
            ensure_equal("values of the output", output.len(), pairs * cols)?;
            ensure_equal("misalignment of the output", (output.address() % 16) as usize, 0)?;
        }
        ensure_equal("weights of pairs", pair_weights.len(), pairs)?;
        ensure_equal("counts of groups", finished.len(), FINISHED_WORDS)?;
        ensure_equal("values of the sum", out.len(), rows * width)?;
        // The sum clears the counts. With counts that are left, the next layer would read
        // activations before they are complete. So what can fail does so before the launch.
        self.routing_kernels.kernel(COMBINE.as_c_str()).map_err(device_error(OP))?;
        let matrices: [&ExpertWeights<'_>; EXPERT_FUSED_MATRICES] = [gate, up, down];
        let params = ExpertFusedParams {
            weights: matrices.map(|matrix| matrix.tiles.address()),
            values: [gate.out.address(), up.out.address()],
            out: down.out.address(),
            act_tiles: x.data.address(),
            logits: logits.address(),
            pair_weights: pair_weights.address(),
            finished: finished.address(),
            rows: rows as i32,
            expert_count: count as i32,
            used: used as i32,
            width: width as i32,
            hidden: hidden as i32,
            stages: stages as i32,
        };
        let launch = LaunchConfig {
            grid: (self.device.multiprocessors(), 1, 1),
            block: EXPERT_FUSED_THREADS,
            shared_bytes: shared_bytes as u32,
            overlaps_predecessor: true,
            cluster: 1,
        };
        // SAFETY: the kernel reads and writes matrices, rows, logits and outputs inside the lengths
        // that were checked: the experts that it chooses are below `count`, and pairs below their
        // number. It divides shared memory as `pipeline` does. Its blocks end, since `can_fuse` is
        // true, and by this function's contract.
        unsafe { launch_kernel(&kernels.family, name, stream, launch, &ExpertFused { params }) }
            .map_err(device_error(OP))?;
        let (contributions, weights) = (down.out.as_view(), pair_weights.as_view());
        let counts = finished.address();
        self.combine_and_clear(stream, contributions, weights, used, out, counts).inspect_err(|_| {
            // If this fails too, the device can do nothing more.
            let _ = finished.fill_bytes(stream, 0);
        })
    }
}

/// The kernel for weights of these types: gate and up, and down.
fn fused_name(gate: DType, down: DType) -> Option<KernelName<ExpertFused>> {
    macro_rules! names {
        ($($dtype:ident = $type:literal),*) => {
            match (gate, down) {
                $((DType::$dtype, DType::$dtype) => {
                    Some(kernel_name!(concat!("experts_", $type), concat!("expert_fused_", $type)))
                })*
                (DType::Q4_K, DType::Q6_K) => Some(kernel_name!("experts_q4_k", "expert_fused_q4_k_q6_k")),
                (DType::Q5_K, DType::Q6_K) => Some(kernel_name!("experts_q5_k", "expert_fused_q5_k_q6_k")),
                _ => None,
            }
        };
    }
    quant_types!(names)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cuda::DeviceSelector;
    use cuda::fake::FakeDriver;

    use super::*;

    /// `used` of 128 experts of qwen3-30b-a3b.
    fn layer(gate: DType, down: DType, [width, hidden]: [usize; 2], used: usize) -> ExpertLayer {
        let of_gate = Tiles::new(gate, width, hidden).unwrap();
        let of_down = Tiles::new(down, hidden, width).unwrap();
        ExpertLayer { gate: of_gate, up: of_gate, down: of_down, count: 128, used }
    }

    fn device(fake: &Arc<FakeDriver>) -> Device {
        Device::open(fake.clone(), DeviceSelector::Ordinal(0)).unwrap()
    }

    #[test]
    fn layers_of_few_rows_are_fused_if_all_blocks_are_resident() {
        let fake = Arc::new(FakeDriver::new(1 << 30));
        let (own, size) = (device(&fake), [2048, 768]);
        let model = layer(DType::Q4_K, DType::Q6_K, size, 8);
        assert!((2..=8).all(|rows| model.can_fuse(&own, rows)));
        assert!(!model.can_fuse(&own, 9), "an activation tile has 8 rows");
        // With more pairs than blocks, a block may have row tiles of three groups.
        assert!(layer(DType::Q8_0, DType::Q8_0, size, 16).can_fuse(&own, 8));
        assert!(!layer(DType::Q8_0, DType::Q8_0, size, 17).can_fuse(&own, 8));
        fake.change_device(0, |info| info.multiprocessors = 63);
        assert!(!model.can_fuse(&device(&fake), 8));
        assert!(model.can_fuse(&device(&fake), 7));
        // Another process may have some of the multiprocessors.
        fake.change_device(0, |info| (info.multiprocessors, info.mps) = (132, true));
        assert!(!model.can_fuse(&device(&fake), 8));
    }

    #[test]
    fn layers_without_a_kernel_and_small_ones_are_not_fused() {
        let device = device(&Arc::new(FakeDriver::new(1 << 30)));
        assert!(!layer(DType::Q6_K, DType::Q4_K, [2048, 768], 8).can_fuse(&device, 8));
        // A round has 16 weight tiles.
        assert!(layer(DType::Q4_K, DType::Q4_K, [256, 256], 8).can_fuse(&device, 8));
        assert!(!layer(DType::Q8_0, DType::Q8_0, [256, 224], 8).can_fuse(&device, 8));
        let other = layer(DType::Q4_K, DType::Q4_K, [2048, 1024], 8);
        let up = Tiles::new(DType::Q5_K, 2048, 1024).unwrap();
        assert!(other.can_fuse(&device, 8) && !ExpertLayer { up, ..other }.can_fuse(&device, 8));
    }
}
