// SPDX-License-Identifier: Apache-2.0

//! Launchers of linear_mixed.cu: products with matrices of two types.

use ops::OpError;
use quant::DType;
use quant::layout::Tiles;

use super::abi::linear::{LinearNormMatvecPair, LinearSkinnyPair, MATVEC_WARPS};
use super::error::device_error;
use super::fused_linear::{NormInput, check_norm};
use super::launch::{KernelName, launch_kernel};
use super::linear::{
    LinearKernels, LinearMethod, MatrixProduct, NO_SHARED_MEMORY, OP, check_products, linear_params,
    matvec_pipeline, no_kernel,
};
use super::linear_names::{norm_matvec_pair_name, skinny_pair_name};
use super::quantize::QuantizedActivations;
use super::{LaunchConfig, Stream, skinny_linear};

impl LinearKernels {
    /// Whether [`Self::launch_normed_both`] takes matrices of these types.
    pub(super) fn can_mix_normed(first: DType, second: DType) -> bool {
        norm_matvec_pair_name(first, second).is_some()
    }

    /// Whether [`Self::launch_both`] takes matrices of these types, for this many tokens.
    pub(super) fn can_mix(first: DType, second: DType, tokens: usize) -> bool {
        tokens > 1 && skinny_pair_name(first, second, skinny_linear::capacity(tokens)).is_some()
    }

