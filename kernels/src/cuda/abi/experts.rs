// SPDX-License-Identifier: Apache-2.0

//! The interface of the mixture-of-experts kernels: routing, and products with the matrices of the
//! chosen experts.

use super::tiles::{F16Sums, QuantizedRows};

abi! {
    header "experts.cuh";
    include "\"abi/tiles.cuh\"";
    include "<cuda_bf16.h>";
    include "<cuda_fp16.h>";

    constants {
        /// The largest number of experts of a layer: 16 for each lane of a warp.
        const EXPERTS_MAX: usize = 512;
        /// The largest number of stacks of expert matrices in one launch: gate and up.
        const EXPERT_STACKS_MAX: usize = 2;
        /// Gate, up and down.
        const EXPERT_FUSED_MATRICES: usize = 3;
        /// Rows of a block of expert_topk_softmax. Each has one warp.
        const EXPERT_TOPK_ROWS: usize = 4;
        /// The largest number of rows of expert_route: each has one warp of its block.
        const EXPERT_ROUTE_ROWS: usize = 16;
        /// Threads of the only block of expert_route.
        const EXPERT_ROUTE_THREADS: u32 = 512;
        /// Threads of the only block of expert_sort_pairs.
        const EXPERT_SORT_THREADS: u32 = 1024;
        const EXPERT_COMBINE_THREADS: u32 = 256;
        /// Warps of a block of expert_quantize_*.
        const EXPERT_QUANTIZE_WARPS: usize = 8;
        /// Warps of a block of expert_matvec_*.
        const EXPERT_MATVEC_WARPS: usize = 8;
        /// Experts of a row of expert_row_*, at most: they and their weights are in shared memory.
        const EXPERT_ROW_USED_MAX: usize = 32;
        /// Row tiles of a block of expert_matmul_*.
        const EXPERT_MATMUL_ROW_TILES: usize = 8;
        /// Warps of a block: one for each row tile, and one that copies. A multiprocessor runs two
        /// such blocks.
        const EXPERT_MATMUL_WARPS: usize = 9;
        /// Activation tiles of a group of expert_matmul_*.
        const EXPERT_MATMUL_ACT_TILES: usize = 4;
        /// Groups of expert_skinny_* whose activations a block has in shared memory.
        const EXPERT_SKINNY_ACT_GROUPS: usize = 2;
        /// Threads of a block of expert_fused_*.
        const EXPERT_FUSED_THREADS: u32 = 704;
        /// The largest number of rows of expert_fused_*: the tokens of an activation tile.
        const EXPERT_FUSED_ROWS: usize = 8;
        /// The largest number of pairs of expert_fused_*, and so of groups.
        const EXPERT_FUSED_PAIRS_MAX: usize = 128;
        /// Words between the counts of two groups of expert_fused_*: a cache line.
        const EXPERT_FUSED_COUNT_STRIDE: usize = 32;
        /// Groups of the down product whose activations a block of expert_fused_* has in shared
        /// memory.
        const EXPERT_FUSED_DOWN_GROUPS: usize = 2;
        /// Shared memory for the choices of all rows: at least its bytes, and a multiple of 128.
        const EXPERT_FUSED_ROUTING_BYTES: usize = 5504;
        /// Slots of a group of expert_wgmma_* at most: of Q4_K and Q6_K, and of Q8_0, Q4_0 and
        /// Q5_0.
        const EXPERT_WGMMA_K_TOKENS: usize = 160;
        const EXPERT_WGMMA_LEGACY_TOKENS: usize = 128;
        /// A block of expert_wgmma_*: warpgroups of 64 rows each, pipeline stages of 256 columns,
        /// and warps. Four warps per warpgroup multiply, and four copy.
        const EXPERT_WGMMA_ROW_GROUPS: usize = 2;
        const EXPERT_WGMMA_STAGES: usize = 3;
        const EXPERT_WGMMA_WARPS: usize = 12;
    }
    structs {
        /// Pairs of (row, rank) that go through one expert together.
        struct ExpertGroup [12 bytes] {
            expert: u32,
            /// The first slot, in the order of sorted pairs.
            first: u32,
            pairs: u32,
        }

        /// How a kernel sorts pairs by expert, and where it writes their order.
        struct ExpertPairOrder [48 bytes] {
            /// Receives the pair of each slot. A slot without a pair receives the largest u32.
            sorted_pairs: u64 as "uint32_t *",
            groups: u64 as "ExpertGroup *",
            group_count: u64 as "uint32_t *",
            /// The largest number of pairs of a group.
            group_pairs: i32,
            /// The slots of an expert begin at a multiple of this number.
            align: i32,
            /// Length of `sorted_pairs`.
            slots: i32,
            /// The number of experts of the layer.
            expert_count: i32,
            /// Whether groups are in the order of falling pairs of their experts, not 0.
            largest_first: i32,
        }

        /// The inputs and outputs of expert_skinny_*, expert_matmul_* and expert_wgmma_*.
        struct ExpertParams [72 bytes] {
            /// Tiles of all experts' matrices, one matrix after the other.
            weights: [u64; EXPERT_STACKS_MAX] as "const uint8_t *",
            /// f32 [pairs][rows], or [slots][rows].
            out: [u64; EXPERT_STACKS_MAX] as "float *",
            act_tiles: u64 as "const uint8_t *",
            /// The pair of each slot.
            sorted_pairs: u64 as "const uint32_t *",
            groups: u64 as "const ExpertGroup *",
            group_count: u64 as "const uint32_t *",
            /// Rows of one expert's matrix.
            rows: i32,
            col_tiles: i32,
        }

        /// The activation tiles are in the order of slots. If sorted_pairs is null, outputs are in
        /// that order too.
        struct ExpertMatmulParams [80 bytes] {
            common: ExpertParams,
            stacks: i32,
            /// Stages of the pipeline.
            stages: i32,
        }

        /// As for expert_matmul_*. A group has up to 8 slots.
        struct ExpertSkinnyParams [80 bytes] {
            common: ExpertParams,
            stacks: i32,
            /// Stages of the ring, in whole rounds.
            stages: i32,
        }

        /// A layer of experts for up to 8 rows (experts/fused.cuh).
        struct ExpertFusedParams [104 bytes] {
            /// Tiles of all experts' gate, up and down matrices.
            weights: [u64; EXPERT_FUSED_MATRICES] as "const uint8_t *",
            /// Gate and up: f32 [pairs][hidden].
            values: [u64; EXPERT_STACKS_MAX] as "float *",
            /// f32 [pairs][width].
            out: u64 as "float *",
            /// Of the rows, in one tile of tokens.
            act_tiles: u64 as "const uint8_t *",
            /// f32 [rows][expert_count].
            logits: u64 as "const float *",
            /// Receives the weight of each pair in the sum of its row.
            pair_weights: u64 as "float *",
            /// Counts row tiles of each group: u32 [EXPERT_FUSED_PAIRS_MAX]
            /// [EXPERT_FUSED_COUNT_STRIDE], 0 at the start.
            finished: u64 as "uint32_t *",
            rows: i32,
            expert_count: i32,
            used: i32,
            /// Columns of gate and up, rows of down.
            width: i32,
            /// Rows of gate and up, columns of down.
            hidden: i32,
            /// Stages of the ring, in whole rounds.
            stages: i32,
        }

        /// One row's products with the matrices of its experts (experts/row_matvec.cuh).
        struct ExpertRowParams [88 bytes] {
            /// Tiles of all experts' matrices, one matrix after the other.
            weights: [u64; EXPERT_STACKS_MAX] as "const uint8_t *",
            /// Gate and up: f32 [used][rows]. Down: f32 [rows].
            out: [u64; EXPERT_STACKS_MAX] as "float *",
            /// Of the row, or for down of the row's pairs.
            act_tiles: u64 as "const uint8_t *",
            /// The expert of each rank, and its weight.
            experts: u64 as "const uint32_t *",
            pair_weights: u64 as "const float *",
            /// f32 [rows], to which down adds its output, or null.
            residual: u64 as "float *",
            /// Rows of one expert's matrix.
            rows: i32,
            col_tiles: i32,
            used: i32,
            stacks: i32,
            /// Pipeline stages of a warp.
            stages: i32,
            unused: i32,
        }
    }
    kernels {
        kernel ExpertTopkSoftmax(
            logits: u64 as "const float *",
            rows: i32,
            count: i32,
            used: i32,
            experts: u64 as "uint32_t *",
            expert_weights: u64 as "float *",
        );
        kernel ExpertSortPairs(
            experts: u64 as "const uint32_t *",
            pairs: i32,
            order: ExpertPairOrder,
        );
        kernel ExpertRoute(
            logits: u64 as "const float *",
            rows: i32,
            used: i32,
            experts: u64 as "uint32_t *",
            expert_weights: u64 as "float *",
            order: ExpertPairOrder,
        );
        /// Chooses the experts of one row, and quantizes the row `x` of `cols` values.
        kernel ExpertRouteRow(
            logits: u64 as "const float *",
            count: i32,
            used: i32,
            experts: u64 as "uint32_t *",
            expert_weights: u64 as "float *",
            x: u64 as "const float *",
            cols: i32,
            quantized: QuantizedRows,
        );
        kernel ExpertRow(params: ExpertRowParams);
        kernel ExpertQuantize(
            x: u64 as "const float *",
            sorted_pairs: u64 as "const uint32_t *",
            slots: i32,
            pairs_per_token: i32,
            cols: i32,
            quantized: QuantizedRows,
        );
        kernel ExpertMatmul(params: ExpertMatmulParams);
        kernel ExpertSkinny(params: ExpertSkinnyParams);
        kernel ExpertFused(params: ExpertFusedParams);
        /// `params` are as for expert_matmul_*. Q4_K alone reads `sums`.
        kernel ExpertWgmma(params: ExpertParams, stacks: i32, sums: F16Sums);
        kernel ExpertMatvecF32(
            weights: u64 as "const float *",
            x: u64 as "const float *",
            experts: u64 as "const uint32_t *",
            pairs_per_token: i32,
            rows: i32,
            cols: i32,
            out: u64 as "float *",
        );
        kernel ExpertMatvecF16(
            weights: u64 as "const __half *",
            x: u64 as "const float *",
            experts: u64 as "const uint32_t *",
            pairs_per_token: i32,
            rows: i32,
            cols: i32,
            out: u64 as "float *",
        );
        kernel ExpertMatvecBF16(
            weights: u64 as "const __nv_bfloat16 *",
            x: u64 as "const float *",
            experts: u64 as "const uint32_t *",
            pairs_per_token: i32,
            rows: i32,
            cols: i32,
            out: u64 as "float *",
        );
        /// `finished` is what the kernel clears of expert_fused_*, or null.
        kernel ExpertCombine(
            contributions: u64 as "const float *",
            expert_weights: u64 as "const float *",
            used: i32,
            cols: i32,
            out: u64 as "float *",
            finished: u64 as "uint32_t *",
        );
    }
}
