// SPDX-License-Identifier: Apache-2.0

// Attention for decode rows and short runs of tokens, drawn in attention.cu. A block computes
// splits of up to 16 (row, head) pairs of one sequence and KV head, one split after the other. Its
// warps divide the 16 x 64 scores by keys, and the output by dimensions, so that no sum is divided
// between warps.
//
//   grid: (KV heads, entries of the plan), so that the heads of a row, which are neighbours in the
//   cache, run at the same time
//
// split_results.cuh says what becomes of the results of a split.

#pragma once

#include "kv_pipeline.cuh"
#include "split_results.cuh"

namespace {

template <class Cache, class Results>
__device__ void attention_split_kv(const KvLayerAddress &kv, const AttentionQueries &queries,
                                   const uint32_t *tables, const KvSplits *splits,
                                   const uint32_t *split_count, int stage_count, Results results) {
    using Mma = typename Cache::Mma;
    constexpr int DIM = Cache::DIM, PITCH = Cache::PITCH;
    constexpr int WEIGHT_PITCH = TILE + PAD;
    // Column tiles of the output per warp.
    constexpr int COLS = DIM / 8 / WARPS;
    extern __shared__ __align__(16) uint8_t shared[];
    __half *const query_rows = reinterpret_cast<__half *>(shared + stage_count * Cache::STAGE_BYTES);
    __half *const weight_tile = query_rows + 16 * PITCH;
    __shared__ float largest_by_warp[WARPS][16];
    __shared__ typename KvPipeline<Cache>::AddressBuffer addresses;

    // The host sent plans and tables before the step's first kernel, so this kernel may read them
    // before the previous one has ended.
    const uint32_t count = *split_count;
    const KvSplits split = splits[blockIdx.y];
    if (blockIdx.y >= count) return;
    const QueryTile &query_tile = split.queries;
    const uint32_t kv_head = blockIdx.x;
    const int pairs = query_tile.tokens * queries.group;
    const uint32_t first = split.first * (TILE << query_tile.split_shift),
                   last = query_tile.position + query_tile.tokens - 1;
    // The last split ends at the last token.
    const int tiles = min(split.splits << query_tile.split_shift, (last - first) / TILE + 1);
    const int split_tiles = 1 << query_tile.split_shift;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    KvPipeline<Cache> pipeline{
        {kv, tables + query_tile.table, kv_head, first, last}, addresses, shared, stage_count, tiles};
    pipeline.prefetch();
    __syncthreads();

    // Earlier steps have written this tile, so its copies need not wait for the step's own keys.
    if (split.is_first_tile_old) pipeline.load_tile(0);
    wait_for_previous_kernel();
    launch_next_kernel();
    if (!split.is_first_tile_old) pipeline.load_tile(0);
    load_queries<Cache>(query_rows, queries, query_tile, kv_head, pairs, 16);
    __syncthreads();
    uint32_t query[DIM / 16][4];
#pragma unroll
    for (int k = 0; k < DIM / 16; k++)
        load_matrices(query[k], fragment_address_a(query_rows + 16 * k, PITCH));

    // A thread has rows lane / 4 and lane / 4 + 8 of the tile.
    uint32_t position[2];
    OnlineSoftmax softmax[2];
#pragma unroll
    for (int half = 0; half < 2; half++)
        position[half] =
            query_tile.position + min((lane / 4 + 8 * half) / queries.group, int(query_tile.tokens) - 1);
    float sums[COLS][4] = {};
    float weight_sum[4] = {};

    for (int tile = 0; tile < tiles; tile++) {
        const uint8_t *stage = pipeline.wait(tile);

        // Scores of this warp's 16 keys.
        float scores[2][4] = {};
#pragma unroll
        for (int k = 0; k < DIM / 16; k++) {
            uint32_t key[4];
            Cache::load_key_fragment(key, stage, warp * 16, k);
            Mma::multiply(scores[0], query[k], key[0], key[1]);
            Mma::multiply(scores[1], query[k], key[2], key[3]);
        }
        float largest[2] = {NO_SCORE, NO_SCORE};
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t key = first + tile * TILE + warp * 16 + n * 8 + lane % 4 * 2 + i % 2;
                if (key > position[i / 2]) scores[n][i] = NO_SCORE;
                largest[i / 2] = fmaxf(largest[i / 2], scores[n][i]);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 1));
            largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 2));
            if (lane % 4 == 0) largest_by_warp[warp][lane / 4 + 8 * half] = largest[half];
        }
        __syncthreads();
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = lane / 4 + 8 * half;
            float of_tile = largest_by_warp[0][row];
#pragma unroll
            for (int w = 1; w < WARPS; w++) of_tile = fmaxf(of_tile, largest_by_warp[w][row]);
            factor[half] = softmax[half].update_max(of_tile);
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint32_t both = Mma::pack(softmax[half].weight(scores[n][2 * half]),
                                          softmax[half].weight(scores[n][2 * half + 1]));
                __half *to =
                    weight_tile + (lane / 4 + 8 * half) * WEIGHT_PITCH + warp * 16 + n * 8 + lane % 4 * 2;
                *reinterpret_cast<uint32_t *>(to) = both;
            }
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            weight_sum[i] *= factor[i / 2];
#pragma unroll
            for (int n = 0; n < COLS; n++) sums[n][i] *= factor[i / 2];
        }
#pragma unroll
        for (int k = 0; k < TILE / 16; k++) {
            uint32_t weights[4];
            load_matrices(weights, fragment_address_a(weight_tile + 16 * k, WEIGHT_PITCH));
            Mma::multiply(weight_sum, weights, Mma::ONES, Mma::ONES);
            Cache::accumulate_values(sums, weights, stage, warp, k);
        }
        // The next round overwrites this stage, the weights and the warps' maxima.
        __syncthreads();
        pipeline.release(tile);

        if ((tile + 1) % split_tiles != 0 && tile + 1 != tiles) continue;
        results.end_split(split, tile / split_tiles, queries, kv_head, softmax, weight_sum, sums);
#pragma unroll
        for (int half = 0; half < 2; half++) softmax[half] = OnlineSoftmax();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            weight_sum[i] = 0.0f;
#pragma unroll
            for (int n = 0; n < COLS; n++) sums[n][i] = 0.0f;
        }
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

#define SPLIT_KV_KERNEL(DIM, CACHE)                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, SPLIT_KV_BLOCKS(DIM)) attention_split_kv_##DIM( \
        const __grid_constant__ KvLayerAddress kv, const __grid_constant__ AttentionQueries queries,      \
        const uint32_t *tables, const KvSplits *splits, const uint32_t *split_count, int stage_count,     \
        float *partial_sums, float2 *partial_weights) {                                                   \
        attention_split_kv<CACHE>(kv, queries, tables, splits, split_count, stage_count,                  \
                                  PartialResults<CACHE>{partial_sums, partial_weights});                  \
    }                                                                                                     \
    CHECK_SIGNATURE(attention_split_kv_##DIM, AttentionSplitKv);                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) attention_merged_kv_##DIM(                      \
        const __grid_constant__ KvLayerAddress kv, const __grid_constant__ AttentionQueries queries,      \
        const uint32_t *tables, const KvSplits *splits, const uint32_t *split_count, int stage_count,     \
        float *out, int quantizer, const __grid_constant__ QuantizedRows quantized) {                     \
        attention_split_kv<CACHE>(kv, queries, tables, splits, split_count, stage_count,                  \
                                  MergedResults<CACHE>{out, quantizer, quantized});                       \
    }                                                                                                     \
    CHECK_SIGNATURE(attention_merged_kv_##DIM, AttentionMergedKv);
