// SPDX-License-Identifier: Apache-2.0

//! Which products linear/wgmma_product.cuh computes, and with which blocks.

use quant::DType;

use super::Device;
pub use super::abi::linear::WgmmaShape;
use super::abi::linear::{LinearWgmma, MatmulShape};
use super::abi::tiles::F16Quants;
use super::archs::has_wgmma;
use super::launch::{KernelName, kernel_name};
use super::quantize::QuantizedActivations;

/// Products of more tokens than this may use wgmma. Up to here, half of a block would be empty, and
/// linear/skinny_matmul.cuh is faster.
const EIGHT_BIT_TOKENS_MAX: usize = 16;

/// Times of a weight type, measured on an H200.
struct Times {
    /// Microseconds of a block per 256 columns, by shape as in [`WgmmaShape::ALL`].
    blocks: [f64; 4],
    /// Microseconds per 256 columns of a block of 32 tokens of the 8-bit kernel, divided by the
    /// multiprocessors.
    matmul_block: f64,
}

fn times(dtype: DType) -> Option<Times> {
    match dtype {
        DType::Q4_K => Some(Times { blocks: [0.53, 0.75, 1.44, 2.15], matmul_block: 0.0031 }),
        // Measured with Q8_0. The other two are assumed to be alike.
        DType::Q8_0 | DType::Q4_0 | DType::Q5_0 => {
            Some(Times { blocks: [0.66, 1.08, 1.72, 3.3], matmul_block: 0.0036 })
        }
        DType::Q6_K => Some(Times { blocks: [0.69, 0.92, 1.5, 2.17], matmul_block: 0.0043 }),
        _ => None,
    }
}

/// Whether the products of a type are computed from f16 quants, not from activation tiles.
pub(super) fn is_f16_product(dtype: DType) -> bool {
    dtype == DType::Q4_K
}

impl WgmmaShape {
    pub fn all() -> [Self; 4] {
        Self::ALL
    }

    /// Output tiles of a product with `row_tiles` tiles of 16 rows.
    pub(super) fn output_tiles(&self, row_tiles: usize, tokens: usize) -> usize {
        row_tiles.div_ceil(self.row_tiles()) * tokens.div_ceil(self.tokens)
    }

    /// Microseconds of a product per 256 columns. A block is alone on its multiprocessor. Output
    /// tiles that find none free are computed after the first ones.
    fn column_tile_time(
        &self,
        block_time: f64,
        multiprocessors: usize,
        row_tiles: usize,
        tokens: usize,
    ) -> f64 {
        self.output_tiles(row_tiles, tokens).div_ceil(multiprocessors.max(1)) as f64 * block_time
    }

    /// The fastest shape, if the device has wgmma and it is faster than the 8-bit kernel.
    pub(super) fn fastest(device: &Device, dtype: DType, row_tiles: usize, tokens: usize) -> Option<Self> {
        let times = times(dtype).filter(|_| tokens > EIGHT_BIT_TOKENS_MAX && is_on(device))?;
        let multiprocessors = device.multiprocessors() as usize;
        let shapes = Self::ALL.into_iter().zip(times.blocks).map(|(shape, block_time)| {
            (shape.column_tile_time(block_time, multiprocessors, row_tiles, tokens), shape)
        });
        let (time, shape) = shapes.min_by(|a, b| a.0.total_cmp(&b.0))?;
        let matmul = MatmulShape::QUANTS[2];
        let matmul_blocks = row_tiles.div_ceil(matmul.row_tiles()) * tokens.div_ceil(matmul.tokens());
        let matmul_time = times.matmul_block * matmul_blocks.next_multiple_of(multiprocessors.max(1)) as f64;
        (time < matmul_time).then_some(shape)
    }
}

/// Whether the device has wgmma, and the images use it.
pub(super) fn is_on(device: &Device) -> bool {
    let (major, minor) = device.capability();
    has_wgmma(10 * major + minor)
}

/// Whether the device has kernels of linear/wgmma_product.cuh for these weights.
pub fn has_kernels(device: &Device, dtype: DType) -> bool {
    times(dtype).is_some() && is_on(device)
}

/// Whether products of these weights with this many tokens are computed from f16 quants, if the
/// device has wgmma.
pub(super) fn can_take_f16_quants(dtype: DType, tokens: usize) -> bool {
    times(dtype).is_some() && is_f16_product(dtype) && tokens > EIGHT_BIT_TOKENS_MAX
}

/// Whether the device computes such products from f16 quants.
pub fn takes_f16_quants(device: &Device, dtype: DType, tokens: usize) -> bool {
    can_take_f16_quants(dtype, tokens) && is_on(device)
}

/// The f16 quants of `x` for a kernel, empty for a type that is computed from activation tiles.
/// None if the type has no kernel, or if `x` lacks f16 quants that it needs.
pub(super) fn f16_quants(dtype: DType, x: &QuantizedActivations<'_>) -> Option<F16Quants> {
    times(dtype)?;
    if is_f16_product(dtype) {
        return x.layout.quants(x.data.address(), x.tokens, x.cols);
    }
    Some(F16Quants { units: 0, sums: 0, groups: 0 })
}

pub(super) fn wgmma_name(dtype: DType, shape: WgmmaShape) -> Option<KernelName<LinearWgmma>> {
    macro_rules! names {
        ($($dtype:ident = $type:literal),*) => {
            match (dtype, shape.tokens, shape.row_groups, shape.column_groups) {
                $(
                    (DType::$dtype, 32, 1, 4) => Some(names!(@of $type "_32_1_4")),
                    (DType::$dtype, 64, 1, 4) => Some(names!(@of $type "_64_1_4")),
                    (DType::$dtype, 64, 2, 1) => Some(names!(@of $type "_64_2_1")),
                    (DType::$dtype, 128, 2, 1) => Some(names!(@of $type "_128_2_1")),
                )*
                _ => None,
            }
        };
        (@of $type:literal $shape:literal) => {
            kernel_name!(concat!("linear_", $type), concat!("wgmma_", $type, $shape))
        };
    }
    names!(Q4_K = "q4_k", Q6_K = "q6_k", Q8_0 = "q8_0", Q4_0 = "q4_0", Q5_0 = "q5_0")
}
