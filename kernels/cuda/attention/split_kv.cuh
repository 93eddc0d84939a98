// SPDX-License-Identifier: Apache-2.0

// Attention for decode rows and short runs of tokens, drawn in attention.cu. A block computes
// splits of up to 16 (row, head) pairs of one sequence and KV head, one split after the other. Its
// warps divide the 16 x 64 scores by keys, and the output by dimensions, so that no sum is divided
// between warps.
//
//   grid: (KV heads, entries of the plan), so that the heads of a row, which are neighbours in the
//   cache, run at the same time
//
// raw_heads.cuh says how a block prepares heads that have no norm and rotation yet, and
// split_results.cuh what becomes of the results of a split.

#pragma once

#include "kv_pipeline.cuh"
#include "raw_heads.cuh"
#include "split_results.cuh"
#include "split_tiles.cuh"

namespace {

template <class Cache, class Results>
__device__ void attention_split_kv(const KvLayerAddress &kv, const AttentionQueries &queries,
                                   const uint32_t *tables, const KvSplits *splits,
                                   const uint32_t *split_count, int stage_count,
                                   const NormRopeKvParams &raw_params, Results results) {
    extern __shared__ __align__(16) uint8_t shared[];
    __half *const query_rows = reinterpret_cast<__half *>(shared + stage_count * Cache::STAGE_BYTES);
    __half *const weight_tile = query_rows + 16 * Cache::PITCH;
    __shared__ float largest_by_warp[WARPS][16];
    __shared__ typename KvPipeline<Cache>::AddressBuffer addresses;
    __shared__ typename RawHeads<Cache>::Shared raw_shared;

    // The host sent plans and tables before this part of the step, and what fetches them lets
    // nothing start early. So this kernel may read them before the previous one has ended.
    const uint32_t count = *split_count;
    const KvSplits split = splits[blockIdx.y];
    if (blockIdx.y >= count) return;
    const QueryTile &query_tile = split.queries;
    const uint32_t kv_head = blockIdx.x;
    const int pairs = query_tile.tokens * queries.group;
    const uint32_t lowest = first_key(query_tile.position, queries.window),
                   last = query_tile.position + query_tile.tokens - 1;
    // The first split of the rows begins at the tile of the first key, the last one ends at the
    // last token.
    const uint32_t first_tile = max(split.first << query_tile.split_shift, lowest / TILE),
                   first = first_tile * TILE;
    const int tiles =
        min((split.first + split.splits) << query_tile.split_shift, last / TILE + 1) - first_tile;
    const uint32_t split_tiles = 1 << query_tile.split_shift;
    const int warp = threadIdx.x / 32;
    const bool is_raw = Cache::TAKES_RAW_HEADS && raw_params.queries != nullptr;
    // The row's own key is the last.
    const bool has_own_key = is_raw && first + tiles * TILE > last;
    KvPipeline<Cache> pipeline{{kv, tables + query_tile.table, kv_head, first, lowest, last, has_own_key},
                               addresses,
                               shared,
                               stage_count,
                               tiles};
    pipeline.prefetch();
    __syncthreads();

    RawHeads<Cache> raw{raw_params, raw_shared, query_tile.row, kv_head, has_own_key};
    if (is_raw) {
        pipeline.load_tile(0);
        raw.prefetch();
        zero_query_rows<Cache>(query_rows, pairs, 16);
        __syncthreads();
        wait_for_previous_kernel();
        launch_next_kernel();
        raw.template finish<3>(kv, queries, query_rows);
    } else {
        // Earlier steps have written this tile, so its copies need not wait for the step's keys.
        if (split.is_first_tile_old) pipeline.load_tile(0);
        wait_for_previous_kernel();
        launch_next_kernel();
        if (!split.is_first_tile_old) pipeline.load_tile(0);
        load_queries<Cache>(query_rows, queries, query_tile, kv_head, pairs, 16);
    }
    __syncthreads();
    SplitTiles<Cache> state(query_tile, queries, query_rows, weight_tile, largest_by_warp);

    for (int tile = 0; tile < tiles; tile++) {
        uint8_t *stage = pipeline.wait(tile);
        if (has_own_key && tile + 1 == tiles) {
            raw.put(stage, (last - first) % TILE);
            __syncthreads();
        }

        state.add_tile(stage, first + tile * TILE, warp, BlockBarrier());
        // The next round overwrites this stage.
        __syncthreads();
        pipeline.release(tile);

        if ((first_tile + tile + 1) % split_tiles != 0 && tile + 1 != tiles) continue;
        const int number = ((first_tile + tile) >> query_tile.split_shift) - split.first;
        results.end_split(split, number, queries, kv_head, state.softmax, state.weight_sum, state.sums);
        state.reset();
    }
    // The stages are free.
    results.finish(query_tile, queries, kv_head, reinterpret_cast<float *>(shared));
}

}  // namespace

// Blocks per multiprocessor for which the compiler must leave registers; 0 is the compiler's
// choice. With heads of 64 and splits of one tile, shared memory has room for more than the 5
// blocks of that choice. With 6 blocks, 64 rows at 1,000 keys on an H200 take 54.9 us instead of
// 57.7. Larger heads would spill registers; asking for no more blocks than they have made them
// slower by up to a tenth.
#define SPLIT_KV_BLOCKS(DIM) (DIM == 64 ? 6 : 0)

#define SPLIT_KV_KERNEL(DIM, CACHE)                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS, SPLIT_KV_BLOCKS(DIM)) attention_split_kv_##DIM(   \
        const __grid_constant__ KvLayerAddress kv, const __grid_constant__ AttentionQueries queries,        \
        const uint32_t *tables, const KvSplits *splits, const uint32_t *split_count, int stage_count,       \
        const __grid_constant__ NormRopeKvParams raw_heads, float *partial_sums, float2 *partial_weights) { \
        attention_split_kv<CACHE>(kv, queries, tables, splits, split_count, stage_count, raw_heads,         \
                                  PartialResults<CACHE>{partial_sums, partial_weights});                    \
    }                                                                                                       \
    CHECK_SIGNATURE(attention_split_kv_##DIM, AttentionSplitKv);                                            \
    extern "C" __global__ void __launch_bounds__(THREADS) attention_merged_kv_##DIM(                        \
        const __grid_constant__ KvLayerAddress kv, const __grid_constant__ AttentionQueries queries,        \
        const uint32_t *tables, const KvSplits *splits, const uint32_t *split_count, int stage_count,       \
        const __grid_constant__ NormRopeKvParams raw_heads, float *out, int quantizer,                      \
        const __grid_constant__ QuantizedRows quantized) {                                                  \
        attention_split_kv<CACHE>(kv, queries, tables, splits, split_count, stage_count, raw_heads,         \
                                  MergedResults<CACHE>{out, quantizer, quantized});                         \
    }                                                                                                       \
    CHECK_SIGNATURE(attention_merged_kv_##DIM, AttentionMergedKv);
