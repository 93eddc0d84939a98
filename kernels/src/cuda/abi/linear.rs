// SPDX-License-Identifier: Apache-2.0

//! The interface of linear layers: the matrices of one launch, and the block shapes of the
//! tensor-core kernels.

use std::fmt::Write;
use std::ops::Range;

use super::tiles::{ACT_TILE_TOKENS, F16Sums, QuantizedRows};

abi! {
    header "linear.cuh";
    include "\"abi/tiles.cuh\"";

    constants {
        /// The largest number of matrices that one launch multiplies with the same input.
        const MATRICES_MAX: usize = 4;
        /// Warps of a matrix-vector block.
        const MATVEC_WARPS: usize = 8;
        /// The longest row that a matrix-vector kernel normalises. Its threads keep the row in
        /// registers.
        const NORM_PRODUCT_COLS_MAX: usize = 8192;
        /// Weight tiles in one pipeline stage of a matrix-vector warp.
        const MATVEC_TILES_PER_STAGE: usize = 2;
        /// Rows of a block of linear_f32.cu. Each has one warp.
        const LINEAR_F32_WARPS: usize = 8;
        /// The same for linear_f32_token and linear_f32_few. More rows would share one first-level
        /// cache, through which each warp loads the activations.
        const LINEAR_F32_FEW_WARPS: usize = 2;
        /// Tokens of a block of linear_f32.cu.
        const LINEAR_F32_TOKENS: usize = 4;
        /// Rows and tokens of a warp of the kernel for many tokens.
        const LINEAR_F32_TILE_ROWS: usize = 8;
        const LINEAR_F32_TILE_TOKENS: usize = 8;
        /// Warps of its block along the rows, and along the tokens.
        const LINEAR_F32_TILE_WARPS: usize = 4;
        /// linear/skinny_pipeline.cuh: warps of a block that multiply, and that add; weight tiles
        /// of a stage, and rounds of values that wait to be added.
        const SKINNY_WARPS: usize = 16;
        const SKINNY_ADDING_WARPS: usize = 4;
        const SKINNY_STAGE_TILES: usize = 4;
        const SKINNY_VALUE_BUFFERS: usize = 2;
        /// A block of linear/wgmma_product.cuh: its bytes of shared memory, of a multiprocessor's
        /// 227 KiB.
        const WGMMA_PRODUCT_SHARED_BYTES: usize = 216 << 10;
        /// With one column group, it computes a multiple of this number of tokens.
        const WGMMA_TOKENS_STEP: usize = 32;
    }
    structs {
        /// Up to four matrices of one type that share their input.
        struct LinearParams [144 bytes] {
            /// Tiles (layout 1 of quant), 16-byte aligned. Not used for 16-bit floats.
            weights: [u64; MATRICES_MAX] as "const uint8_t *",
            /// f32 [tokens][rows].
            out: [u64; MATRICES_MAX] as "float *",
            /// f32 [rows], or null.
            bias: [u64; MATRICES_MAX] as "const float *",
            rows: [i32; MATRICES_MAX],
            matrices: i32,
            cols: i32,
            /// Column tiles of 256 columns.
            col_tiles: i32,
            tokens: i32,
            /// 1 if the previous kernel in the stream is a product with the same input
            /// (linear/params.cuh, `wait_for_input`).
            runs_beside_previous: i32,
            unused: i32,
            /// Index t * col_tiles + c is the activation tile of tokens 8 t to 8 t + 7. It has
            /// columns 256 c to 256 c + 255.
            act_tiles: u64 as "const uint8_t *",
        }
        /// The row that a product normalises before it multiplies it (linear/normed_input.cuh).
        struct NormedInput [56 bytes] {
            /// f32 [cols].
            x: u64 as "const float *",
            /// f32 [cols].
            weight: u64 as "const float *",
            /// f32 [cols]: the normalised row, for kernels that read it later.
            out: u64 as "float *",
            /// The same, quantized.
            quantized: QuantizedRows,
            eps: f32,
        }
    }
    kernels {
        /// `residual`, f32 [rows], is null if there are several matrices.
        kernel LinearMatvec(params: LinearParams, residual: u64 as "float *", stages: i32);
        kernel LinearNormMatvec(params: LinearParams, input: NormedInput, stages: i32);
        /// `first_blocks` blocks compute the matrices of `first`, the others those of `second`.
        kernel LinearNormMatvecPair(
            first: LinearParams,
            second: LinearParams,
            input: NormedInput,
            first_stages: i32,
            second_stages: i32,
            first_blocks: i32,
        );
        kernel LinearMatmul(params: LinearParams, stages: i32);
        kernel LinearSkinny(params: LinearParams, stages: i32);
        /// As for LinearNormMatvecPair.
        kernel LinearSkinnyPair(
            first: LinearParams,
            second: LinearParams,
            first_stages: i32,
            second_stages: i32,
            first_blocks: i32,
        );
        /// `sums` are empty for types other than Q4_K and Q5_K.
        kernel LinearWgmma(params: LinearParams, sums: F16Sums);
        kernel LinearF32(
            weights: u64 as "const float *",
            x: u64 as "const float *",
            bias: u64 as "const float *",
            out: u64 as "float *",
            cols: i32,
            rows: i32,
            tokens: i32,
        );
    }

    text block_shapes;
}

/// The shape of a block of a tensor-core kernel. The block has `warps_m * warps_n * warps_k` warps.
/// Each warp computes `tiles_m` row tiles by `tiles_n` activation tiles of one column tile at a
/// time. The block works on `warps_k` column tiles at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(unreachable_pub, reason = "the launcher exports it")]
pub struct MatmulShape {
    tiles_m: usize,
    tiles_n: usize,
    warps_m: usize,
    warps_n: usize,
    warps_k: usize,
}

