// SPDX-License-Identifier: Apache-2.0

//! Launcher of experts/skinny_matmul.cuh: products of experts for few pairs an expert.

use ops::OpError;
use quant::layout::Tiles;

use super::abi::experts::{EXPERT_SKINNY_ACT_GROUPS, ExpertParams, ExpertSkinny, ExpertSkinnyParams};
use super::abi::linear::{SKINNY_STAGE_TILES, SKINNY_VALUE_BUFFERS, SKINNY_WARPS};
use super::abi::tiles::ACT_TILE_TOKENS;
use super::error::device_error;
use super::experts::{ExpertKernels, ExpertTypeKernels, ExpertWeights, GroupedPairs, OP};
use super::launch::launch_kernel;
use super::linear::BARRIER_BYTES;
use super::quantize::activation_bytes;
use super::skinny_linear::{ROUND_STAGES, ROUNDS_MAX, TILE_VALUE_BYTES, WARPS};
use super::{Device, LaunchConfig, Stream};

/// Products that one launch computes: the shape of an expert's matrix, and the stacks of matrices.
#[derive(Clone, Copy, Debug)]
pub struct ExpertProduct {
    pub shape: Tiles,
    pub stacks: usize,
}

/// Pipeline stages, and bytes of shared memory. The kernel divides shared memory in the same way.
/// None if a round of stages does not fit, or if a matrix has fewer weight tiles than a round. The
/// ring has at most as many tiles as a group.
fn pipeline(device: &Device, product: ExpertProduct) -> Option<(usize, usize)> {
    let ExpertProduct { shape, stacks } = product;
    let act_tiles = activation_bytes(shape.dtype().activation()?, ACT_TILE_TOKENS, shape.cols())?;
    let values = SKINNY_VALUE_BUFFERS * SKINNY_WARPS * TILE_VALUE_BYTES;
    let barriers = (2 * SKINNY_VALUE_BUFFERS + EXPERT_SKINNY_ACT_GROUPS) * BARRIER_BYTES;
    let stage_bytes = SKINNY_STAGE_TILES * shape.tile_bytes() + 2 * BARRIER_BYTES;
    let rest = (EXPERT_SKINNY_ACT_GROUPS * act_tiles).checked_add(values + barriers)?;
    let available = (device.shared_bytes_max() as usize).checked_sub(rest)?;
    let matrix_tiles = shape.row_tiles() * shape.col_tiles();
    let group_rounds = stacks * matrix_tiles / SKINNY_WARPS;
    let rounds = (available / (ROUND_STAGES * stage_bytes)).min(group_rounds).min(ROUNDS_MAX);
    let stages = rounds * ROUND_STAGES;
    (stages > 0 && matrix_tiles >= SKINNY_WARPS).then(|| (stages, rest + stages * stage_bytes))
}

/// Whether the device computes these products with the kernel.
pub(super) fn can_compute(device: &Device, product: ExpertProduct) -> bool {
    pipeline(device, product).is_some()
}

impl ExpertKernels {
    /// # Safety
    /// As [`Self::matmul`], which has checked all lengths. `params` are those of the other
    /// arguments.
    pub(super) unsafe fn launch_skinny(
        &self,
        kernels: &ExpertTypeKernels,
        stream: &Stream,
        of: GroupedPairs<'_>,
        params: ExpertParams,
        stacks: &[ExpertWeights<'_>],
    ) -> Result<(), OpError> {
        let shape = stacks[0].shape;
        let product = ExpertProduct { shape, stacks: stacks.len() };
        let Some((stages, shared_bytes)) = pipeline(&self.device, product) else {
            let (what, found) = ("weight tiles of groups of 8", shape.row_tiles() * shape.col_tiles());
            return Err(OpError::Shape { op: OP, what, found, expected: SKINNY_WARPS });
        };
        let params =
            ExpertSkinnyParams { common: params, stacks: stacks.len() as i32, stages: stages as i32 };
        let row_tiles = of.grouping.groups_max(of.pairs, of.count) * shape.row_tiles() * stacks.len();
        let launch = LaunchConfig {
            grid: (row_tiles.min(self.device.multiprocessors() as usize) as u32, 1, 1),
            block: 32 * WARPS as u32,
            shared_bytes: shared_bytes as u32,
            overlaps_predecessor: true,
            cluster: 1,
        };
        // SAFETY: by the contract of `matmul`, the experts of groups are below `count`, and slots
        // and pairs are below their numbers. So the kernel reads and writes tiles, activation tiles
        // and outputs inside the lengths that were checked. It reads groups before its predecessor
        // has ended: one of the launches between had waited for them before it let the next start.
        unsafe { launch_kernel(&kernels.family, kernels.skinny, stream, launch, &ExpertSkinny { params }) }
            .map_err(device_error(OP))
    }
}
