// SPDX-License-Identifier: Apache-2.0

//! The interface of kernels that work row by row or value by value.

use super::tiles::{QuantizedRows, TilePlanes};

abi! {
    header "elementwise.cuh";
    include "\"abi/tiles.cuh\"";

    constants {
        /// Threads of a block of norm.cu. A block normalises one row.
        const NORM_THREADS: u32 = 512;
        /// The longest row that norm.cu can also quantize. A block keeps the row in registers.
        const NORM_QUANTIZED_COLS_MAX: usize = 16_384;
        /// The longest row of the kernels for short rows. A thread keeps eight values.
        const NORM_SHORT_COLS_MAX: usize = 4_096;
        /// Heads of a block of rms_norm_heads. Each has one warp.
        const NORM_HEADS: usize = 4;
        const ADD_THREADS: u32 = 256;
        const ACT_AND_MUL_THREADS: u32 = 256;
        /// Warps of a block of the kernels of act_and_mul.cu that quantize. Each takes 256 columns
        /// of a token.
        const ACT_AND_MUL_WARPS: usize = 8;
        const ROPE_THREADS: u32 = 256;
        const GATHER_THREADS: u32 = 256;
        /// Marks an entry of embed.cu's tokens that names a drawn token.
        const DRAWN_TOKEN: u32 = 1 << 31;
        const ARGMAX_THREADS: u32 = 1024;
        /// Blocks of a cluster of argmax.cu, which takes one row. Every GPU takes clusters of 8.
        const ARGMAX_BLOCKS: u32 = 8;
        /// Warps of a block of quantize.cu. Each takes 256 columns of a token.
        const QUANTIZE_WARPS: usize = 8;
        const CHECKSUM_THREADS: u32 = 512;
        const WORD_COPY_THREADS: u32 = 256;
        /// Words that a block of fetch_words copies.
        const WORD_COPY_BLOCK_WORDS: u32 = 2048;
        /// The largest number of ranges that one launch copies.
        const WORD_COPY_RANGES: usize = 3;
        /// Bytes of a piece, the unit of checksums. The weight-server's loader has the same number.
        const PIECE_BYTES: usize = 1 << 20;
    }
    structs {
        /// Ranges of words in pinned host memory, and where they go.
        #[derive(Default)]
        struct WordCopies [64 bytes] {
            from: [u64; WORD_COPY_RANGES] as "const uint32_t *",
            to: [u64; WORD_COPY_RANGES] as "uint32_t *",
            words: [u32; WORD_COPY_RANGES],
            ranges: i32,
        }
    }
    kernels {
        kernel FetchWords(copies: WordCopies);
        kernel SendWords(from: u64 as "const uint32_t *", to: u64 as "uint32_t *", words: u32);
        kernel RmsNorm(
            x: u64 as "float *",
            weight: u64 as "const float *",
            eps: f32,
            out: u64 as "float *",
            cols: i32,
            quantized: QuantizedRows,
            launches_early: i32,
        );
        kernel AddRmsNorm(
            x: u64 as "float *",
            y: u64 as "const float *",
            weight: u64 as "const float *",
            eps: f32,
            out: u64 as "float *",
            cols: i32,
            quantized: QuantizedRows,
            launches_early: i32,
        );
        kernel AddNormedRmsNorm(
            x: u64 as "float *",
            y: u64 as "const float *",
            y_weight: u64 as "const float *",
            weight: u64 as "const float *",
            eps: f32,
            out: u64 as "float *",
            cols: i32,
            quantized: QuantizedRows,
            launches_early: i32,
        );
        kernel RmsNormHeads(
            x: u64 as "float *",
            weight: u64 as "const float *",
            eps: f32,
            heads: i32,
            head_dim: i32,
        );
        kernel AddResidual(x: u64 as "float *", y: u64 as "const float *", values: u64);
        kernel Scale(x: u64 as "float *", factor: f32, values: u64);
        kernel ActAndMul(
            gate: u64 as "float4 *",
            up: u64 as "const float4 *",
            vectors: u64,
        );
        kernel ActAndMulScalar(
            gate: u64 as "float *",
            up: u64 as "const float *",
            values: u64,
        );
        /// `pairs_of_rows` is null, or the pair of each row, or NO_PAIR.
        kernel ActAndMulQuantized(
            gate: u64 as "float *",
            up: u64 as "const float *",
            tokens: i32,
            cols: i32,
            needs_values: i32,
            pairs_of_rows: u64 as "const uint32_t *",
            quantized: QuantizedRows,
            launches_early: i32,
        );
        kernel Rope(
            x: u64 as "float *",
            positions: u64 as "const uint32_t *",
            inverse_frequencies: u64 as "const float *",
            magnitude: f32,
            adjacent: i32,
            pairs: i32,
            head_dim: i32,
            heads: i32,
        );
        kernel GatherRows(
            x: u64 as "const float *",
            rows: u64 as "const uint32_t *",
            out: u64 as "float *",
            cols: i32,
        );
        kernel ArgmaxRows(x: u64 as "const float *", cols: u32, out: u64 as "uint32_t *");
        kernel EmbedQuantized(
            planes: TilePlanes,
            dtype: i32,
            tiles: u64 as "const uint8_t *",
            tokens: u64 as "const uint32_t *",
            drawn: u64 as "const uint32_t *",
            out: u64 as "float *",
            cols: i32,
            rows: i32,
        );
        kernel EmbedFloat(
            dtype: i32,
            table: u64 as "const uint8_t *",
            tokens: u64 as "const uint32_t *",
            drawn: u64 as "const uint32_t *",
            out: u64 as "float *",
            cols: i32,
            rows: i32,
        );
        kernel QuantizeActivations(
            x: u64 as "const float *",
            tokens: i32,
            cols: i32,
            quantized: QuantizedRows,
        );
        kernel RepackRowsToTiles(
            planes: TilePlanes,
            raw: u64 as "const uint8_t *",
            row_bytes: i64,
            rows: i32,
            tiles: u64 as "uint8_t *",
        );
        kernel UnpackTilesToRows(
            planes: TilePlanes,
            raw: u64 as "uint8_t *",
            row_bytes: i64,
            rows: i32,
            tiles: u64 as "const uint8_t *",
        );
        kernel ChecksumPieces(bytes: u64 as "const uint8_t *", total: u64, out: u64 as "uint64_t *");
    }
}
