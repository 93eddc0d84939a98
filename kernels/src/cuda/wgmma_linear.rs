// SPDX-License-Identifier: Apache-2.0

//! Which products linear/wgmma_product.cuh computes, and with which blocks.

use quant::DType;
use quant::layout::Tiles;

use super::Device;
pub use super::abi::linear::WgmmaShape;
use super::abi::linear::{LinearWgmma, MatmulShape, WGMMA_TOKENS_STEP};
use super::abi::tiles::F16Sums;
use super::archs::has_wgmma;
use super::launch::{KernelName, kernel_name};
use super::quantize::{NO_SUMS, QuantizedActivations};

/// Products of more tokens than this may use wgmma. Up to here, linear/skinny_matmul.cuh and
/// linear/matmul.cuh are faster, but for wide matrices of Q8_0: 4096 x 24576 and 16 tokens take 32
/// us, and 30 on wgmma.
const EIGHT_BIT_TOKENS_MAX: usize = 16;

/// Microseconds that a launch takes longer than one of single blocks on wgmma, whatever its columns
/// (H200): one of two blocks that exchange values, and one of the 8-bit kernel.
const EXCHANGE_START: f64 = 2.9;
const MATMUL_START: f64 = 1.2;

/// Times of a weight type, measured on an H200.
struct Times {
    /// Microseconds of a block with four column groups, per 256 columns, for the tokens of each
    /// shape.
    in_turn: &'static [(usize, f64)],
    /// Microseconds of two such blocks per 512 columns, fitted so that products are computed by the
    /// shape that was measured to be faster.
    exchanged: &'static [(usize, f64)],
    /// Microseconds of a block with one column group and two row groups, per 256 columns, for 64
    /// and 128 tokens. The times of other numbers of tokens lie on the same line.
    two_row_groups: [f64; 2],
    /// The same with three row groups, for 32 and 64 tokens.
    three_row_groups: [f64; 2],
    /// Microseconds of a block of the 8-bit kernel, per 256 columns, for 32 tokens.
    matmul_block: f64,
}

fn times(dtype: DType) -> Option<Times> {
    match dtype {
        DType::Q4_K => Some(Times {
            in_turn: &[(32, 0.42), (64, 0.62)],
            exchanged: &[(32, 0.5), (64, 0.7)],
            two_row_groups: [1.21, 1.94],
            three_row_groups: [1.10, 1.72],
            matmul_block: 0.37,
        }),
        DType::Q5_K => Some(Times {
            in_turn: &[(32, 0.47), (64, 0.69)],
            exchanged: &[(32, 0.55), (64, 0.74)],
            two_row_groups: [1.34, 2.05],
            three_row_groups: [1.22, 1.80],
            matmul_block: 0.42,
        }),
        // Measured with Q8_0. The other two are assumed to be alike.
        DType::Q8_0 | DType::Q4_0 | DType::Q5_0 => Some(Times {
            in_turn: &[(16, 0.39), (32, 0.51), (64, 0.87)],
            exchanged: &[(32, 0.64)],
            two_row_groups: [1.54, 2.94],
            three_row_groups: [1.23, 2.14],
            matmul_block: 0.42,
        }),
        DType::Q6_K => Some(Times {
            in_turn: &[(32, 0.59), (64, 0.77)],
            exchanged: &[(32, 0.63), (64, 0.81)],
            two_row_groups: [1.49, 2.13],
            three_row_groups: [1.59, 2.06],
            matmul_block: 0.5,
        }),
        _ => None,
    }
}

impl Times {
    /// Microseconds per 256 columns of a block, or of those of a cluster, for this many tokens.
    fn of_output_tile(&self, shape: &WgmmaShape, tokens: usize) -> f64 {
        if shape.column_groups == 1 {
            let ([first, second], of_first) = if shape.row_groups == 3 {
                (self.three_row_groups, 32.0)
            } else {
                (self.two_row_groups, 64.0)
            };
            let tokens = tokens.next_multiple_of(WGMMA_TOKENS_STEP) as f64;
            return first + (second - first) * (tokens - of_first) / of_first;
        }
        let times = if shape.blocks == 1 { self.in_turn } else { self.exchanged };
        let of_shape = times.iter().find(|(tokens, _)| *tokens == shape.tokens);
        let (_, time) = of_shape.expect("each shape that has a kernel was measured");
        time / shape.blocks as f64
    }
}

/// Whether the products of a type need f16 sums of the activations.
pub(super) fn needs_f16_sums(dtype: DType) -> bool {
    matches!(dtype, DType::Q4_K | DType::Q5_K)
}