#[allow(dead_code, unreachable_pub, reason = "build.rs needs the dimensions, launchers the sizes")]
impl MatmulShape {
    const fn new(tiles: [usize; 2], warps: [usize; 3]) -> Self {
        let ([tiles_m, tiles_n], [warps_m, warps_n, warps_k]) = (tiles, warps);
        Self { tiles_m, tiles_n, warps_m, warps_n, warps_k }
    }

    /// 16 warps. Fewer warps do not hide the latencies of the steps between tensor-core
    /// instructions.
    pub(crate) const QUANTS: [Self; 4] = [
        Self::new([1, 1], [2, 1, 8]),
        Self::new([1, 1], [2, 2, 4]),
        Self::new([1, 2], [2, 2, 4]),
        Self::new([2, 4], [4, 4, 1]),
    ];
    /// Tokens of a block. The kernel's name contains this number.
    pub const fn tokens(&self) -> usize {
        self.act_tiles() * ACT_TILE_TOKENS
    }

    /// Activation tiles of a block along the tokens.
    pub(crate) const fn act_tiles(&self) -> usize {
        self.tiles_n * self.warps_n
    }

    /// Tiles of 16 rows of a block.
    pub(crate) const fn row_tiles(&self) -> usize {
        self.tiles_m * self.warps_m
    }

    pub(crate) const fn warps(&self) -> usize {
        self.warps_m * self.warps_n * self.warps_k
    }

    /// Column tiles of a pipeline stage.
    pub(crate) const fn depth(&self) -> usize {
        self.warps_k
    }

    fn macro_arguments(&self) -> String {
        let Self { tiles_m, tiles_n, warps_m, warps_n, warps_k } = self;
        format!("{tiles_m}, {tiles_n}, {warps_m}, {warps_n}, {warps_k}")
    }
}

/// The shape of a block of linear/wgmma_product.cuh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(unreachable_pub, reason = "the launcher exports it")]
pub struct WgmmaShape {
    /// Tokens of an output tile.
    pub(crate) tokens: usize,
    /// Warpgroups that divide the rows of an output tile, with 64 rows each.
    pub(crate) row_groups: usize,
    /// Warpgroups of a block that divide its columns.
    pub(crate) column_groups: usize,
    /// Blocks that divide the columns: 1, or 2 of a cluster (linear/value_exchange.cuh).
    pub(crate) blocks: usize,
    /// Pipeline stages of 256 columns.
    stages: usize,
}

#[allow(dead_code, unreachable_pub, reason = "build.rs needs the dimensions, launchers the sizes")]
impl WgmmaShape {
    const fn new(tokens: usize, [row_groups, column_groups, blocks]: [usize; 3], stages: usize) -> Self {
        Self { tokens, row_groups, column_groups, blocks, stages }
    }

    /// The name of a kernel has all numbers but the stages.
    pub(crate) const ALL: [Self; 9] = [
        Self::new(16, [1, 4, 1], 8),
        Self::new(32, [1, 4, 1], 8),
        Self::new(32, [1, 4, 2], 8),
        Self::new(64, [1, 4, 1], 5),
        Self::new(64, [2, 1, 1], 3),
        Self::new(64, [3, 1, 1], 3),
        Self::new(128, [2, 1, 1], 3),
        Self::new(160, [2, 1, 1], 3),
        Self::new(64, [1, 4, 2], 5),
    ];
    /// Those of Q4_K, Q5_K and Q6_K. With 16 tokens they are no faster.
    const K: Range<usize> = 1..9;
    /// Those of the other types: their sums of 160 tokens do not fit the registers, and two blocks
    /// that exchange values of 64 tokens are no faster.
    const LEGACY: Range<usize> = 0..7;

    pub const fn tokens(&self) -> usize {
        self.tokens
    }

    /// Tiles of 16 weight rows of an output tile.
    pub(crate) const fn row_tiles(&self) -> usize {
        4 * self.row_groups
    }

    /// Four per warpgroup, and four that copy.
    pub(crate) const fn warps(&self) -> usize {
        4 * self.row_groups * self.column_groups + 4
    }
}

#[allow(dead_code, reason = "build.rs prints none")]
impl std::fmt::Display for WgmmaShape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { tokens, row_groups, column_groups, blocks, .. } = self;
        write!(f, "{tokens}/{row_groups}/{column_groups}/{blocks}")
    }
}

/// Returns macros that define the kernels of a type: `QUANT_MATMULS(q4_k, Q4_K)`.
#[allow(dead_code, reason = "for build.rs")]
fn block_shapes() -> String {
    let mut out = String::from(
        "\n// MATMUL_KERNEL(name, tokens, format, MT, NT, WM, WN, WK)\n#define QUANT_MATMULS(NAME, FORMAT)",
    );
    for shape in MatmulShape::QUANTS {
        let (tokens, arguments) = (shape.tokens(), shape.macro_arguments());
        let _ = write!(out, " \\\n    MATMUL_KERNEL(NAME, {tokens}, FORMAT, {arguments})");
    }
    out.push_str("\n\n// WGMMA_KERNEL(name, format, tokens, row groups, column groups, blocks, stages)");
    for (name, shapes) in [("LEGACY", WgmmaShape::LEGACY), ("K", WgmmaShape::K)] {
        let _ = write!(out, "\n#define WGMMA_{name}_KERNELS(NAME, FORMAT)");
        for WgmmaShape { tokens, row_groups, column_groups, blocks, stages } in &WgmmaShape::ALL[shapes] {
            let _ = write!(
                out,
                " \\\n    WGMMA_KERNEL(NAME, FORMAT, {tokens}, {row_groups}, {column_groups}, {blocks}, {stages})"
            );
        }
    }
    out.push('\n');
    out
}
