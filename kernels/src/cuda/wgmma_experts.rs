// SPDX-License-Identifier: Apache-2.0

//! Launcher of experts/wgmma.cuh: products of experts for many pairs an expert, on GPUs with wgmma.

use ops::OpError;
use quant::DType;

use super::abi::experts::{
    EXPERT_WGMMA_K_TOKENS, EXPERT_WGMMA_LEGACY_TOKENS, EXPERT_WGMMA_ROW_GROUPS, EXPERT_WGMMA_WARPS,
    ExpertParams, ExpertWgmma,
};
use super::abi::linear::WGMMA_PRODUCT_SHARED_BYTES;
use super::error::device_error;
use super::experts::{ExpertKernels, ExpertTypeKernels, ExpertWeights, GroupedPairs, OP};
use super::launch::{KernelName, kernel_name, launch_kernel};
use super::quantize::QuantizedActivations;
use super::wgmma_linear::{f16_sums, has_kernels, needs_f16_sums};
use super::{Device, LaunchConfig, Stream};

/// From this number of pairs per expert on, wgmma is faster than the kernel of mma.sync: for Q4_K
/// and Q5_K, and for the other types. Measured on an H200 with 128 experts of 2048 x 768, gate and
/// up. Q4_K: 24 pairs take 112 us on wgmma and 100 without it, 32 take 125 and 137 (with f16
/// operands; Q5_K is assumed to be alike). Q8_0: 16 pairs take 114 and 118. Q6_K: 16 pairs take 125
/// and 130.
const AFFINE_PAIRS_MIN: usize = 28;
const OTHER_PAIRS_MIN: usize = 16;
/// Row tiles of a block.
const ROW_TILES: usize = 4 * EXPERT_WGMMA_ROW_GROUPS;

/// Whether `pairs` pairs of `count` experts are enough for wgmma.
fn has_enough_pairs(dtype: DType, pairs: usize, count: usize) -> bool {
    let least = if needs_f16_sums(dtype) { AFFINE_PAIRS_MIN } else { OTHER_PAIRS_MIN };
    pairs >= least * count
}

/// Whether products of experts with these weights may need f16 sums, if the device has wgmma.
pub(super) fn can_take_f16_sums(dtype: DType, pairs: usize, count: usize) -> bool {
    needs_f16_sums(dtype) && has_enough_pairs(dtype, pairs, count)
}

/// Whether wgmma is the fastest for a layer with weights of these types.
pub(super) fn is_fastest(device: &Device, dtypes: &[DType], pairs: usize, count: usize) -> bool {
    dtypes.iter().all(|&dtype| has_kernels(device, dtype) && has_enough_pairs(dtype, pairs, count))
}

/// The most pairs of a group that the kernels of all these types take. None if one of the types has
/// no kernel.
pub(super) fn group_pairs_max(dtypes: &[DType]) -> Option<usize> {
    let of_type = |&dtype: &DType| match dtype {
        DType::Q4_K | DType::Q5_K | DType::Q6_K => Some(EXPERT_WGMMA_K_TOKENS),
        DType::Q8_0 | DType::Q4_0 | DType::Q5_0 => Some(EXPERT_WGMMA_LEGACY_TOKENS),
        _ => None,
    };
    dtypes.iter().map(of_type).min().flatten()
}

fn wgmma_name(dtype: DType) -> Option<KernelName<ExpertWgmma>> {
    macro_rules! names {
        ($($dtype:ident = $type:literal),*) => {
            match dtype {
                $(DType::$dtype => {
                    Some(kernel_name!(concat!("experts_", $type), concat!("expert_wgmma_", $type)))
                })*
                _ => None,
            }
        };
    }
    names!(Q4_K = "q4_k", Q5_K = "q5_k", Q6_K = "q6_k", Q8_0 = "q8_0", Q4_0 = "q4_0", Q5_0 = "q5_0")
}

impl ExpertKernels {
    /// # Safety
    /// As [`Self::matmul`], which has checked all lengths. `params` are those of the other
    /// arguments.
    pub(super) unsafe fn launch_wgmma(
        &self,
        kernels: &ExpertTypeKernels,
        stream: &Stream,
        x: QuantizedActivations<'_>,
        of: GroupedPairs<'_>,
        params: ExpertParams,
        stacks: &[ExpertWeights<'_>],
    ) -> Result<(), OpError> {
        let shape = stacks[0].shape;
        let dtype = shape.dtype();
        let (Some(name), Some(sums)) = (wgmma_name(dtype), f16_sums(dtype, &x)) else {
            return Err(OpError::Type { op: OP, dtype });
        };
        let group_pairs_max = group_pairs_max(&[dtype]).unwrap_or(0);
        if of.grouping.group_pairs() > group_pairs_max {
            let (found, expected) = (of.grouping.group_pairs(), group_pairs_max);
            return Err(OpError::Shape { op: OP, what: "pairs of a group", found, expected });
        }
        let groups_max = of.grouping.groups_max(of.pairs, of.count);
        let output_tiles = groups_max * shape.row_tiles().div_ceil(ROW_TILES) * stacks.len();
        // A multiprocessor has shared memory for one block.
        let blocks = output_tiles.min(self.device.multiprocessors() as usize) as u32;
        let launch = LaunchConfig {
            grid: (blocks, 1, 1),
            block: 32 * EXPERT_WGMMA_WARPS as u32,
            shared_bytes: WGMMA_PRODUCT_SHARED_BYTES as u32,
            overlaps_predecessor: true,
            cluster: 1,
        };
        let arguments = ExpertWgmma { params, stacks: stacks.len() as i32, sums };
        // SAFETY: by this function's contract the experts of groups are below `count`, and slots
        // and pairs are below their numbers. So the kernel reads and writes tiles, activations and
        // outputs inside the lengths that were checked. It reads groups of 8 slots that have a
        // pair.
        unsafe { launch_kernel(&kernels.family, name, stream, launch, &arguments) }.map_err(device_error(OP))
    }
}
