// SPDX-License-Identifier: Apache-2.0

//! Launcher of linear_f32.cu: products with F32 weights, one matrix a launch.

use ops::OpError;

use super::abi::linear::{
    LINEAR_F32_FEW_WARPS, LINEAR_F32_TILE_ROWS, LINEAR_F32_TILE_TOKENS, LINEAR_F32_TILE_WARPS,
    LINEAR_F32_TOKENS, LINEAR_F32_WARPS, LinearF32,
};
use super::error::device_error;
use super::launch::{kernel_name, launch_spread};
use super::linear::{MatrixProduct, OP};
use super::quantize::QuantizedActivations;
use super::{LaunchConfig, LazyModule, Stream};

/// From this number of tokens on, linear_f32_tiles is faster. With fewer, its blocks leave
/// multiprocessors idle and take as long: on an H200, 512 tokens times 128 rows of 2,048 take 25 us
/// instead of 29, and 2,048 tokens 57 instead of 106.
const F32_TILE_TOKENS_MIN: usize = 512;

/// Up to this number of tokens, the blocks of a router of 128 experts are on an H200 at the same
/// time. More would wait, because of the registers of linear_f32_few.
const F32_FEW_TOKENS_MAX: usize = 32;

/// Computes one product. Its shapes were checked by `check_products`.
pub(super) fn launch(
    family: &LazyModule,
    stream: &Stream,
    x: QuantizedActivations<'_>,
    product: &mut MatrixProduct<'_>,
) -> Result<(), OpError> {
    let rows = product.shape.rows();
    if rows == 0 {
        return Ok(());
    }
    // An offset in the activations must fit 32 bits.
    let in_tiles = x.tokens >= F32_TILE_TOKENS_MIN
        && x.cols.is_multiple_of(4)
        && x.tokens.max(rows).saturating_mul(x.cols) <= i32::MAX as usize;
    let (name, block_rows, block_tokens, warps) = if in_tiles {
        let name = kernel_name!("linear_f32", "linear_f32_tiles");
        let along = LINEAR_F32_TILE_WARPS;
        (name, along * LINEAR_F32_TILE_ROWS, along * LINEAR_F32_TILE_TOKENS, along * along)
    } else {
        let (name, tokens, warps) = match x.tokens {
            1 => (kernel_name!("linear_f32", "linear_f32_token"), 1, LINEAR_F32_FEW_WARPS),
            2..=F32_FEW_TOKENS_MAX => {
                (kernel_name!("linear_f32", "linear_f32_few"), LINEAR_F32_TOKENS, LINEAR_F32_FEW_WARPS)
            }
            _ => (kernel_name!("linear_f32", "linear_f32"), LINEAR_F32_TOKENS, LINEAR_F32_WARPS),
        };
        (name, warps, tokens, warps)
    };
    let launch = LaunchConfig {
        grid: (rows.div_ceil(block_rows) as u32, x.tokens.div_ceil(block_tokens) as u32, 1),
        block: 32 * warps as u32,
        shared_bytes: 0,
        overlaps_predecessor: true,
        cluster: 1,
    };
    let arguments = LinearF32 {
        weights: product.tiles.address(),
        x: x.data.address(),
        bias: product.bias.map_or(0, |bias| bias.address()),
        out: product.out.address(),
        cols: x.cols as i32,
        rows: rows as i32,
        tokens: x.tokens as i32,
    };
    // SAFETY: a warp reads rows and tokens and writes their products, inside lengths that
    // `check_products` compared.
    unsafe { launch_spread(family, name, stream, launch, &arguments) }.map_err(device_error(OP))
}
