// SPDX-License-Identifier: Apache-2.0

//! The interface of attention over the paged KV cache: constants of the tensor-core kernels,
//! entries of a step's plan, and the kernels' parameters.

use super::kv::{KvLayerAddress, NormRopeKvParams};
use super::tiles::QuantizedRows;

abi! {
    header "attention.cuh";
    include "\"abi/kv.cuh\"";
    include "\"abi/tiles.cuh\"";

    constants {
        /// Keys of a tile.
        const ATTENTION_TILE: usize = 64;
        /// Warps of a block.
        const ATTENTION_WARPS: usize = 4;
        /// Stages of the KV pipeline, if tiles are copied while others are multiplied.
        const ATTENTION_STAGES: usize = 2;
        /// Groups of four warps of a block of attention_grouped_kv and attention_clustered_kv.
        const ATTENTION_GROUPS: usize = 4;
        /// Those of a block of attention_two_groups_kv.
        const ATTENTION_TWO_GROUPS: usize = 2;
        /// Shared memory that a block of attention_grouped_kv or attention_two_groups_kv has at
        /// most beside its dynamic shared memory: addresses, maxima, weights, angles, and the row's
        /// own key and value.
        const ATTENTION_GROUPED_BYTES: usize = 6 << 10;
        /// The same of attention_clustered_kv, which has the weights of all blocks.
        const ATTENTION_CLUSTERED_BYTES: usize = 10 << 10;
        /// Blocks of a cluster of attention_clustered_kv, at most. Every GPU takes clusters of 8,
        /// unless it has too few multiprocessors.
        const ATTENTION_CLUSTER_MAX: usize = 8;
        /// Padding between rows in shared memory, in 16-bit values. With it, the 16-byte vectors of
        /// a column are in different banks.
        const ATTENTION_PAD: usize = 8;
        /// Padding between rows of bytes in shared memory.
        const ATTENTION_PAD_BYTES: usize = 16;
        /// (token, head) pairs of a block of the prefill kernel: 16 for each warp.
        const PREFILL_PAIRS: usize = 64;
        /// Dimensions of a block of that kernel. For larger heads, it has half of them.
        const PREFILL_PART_DIM_MAX: usize = 128;
        /// The largest head of the kernels on tensor cores.
        const ATTENTION_HEAD_DIM_MAX: usize = 256;
        /// Warpgroups of the prefill kernel on wgmma that multiply, of 64 pairs each. Four more
        /// warps copy.
        const PREFILL_WGMMA_GROUPS: usize = 2;
        /// Shared memory of a block of that kernel. For heads of 128, it needs 192 KiB for four
        /// stages and the queries, and up to 1 KiB for the alignment.
        const PREFILL_WGMMA_SHARED_BYTES: usize = 194 << 10;
        /// (token, head) pairs of a block of the split-KV kernel: the rows of one MMA.
        const SPLIT_KV_PAIRS: usize = 16;
        /// A window that has every key. The distance from a row to a later key, modulo 2^32, is not
        /// below it.
        const NO_WINDOW: u32 = 1 << 31;
    }
    structs {
        /// Consecutive tokens of one sequence.
        #[derive(Debug, PartialEq, Eq)]
        struct QueryTile [20 bytes] {
            /// The row of the first token in the step.
            row: u32,
            tokens: u32,
            /// The position of the first token.
            position: u32,
            /// The index in the step's tables at which the block ids of the sequence begin.
            table: u32,
            /// A split has 64 << split_shift keys.
            split_shift: u32,
        }

        /// Consecutive splits of the keys of a query tile. A block computes one after the other.
        #[derive(Debug, PartialEq, Eq)]
        struct KvSplits [48 bytes, align 16] {
            queries: QueryTile,
            /// The number of the first split.
            first: u32,
            splits: u32,
            /// Index of the partial result of the first split and token. The results of the other
            /// tokens follow it, then those of the next split.
            partial: u32,
            /// 1 if no row of the step writes keys of the first tile.
            is_first_tile_old: u32,
            unused: [u32; 3],
        }

        /// One row whose partial results are merged.
        #[derive(Debug, PartialEq, Eq)]
        struct PartialMerge [16 bytes, align 16] {
            row: u32,
            /// Index of the first split's partial result.
            partial: u32,
            /// Distance between the partial results of successive splits.
            stride: u32,
            splits: u32,
        }

        struct AttentionQueries [24 bytes] {
            values: u64 as "const float *",
            heads: i32,
            /// Query heads per KV head.
            group: i32,
            /// The scale of scores, times log2(e).
            scale: f32,
            /// How many keys a row sees, its own included.
            window: u32,
        }
    }
    kernels {
        /// `raw_heads` is what norm_rope_kv.cu would do before. Its queries are null if the queries
        /// are ready and the keys written.
        kernel AttentionSplitKv(
            kv: KvLayerAddress,
            queries: AttentionQueries,
            tables: u64 as "const uint32_t *",
            splits: u64 as "const KvSplits *",
            split_count: u64 as "const uint32_t *",
            stage_count: i32,
            raw_heads: NormRopeKvParams,
            partial_sums: u64 as "float *",
            partial_weights: u64 as "float2 *",
        );
        /// Like AttentionSplitKv, for entries with all splits of their rows, which the kernel
        /// merges. It also quantizes the rows, unless `quantized.act_tiles` is null. `quantizer` is
        /// an ActivationFormat.
        kernel AttentionMergedKv(
            kv: KvLayerAddress,
            queries: AttentionQueries,
            tables: u64 as "const uint32_t *",
            splits: u64 as "const KvSplits *",
            split_count: u64 as "const uint32_t *",
            stage_count: i32,
            raw_heads: NormRopeKvParams,
            out: u64 as "float *",
            quantizer: i32,
            quantized: QuantizedRows,
        );
        /// Like AttentionMergedKv, for entries of one row whose splits are tiles.
        kernel AttentionGroupedKv(
            kv: KvLayerAddress,
            queries: AttentionQueries,
            tables: u64 as "const uint32_t *",
            splits: u64 as "const KvSplits *",
            split_count: u64 as "const uint32_t *",
            raw_heads: NormRopeKvParams,
            out: u64 as "float *",
            quantizer: i32,
            quantized: QuantizedRows,
        );
        kernel AttentionMerge(
            partial_sums: u64 as "const float *",
            partial_weights: u64 as "const float2 *",
            merges: u64 as "const PartialMerge *",
            merge_count: u64 as "const uint32_t *",
            heads: i32,
            dim: i32,
            out: u64 as "float *",
        );
        /// Like AttentionMerge. The kernel also writes the row as activation tiles.
        kernel AttentionMergeQuantized(
            partial_sums: u64 as "const float *",
            partial_weights: u64 as "const float2 *",
            merges: u64 as "const PartialMerge *",
            merge_count: u64 as "const uint32_t *",
            heads: i32,
            dim: i32,
            out: u64 as "float *",
            quantized: QuantizedRows,
        );
        kernel AttentionPrefill(
            kv: KvLayerAddress,
            queries: AttentionQueries,
            tables: u64 as "const uint32_t *",
            query_tiles: u64 as "const QueryTile *",
            query_tile_count: u64 as "const uint32_t *",
            out: u64 as "float *",
        );
        kernel AttentionScalar(
            kv: KvLayerAddress,
            queries: AttentionQueries,
            dim: i32,
            tables: u64 as "const uint32_t *",
            table_starts: u64 as "const uint32_t *",
            positions: u64 as "const uint32_t *",
            out: u64 as "float *",
        );
    }
}
