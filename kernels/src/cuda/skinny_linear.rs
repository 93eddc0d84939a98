// SPDX-License-Identifier: Apache-2.0

//! When linear/skinny_matmul.cuh computes a product, and how it divides shared memory.

use ops::OpError;
use quant::DType;
use quant::layout::Tiles;

use super::Device;
use super::abi::linear::{
    LinearSkinny, SKINNY_ADDING_WARPS, SKINNY_STAGE_TILES, SKINNY_VALUE_BUFFERS, SKINNY_WARPS,
};
use super::abi::tiles::ACT_TILE_TOKENS;
use super::launch::{KernelName, kernel_name};
use super::linear::{BARRIER_BYTES, NO_SHARED_MEMORY, OP};
use super::linear_names::quant_types;
use super::quantize::activation_bytes;

/// Tokens of the larger kernel.
pub const SKINNY_TOKENS: usize = 16;
/// Columns up to which it is taken for up to eight tokens. Each block loads the activations of
/// whole rows before it has used them. On an H200, qwen3-8b Q4_K_M, whose down product has 12,288
/// columns, decodes 4.5% slower with four rows and 0.6% with eight if this kernel computes it.
const COLS_MAX: usize = 8192;
/// Warps of a block; the last one copies.
pub(super) const WARPS: usize = SKINNY_WARPS + SKINNY_ADDING_WARPS + 1;
/// Stages of a round, which has one weight tile for each multiplying warp. The ring has whole
/// rounds of stages.
pub(super) const ROUND_STAGES: usize = SKINNY_WARPS / SKINNY_STAGE_TILES;
/// Rounds in the ring. Two of Q4_K are 72 KiB, more than hide the memory's latency. With three or
/// four, the next kernel has less room to start early: 8 rows of qwen3-8b Q4_K_M decode 1% slower.
pub(super) const ROUNDS_MAX: usize = 2;
/// The values of a weight tile for eight tokens.
pub(super) const TILE_VALUE_BYTES: usize = 16 * ACT_TILE_TOKENS * 4;

/// Whether it is faster than linear/matmul.cuh.
pub(super) fn is_fastest(shape: Tiles, tokens: usize) -> bool {
    let cols_max = if tokens > ACT_TILE_TOKENS { usize::MAX } else { COLS_MAX };
    tokens <= SKINNY_TOKENS && shape.cols() <= cols_max
}

/// Pipeline stages, and bytes of shared memory, of the kernel for this many tokens. The kernel
/// divides shared memory in the same way.
pub(super) fn pipeline(
    device: &Device,
    shape: Tiles,
    tokens: usize,
    format: DType,
) -> Result<(i32, u32), OpError> {
    let groups = tokens / ACT_TILE_TOKENS;
    let act_tiles = activation_bytes(format, tokens, shape.cols()).unwrap_or(usize::MAX);
    let values = SKINNY_VALUE_BUFFERS * SKINNY_WARPS * groups * TILE_VALUE_BYTES;
    let barriers =
        (2 * SKINNY_VALUE_BUFFERS + shape.col_tiles().div_ceil(SKINNY_STAGE_TILES)) * BARRIER_BYTES;
    let stage_bytes = SKINNY_STAGE_TILES * shape.tile_bytes() + 2 * BARRIER_BYTES;
    let rest = act_tiles.saturating_add(values + barriers);
    let available = device.shared_bytes_max() as usize;
    let rounds = (available.saturating_sub(rest) / (ROUND_STAGES * stage_bytes)).min(ROUNDS_MAX);
    let stages = rounds * ROUND_STAGES;
    if stages == 0 {
        let found = rest.saturating_add(ROUND_STAGES * stage_bytes);
        return Err(OpError::Shape { op: OP, what: NO_SHARED_MEMORY, found, expected: available });
    }
    Ok((stages as i32, (rest + stages * stage_bytes) as u32))
}

/// Tokens of the kernel that computes this many.
pub(super) fn capacity(tokens: usize) -> usize {
    tokens.next_multiple_of(ACT_TILE_TOKENS)
}

/// The kernel for as many tokens as [`capacity`] says.
pub(super) fn skinny_name(dtype: DType, capacity: usize) -> Option<KernelName<LinearSkinny>> {
    macro_rules! names {
        ($($dtype:ident = $type:literal),*) => {
            match (dtype, capacity) {
                $(
                    (DType::$dtype, 8) => Some(names!(@kernel $type "8")),
                    (DType::$dtype, 16) => Some(names!(@kernel $type "16")),
                )*
                _ => None,
            }
        };
        (@kernel $type:literal $tokens:literal) => {
            kernel_name!(concat!("linear_", $type), concat!("skinny_", $type, "_", $tokens))
        };
    }
    quant_types!(names)
}
