// SPDX-License-Identifier: Apache-2.0

//! When linear/skinny_matmul.cuh computes a product, and how it divides shared memory.

use std::ops::RangeInclusive;

use ops::OpError;
use quant::DType;
use quant::layout::{TILE_ROWS, Tiles};

use super::Device;
use super::abi::linear::{LinearSkinny, SKINNY_WARPS_8, SKINNY_WARPS_16, SkinnyPipeline};
use super::launch::{KernelName, kernel_name};
use super::linear::{BARRIER_BYTES, NO_SHARED_MEMORY, OP, PIPELINE_STAGES};
use super::linear_names::quant_types;
use super::quantize::activation_bytes;

/// Tokens of the kernel for few, which Q8_0 alone has.
const FEW_TOKENS: usize = 8;
/// Tokens of a kernel, at most.
pub const SKINNY_TOKENS: usize = 16;
/// From here on it is faster than linear/matmul.cuh: by 10 to 25% with 16 tokens and 4096 columns
/// on an H200 (Q4_K: 145 us instead of 184 for 151936 rows).
const FASTEST_FROM_TOKENS: usize = 9;
/// The same for the kernel for few. Measured with 8 tokens of qwen3-8b: Q8_0 decodes 5% faster, but
/// Q4_K_M 6% slower, because its tiles have more instructions for fewer bytes. With fewer tokens,
/// both kernels do the same work.
const FASTEST_FROM_FEW_TOKENS: usize = 4;
/// Column tiles whose values a block collects before it adds them, if it has so many: 48 KiB. Then
/// every thread of a block has sums to add.
const BATCH_COL_TILES: usize = 48;
/// Warps of a block of the kernel for few tokens, and of the other. With fewer, it is slower than
/// linear/matmul.cuh.
const FEW_WARPS: RangeInclusive<usize> = 8..=SKINNY_WARPS_8;
const WARPS: RangeInclusive<usize> = 12..=SKINNY_WARPS_16;
/// Warps of a block and buffers for values, best first.
const DIVISIONS: [(usize, usize); 9] = [
    (SKINNY_WARPS_8, 2),
    (SKINNY_WARPS_8, 1),
    (24, 1),
    (SKINNY_WARPS_16, 2),
    (SKINNY_WARPS_16, 1),
    (12, 2),
    (12, 1),
    (8, 2),
    (8, 1),
];

/// Tokens of the kernel that computes this many.
pub(super) fn capacity(dtype: DType, tokens: usize) -> usize {
    if dtype == DType::Q8_0 && tokens <= FEW_TOKENS { FEW_TOKENS } else { SKINNY_TOKENS }
}

pub(super) fn is_fastest(dtype: DType, tokens: usize) -> bool {
    let from = if dtype == DType::Q8_0 { FASTEST_FROM_FEW_TOKENS } else { FASTEST_FROM_TOKENS };
    (from..=SKINNY_TOKENS).contains(&tokens)
}

/// The shared memory of a block. The kernel divides it in the same way.
pub(super) struct SharedMemoryDivision {
    pub(super) warps: usize,
    pub(super) pipeline: SkinnyPipeline,
    pub(super) shared_bytes: u32,
}

impl SharedMemoryDivision {
    /// For matrices of one shape but for their rows, which have `row_tiles` tiles in all, and the
    /// kernel for this many tokens.
    pub(super) fn new(
        device: &Device,
        shape: Tiles,
        row_tiles: usize,
        tokens: usize,
        format: DType,
    ) -> Result<Self, OpError> {
        let (col_tiles, tile_bytes) = (shape.col_tiles(), shape.tile_bytes());
        let act_tiles = activation_bytes(format, tokens, shape.cols()).unwrap_or(usize::MAX);
        let batch_col_tiles = if tokens == FEW_TOKENS { 2 * SKINNY_WARPS_8 } else { BATCH_COL_TILES };
        let batch_tiles =
            (batch_col_tiles / col_tiles).min(row_tiles.div_ceil(device.multiprocessors() as usize)).max(1);
        let values = batch_tiles * col_tiles * TILE_ROWS * tokens * 4;
        let available = device.shared_bytes_max() as usize;
        let mut needed = 0;
        let fits = if tokens == FEW_TOKENS { FEW_WARPS } else { WARPS };
        for (warps, value_buffers) in DIVISIONS.into_iter().filter(|(warps, _)| fits.contains(warps)) {
            let stage_bytes = warps * (tile_bytes + BARRIER_BYTES);
            let rest = act_tiles.saturating_add(value_buffers * values + BARRIER_BYTES * col_tiles);
            needed = rest.saturating_add(PIPELINE_STAGES.0 * stage_bytes);
            if needed > available {
                continue;
            }
            let stages = ((available - rest) / stage_bytes).min(PIPELINE_STAGES.1);
            let pipeline = SkinnyPipeline {
                stages: stages as i32,
                batch_tiles: batch_tiles as i32,
                value_buffers: value_buffers as i32,
            };
            return Ok(Self { warps, pipeline, shared_bytes: (rest + stages * stage_bytes) as u32 });
        }
        Err(OpError::Shape { op: OP, what: NO_SHARED_MEMORY, found: needed, expected: available })
    }
}

/// The kernel for as many tokens as `capacity` says.
pub(super) fn skinny_name(dtype: DType, tokens: usize) -> Option<KernelName<LinearSkinny>> {
    if tokens == FEW_TOKENS {
        return (dtype == DType::Q8_0).then_some(kernel_name!("linear_q8_0", "skinny_q8_0_8"));
    }
    macro_rules! names {
        ($($dtype:ident = $type:literal),*) => {
            match dtype {
                $(DType::$dtype => Some(kernel_name!(
                    concat!("linear_", $type),
                    concat!("skinny_", $type, "_16")
                )),)*
                _ => None,
            }
        };
    }
    quant_types!(names)
}