    /// Computes [`Self::launch`] for `first`, and for `second`, which are of another type. If there
    /// is no such kernel, or others are faster, nothing is computed and the result is `false`.
    pub(super) fn launch_both(
        &self,
        stream: &Stream,
        x: QuantizedActivations<'_>,
        first: &[MatrixProduct<'_>],
        second: &[MatrixProduct<'_>],
    ) -> Result<bool, OpError> {
        let ([one, ..], [other, ..]) = (first, second) else { return Ok(false) };
        let shapes = [one.shape, other.shape];
        let capacity = skinny_linear::capacity(x.tokens);
        check_products(x, first)?;
        check_products(x, second)?;
        let are_skinny = shapes.iter().all(|&shape| self.method(shape, x.tokens) == LinearMethod::Skinny);
        let name = skinny_pair_name(one.shape.dtype(), other.shape.dtype(), capacity);
        let (true, Some(name)) = (are_skinny, name) else { return Ok(false) };
        let pipelines =
            shapes.map(|shape| skinny_linear::pipeline(self.device(), shape, capacity, x.layout.format));
        let Some(mixed) = self.mixed_launch(name, skinny_linear::WARPS, pipelines, [first, second])? else {
            return Ok(false);
        };
        let arguments = LinearSkinnyPair {
            first: linear_params(x, first),
            second: linear_params(x, second),
            first_stages: mixed.first_stages,
            second_stages: mixed.second_stages,
            first_blocks: mixed.first_blocks,
        };
        // SAFETY: as in `LinearKernels::launch`, for the matrices of both types. Shared memory
        // suffices for either type.
        unsafe { launch_kernel(&self.mixed, name, stream, mixed.launch, &arguments) }
            .map(|()| true)
            .map_err(device_error(OP))
    }

    /// Computes [`Self::launch_normed`] for `first`, and for `second`, which are of another type.
    /// If rows are too long for the device's shared memory, nothing is computed and the result is
    /// `false`.
    pub(super) fn launch_normed_both(
        &self,
        stream: &Stream,
        norm: &mut NormInput<'_>,
        x: QuantizedActivations<'_>,
        first: &[MatrixProduct<'_>],
        second: &[MatrixProduct<'_>],
    ) -> Result<bool, OpError> {
        let ([one, ..], [other, ..]) = (first, second) else { return Ok(false) };
        let (dtype, other_dtype) = (one.shape.dtype(), other.shape.dtype());
        check_products(x, first)?;
        check_products(x, second)?;
        check_norm(norm, x, dtype)?;
        let name = norm_matvec_pair_name(dtype, other_dtype).ok_or_else(|| no_kernel(x.tokens))?;
        let pipelines = [one.shape, other.shape].map(|shape| {
            let (tile_bytes, col_tiles) = (shape.tile_bytes(), shape.col_tiles());
            matvec_pipeline(self.device(), tile_bytes, col_tiles, x.layout.format)
        });
        let Some(mixed) = self.mixed_launch(name, MATVEC_WARPS, pipelines, [first, second])? else {
            return Ok(false);
        };
        let arguments = LinearNormMatvecPair {
            first: linear_params(x, first),
            second: linear_params(x, second),
            input: norm.arguments(x),
            first_stages: mixed.first_stages,
            second_stages: mixed.second_stages,
            first_blocks: mixed.first_blocks,
        };
        // SAFETY: as in `launch_normed`, for the matrices of both types. Shared memory suffices for
        // either type.
        unsafe { launch_kernel(&self.mixed, name, stream, mixed.launch, &arguments) }
            .map(|()| true)
            .map_err(device_error(OP))
    }

    /// The launch of both types. None if rows are too long for the device's shared memory.
    fn mixed_launch<A>(
        &self,
        name: KernelName<A>,
        warps: usize,
        pipelines: [Result<Pipeline, OpError>; 2],
        products: [&[MatrixProduct<'_>]; 2],
    ) -> Result<Option<MixedLaunch>, OpError> {
        let Some([(first_stages, first_bytes), (second_stages, second_bytes)]) = both_fit(pipelines)? else {
            return Ok(None);
        };
        let [first, second] = products.map(row_tiles);
        let shared_bytes = first_bytes.max(second_bytes);
        let block = 32 * warps as u32;
        let kernel = self.mixed.kernel(name.as_c_str()).map_err(device_error(OP))?;
        let resident = kernel.blocks_per_multiprocessor(block, shared_bytes).map_err(device_error(OP))?;
        let blocks = resident.max(1) as usize * self.multiprocessors();
        let (first_blocks, second_blocks) = divide_blocks(blocks, first, second);
        let grid = ((first_blocks + second_blocks) as u32, 1, 1);
        let launch = LaunchConfig { grid, block, shared_bytes, overlaps_predecessor: true, cluster: 1 };
        Ok(Some(MixedLaunch { first_stages, second_stages, first_blocks: first_blocks as i32, launch }))
    }
}

/// A launch of no more blocks than run at once.
struct MixedLaunch {
    first_stages: i32,
    second_stages: i32,
    /// Blocks that compute the matrices of the first type.
    first_blocks: i32,
    launch: LaunchConfig,
}

/// Stages, and bytes of shared memory.
type Pipeline = (i32, u32);

/// The pipelines, unless rows are too long for the device's shared memory.
fn both_fit(pipelines: [Result<Pipeline, OpError>; 2]) -> Result<Option<[Pipeline; 2]>, OpError> {
    match pipelines {
        [Ok(first), Ok(second)] => Ok(Some([first, second])),
        [Err(OpError::Shape { what: NO_SHARED_MEMORY, .. }), _]
        | [_, Err(OpError::Shape { what: NO_SHARED_MEMORY, .. })] => Ok(None),
        [Err(error), _] | [_, Err(error)] => Err(error),
    }
}

/// Row tiles that a block computes as a whole, and the bytes of each.
#[derive(Clone, Copy)]
struct RowTiles {
    count: usize,
    bytes: usize,
}

impl RowTiles {
    /// Bytes of the block that has most of them.
    fn largest_share(self, blocks: usize) -> usize {
        self.count.div_ceil(blocks) * self.bytes
    }
}

fn row_tiles(products: &[MatrixProduct<'_>]) -> RowTiles {
    let bytes = |shape: Tiles| shape.col_tiles() * shape.tile_bytes();
    RowTiles {
        count: products.iter().map(|product| product.shape.row_tiles()).sum(),
        bytes: products.first().map_or(0, |product| bytes(product.shape)),
    }
}

/// How many of at most `blocks` blocks compute `first` and `second`: so many that the largest share
/// has the fewest bytes. Each gets one block at least.
fn divide_blocks(blocks: usize, first: RowTiles, second: RowTiles) -> (usize, usize) {
    let most = second.count.min(blocks.saturating_sub(1)).max(1);
    let of_first = |of_second: usize| first.count.min(blocks.saturating_sub(of_second)).max(1);
    let largest_share =
        |of_second: &usize| first.largest_share(of_first(*of_second)).max(second.largest_share(*of_second));
    let of_second = (1..=most).min_by_key(largest_share).unwrap_or(1);
    (of_first(of_second), of_second)
}

#[cfg(test)]
mod tests {
    use super::*;

    const Q4_K_BYTES: usize = 16 * 2304;
    const Q6_K_BYTES: usize = 16 * 3360;

    #[test]
    fn tiles_that_fit_have_a_block_each() {
        let (first, second) =
            (RowTiles { count: 10, bytes: Q4_K_BYTES }, RowTiles { count: 3, bytes: Q6_K_BYTES });
        assert_eq!(divide_blocks(264, first, second), (10, 3));
    }

    #[test]
    fn no_division_has_a_smaller_largest_share() {
        for blocks in [2, 3, 60, 132, 264] {
            for (count, other) in [(1, 1), (320, 64), (64, 320), (5, 1000), (1536, 768)] {
                let (first, second) =
                    (RowTiles { count, bytes: Q4_K_BYTES }, RowTiles { count: other, bytes: Q6_K_BYTES });
                let (a, b) = divide_blocks(blocks, first, second);
                assert!(a >= 1 && b >= 1 && a + b <= blocks && a <= count && b <= other);
                let found = first.largest_share(a).max(second.largest_share(b));
                for b in 1..blocks {
                    let share = first.largest_share(blocks - b).max(second.largest_share(b));
                    assert!(found <= share, "{blocks} blocks, {count} and {other} row tiles");
                }
            }
        }
    }
}