impl WgmmaShape {
    /// Those that have a kernel for weights of this type.
    pub fn of(dtype: DType) -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(move |&shape| wgmma_name(dtype, shape).is_some())
    }

    /// Output tiles of a product with `row_tiles` tiles of 16 rows.
    pub(super) fn output_tiles(&self, row_tiles: usize, tokens: usize) -> usize {
        row_tiles.div_ceil(self.row_tiles()) * tokens.div_ceil(self.tokens)
    }

    /// How many blocks, or clusters of blocks, get the output tiles in turn. A multiprocessor has
    /// room for one block.
    pub(super) fn workers(&self, multiprocessors: usize) -> usize {
        (multiprocessors / self.blocks).max(1)
    }

    /// Microseconds of a product per 256 columns, with so many [`Self::workers`]. Output tiles with
    /// fewer tokens come last.
    fn column_tile_time(&self, times: &Times, workers: usize, row_tiles: usize, tokens: usize) -> f64 {
        let row_blocks = row_tiles.div_ceil(self.row_tiles());
        let (whole, all) = (row_blocks * (tokens / self.tokens), self.output_tiles(row_tiles, tokens));
        let time_of = |worker: usize| {
            let [whole, all] = [whole, all].map(|tiles| tiles.saturating_sub(worker).div_ceil(workers));
            whole as f64 * times.of_output_tile(self, self.tokens)
                + (all - whole) as f64 * times.of_output_tile(self, tokens % self.tokens)
        };
        // The first one has most tiles, and the other one most of those with fewer tokens.
        time_of(0).max(time_of(whole % workers))
    }

    /// The fastest shape on this many multiprocessors, for matrices like `matrix` that have
    /// `row_tiles` tiles of 16 rows together. None if the device has no wgmma, or if the 8-bit
    /// kernel is faster.
    pub(super) fn fastest(
        device: &Device,
        multiprocessors: usize,
        matrix: Tiles,
        row_tiles: usize,
        tokens: usize,
    ) -> Option<Self> {
        if is_on(device) { Self::fastest_by_times(multiprocessors, matrix, row_tiles, tokens) } else { None }
    }

    fn fastest_by_times(
        multiprocessors: usize,
        matrix: Tiles,
        row_tiles: usize,
        tokens: usize,
    ) -> Option<Self> {
        let dtype = matrix.dtype();
        let times = times(dtype).filter(|_| tokens > EIGHT_BIT_TOKENS_MAX)?;
        let col_tiles = matrix.col_tiles() as f64;
        // With three row groups, prompts of 2,048 tokens of an 8B model in Q8_0 took 0.5% longer
        // (H200).
        let is_for_prompts = |shape: &Self| shape.row_groups < 3;
        let candidates = Self::of(dtype)
            .filter(|shape| shape.blocks <= multiprocessors)
            .filter(|shape| tokens <= shape.tokens || is_for_prompts(shape));
        let shapes = candidates.map(|shape| {
            let time = shape.column_tile_time(&times, shape.workers(multiprocessors), row_tiles, tokens);
            let start = if shape.blocks > 1 { EXCHANGE_START } else { 0.0 };
            (start + col_tiles * time, shape)
        });
        let (time, shape) = shapes.min_by(|a, b| a.0.total_cmp(&b.0))?;
        let matmul = MatmulShape::QUANTS[2];
        let matmul_blocks = row_tiles.div_ceil(matmul.row_tiles()) * tokens.div_ceil(matmul.tokens());
        let matmul_column_tile = times.matmul_block * matmul_blocks.div_ceil(multiprocessors) as f64;
        let matmul_time = MATMUL_START + col_tiles * matmul_column_tile;
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

/// Whether products of these weights with this many tokens may need f16 sums, if the device has
/// wgmma.
pub(super) fn can_take_f16_sums(dtype: DType, tokens: usize) -> bool {
    times(dtype).is_some() && needs_f16_sums(dtype) && tokens > EIGHT_BIT_TOKENS_MAX
}

/// Whether such products may need f16 sums on this device.
pub fn takes_f16_sums(device: &Device, dtype: DType, tokens: usize) -> bool {
    can_take_f16_sums(dtype, tokens) && is_on(device)
}

/// The f16 sums of `x` for a kernel, none for a type that needs none. None if the type has no
/// kernel, or if `x` lacks sums that it needs.
pub(super) fn f16_sums(dtype: DType, x: &QuantizedActivations<'_>) -> Option<F16Sums> {
    times(dtype)?;
    if needs_f16_sums(dtype) { x.layout.sums(x.data.address(), x.tokens, x.cols) } else { Some(NO_SUMS) }
}

pub(super) fn wgmma_name(dtype: DType, shape: WgmmaShape) -> Option<KernelName<LinearWgmma>> {
    macro_rules! names {
        ($($dtype:ident = $type:literal),*) => {
            match (dtype, shape.tokens, [shape.row_groups, shape.column_groups, shape.blocks]) {
                $(
                    (DType::$dtype, 32, [1, 4, 1]) => Some(names!(@of $type "_32_1_4_1")),
                    (DType::$dtype, 32, [1, 4, 2]) => Some(names!(@of $type "_32_1_4_2")),
                    (DType::$dtype, 64, [1, 4, 1]) => Some(names!(@of $type "_64_1_4_1")),
                    (DType::$dtype, 64, [2, 1, 1]) => Some(names!(@of $type "_64_2_1_1")),
                    (DType::$dtype, 64, [3, 1, 1]) => Some(names!(@of $type "_64_3_1_1")),
                    (DType::$dtype, 128, [2, 1, 1]) => Some(names!(@of $type "_128_2_1_1")),
                )*
                (DType::Q8_0, 16, [1, 4, 1]) => Some(names!(@of "q8_0" "_16_1_4_1")),
                (DType::Q4_0, 16, [1, 4, 1]) => Some(names!(@of "q4_0" "_16_1_4_1")),
                (DType::Q5_0, 16, [1, 4, 1]) => Some(names!(@of "q5_0" "_16_1_4_1")),
                (DType::Q4_K, 64, [1, 4, 2]) => Some(names!(@of "q4_k" "_64_1_4_2")),
                (DType::Q5_K, 64, [1, 4, 2]) => Some(names!(@of "q5_k" "_64_1_4_2")),
                (DType::Q6_K, 64, [1, 4, 2]) => Some(names!(@of "q6_k" "_64_1_4_2")),
                (DType::Q4_K, 160, [2, 1, 1]) => Some(names!(@of "q4_k" "_160_2_1_1")),
                (DType::Q5_K, 160, [2, 1, 1]) => Some(names!(@of "q5_k" "_160_2_1_1")),
                (DType::Q6_K, 160, [2, 1, 1]) => Some(names!(@of "q6_k" "_160_2_1_1")),
                _ => None,
            }
        };
        (@of $type:literal $shape:literal) => {
            kernel_name!(concat!("linear_", $type), concat!("wgmma_", $type, $shape))
        };
    }
    names!(Q4_K = "q4_k", Q5_K = "q5_k", Q6_K = "q6_k", Q8_0 = "q8_0", Q4_0 = "q4_0", Q5_0 = "q5_0")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fastest(
        dtype: DType,
        multiprocessors: usize,
        [cols, rows]: [usize; 2],
        tokens: usize,
    ) -> Option<String> {
        let matrix = Tiles::new(dtype, cols, rows).unwrap();
        WgmmaShape::fastest_by_times(multiprocessors, matrix, matrix.row_tiles(), tokens)
            .map(|shape| shape.to_string())
    }

    #[test]
    fn narrow_products_take_two_blocks_for_long_rows_and_blocks_of_16_tokens_for_few() {
        for (dtype, size, tokens, expected) in [
            (DType::Q4_K, [12_288, 4096], 32, "32/1/4/2"),
            (DType::Q4_K, [12_288, 4096], 64, "64/1/4/2"),
            (DType::Q4_K, [4096, 4096], 64, "32/1/4/1"),
            (DType::Q8_0, [4096, 4096], 24, "16/1/4/1"),
            (DType::Q8_0, [4096, 4096], 32, "16/1/4/1"),
            (DType::Q8_0, [4096, 6144], 32, "32/1/4/1"),
            (DType::Q8_0, [12_288, 4096], 32, "32/1/4/2"),
        ] {
            let found = fastest(dtype, 132, size, tokens);
            assert_eq!(found.as_deref(), Some(expected), "{dtype}, {size:?}, {tokens} tokens");
        }
    }

    #[test]
    fn wide_products_of_few_tokens_take_three_row_groups() {
        for dtype in [DType::Q4_K, DType::Q5_K, DType::Q6_K, DType::Q8_0] {
            for (rows, tokens) in [(24_576, 32), (24_576, 48), (24_576, 64), (151_936, 32), (151_936, 64)] {
                let found = fastest(dtype, 132, [4096, rows], tokens);
                assert_eq!(found.as_deref(), Some("64/3/1/1"), "{dtype}, {rows} rows, {tokens} tokens");
            }
            // 64 output tiles, for 132 multiprocessors.
            let found = fastest(dtype, 132, [4096, 12_288], 64);
            assert_ne!(found.as_deref(), Some("64/3/1/1"), "{dtype}");
        }
        assert_eq!(fastest(DType::Q8_0, 132, [4096, 24_576], 512).as_deref(), Some("128/2/1/1"));
    }

    #[test]
    fn each_shape_that_has_a_kernel_was_measured() {
        let types = [DType::Q4_K, DType::Q5_K, DType::Q6_K, DType::Q8_0, DType::Q4_0, DType::Q5_0];
        for dtype in types {
            let times = times(dtype).expect("a type on wgmma");
            let shapes: Vec<_> = WgmmaShape::of(dtype).collect();
            assert!(shapes.len() >= 6, "{dtype}");
            for shape in shapes {
                assert!(times.of_output_tile(&shape, shape.tokens) > 0.0, "{dtype} {shape}");
            }
        }
    }

    #[test]
    fn one_multiprocessor_gets_no_cluster_of_two_blocks() {
        for tokens in 17..=256 {
            if let Some(shape) = fastest(DType::Q4_K, 1, [12_288, 4096], tokens) {
                assert!(shape.ends_with("/1"), "{shape} for {tokens} tokens");
            }
        }
    }
}
