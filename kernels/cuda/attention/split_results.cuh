// SPDX-License-Identifier: Apache-2.0

// What a block of split_kv.cuh does with the results of its splits.
//
//   PartialResults  stores them, for the merge kernels of attention.cu
//                   sums [partial][heads][DIM] f32, weights [partial][heads] (largest score, sum)
//   MergedResults   merges them, if the block has all splits of its rows; stores the rows, and
//                   quantizes them if the next product wants quants

#pragma once

#include "../linear/quantize.cuh"
#include "tiles.cuh"

namespace {

template <class Cache>
struct PartialResults {
    static constexpr int COLS = Cache::COLS;

    float *sums;
    float2 *weights;

    // `number` counts the splits of the block.
    __device__ __forceinline__ void end_split(const KvSplits &split, int number,
                                              const AttentionQueries &queries, uint32_t kv_head,
                                              const OnlineSoftmax (&softmax)[2], const float (&weight_sum)[4],
                                              const float (&split_sums)[COLS][4]) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const uint32_t tokens = split.queries.tokens, first = split.partial + number * tokens;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int pair = lane / 4 + 8 * half;
            if (pair >= tokens * queries.group) continue;
            size_t partial = first + pair / queries.group;
            size_t index = partial * queries.heads + kv_head * queries.group + pair % queries.group;
            if (warp == 0 && lane % 4 == 0)
                weights[index] = make_float2(softmax[half].largest, weight_sum[2 * half]);
            Cache::store_sums(sums + index * Cache::DIM, split_sums, half, warp, lane);
        }
    }

    __device__ __forceinline__ void finish(const QueryTile &, const AttentionQueries &, uint32_t, float *) {}
};

// The heads of a KV head are whole column tiles. A warp quantizes one column tile of a token. The
// tiles are dealt to `blocks` blocks; this one has number `rank`.
template <class Cache, class Quantizer>
__device__ __forceinline__ void quantize_col_tiles(const QueryTile &query_tile,
                                                   const AttentionQueries &queries, uint32_t kv_head,
                                                   const float *rows, const QuantizedRows &quantized,
                                                   int rank, int blocks) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int token_cols = queries.group * Cache::DIM, col_tiles = token_cols / TILE_COLS;
    const int all_col_tiles = queries.heads * Cache::DIM / TILE_COLS;
    for (int item = warp * blocks + rank; item < query_tile.tokens * col_tiles;
         item += blockDim.x / 32 * blocks) {
        const int token = item / col_tiles, col_tile = item % col_tiles;
        const float *from = rows + token * token_cols + col_tile * TILE_COLS + lane * 8;
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = from[i];
        Quantizer::store(v, act_tile_row(quantized, act_tile_bytes(Quantizer::ACTIVATION), all_col_tiles,
                                         query_tile.row + token, kv_head * col_tiles + col_tile));
    }
}

// Quantizes the merged rows of a query tile and KV head, if the next product wants quants. Called
// by the whole block, when its threads have stored the rows in shared memory.
template <class Cache>
__device__ __forceinline__ void quantize_merged(const QueryTile &query_tile, const AttentionQueries &queries,
                                                uint32_t kv_head, const float *rows,
                                                ActivationFormat quantizer, const QuantizedRows &quantized,
                                                int rank = 0, int blocks = 1) {
    if (quantized.act_tiles == nullptr) return;
    __syncthreads();
    auto quantize = [&](auto format) {
        quantize_col_tiles<Cache, decltype(format)>(query_tile, queries, kv_head, rows, quantized, rank,
                                                    blocks);
    };
    switch (quantizer) {
        case ActivationFormat::Q8_0: return quantize(QuantizePer32<ActivationFormat::Q8_0>());
        case ActivationFormat::Q8_1: return quantize(QuantizePer32<ActivationFormat::Q8_1>());
        case ActivationFormat::Q8_K: return quantize(QuantizePer256());
        case ActivationFormat::F16: return quantize(RoundToF16());
        case ActivationFormat::BF16: return quantize(RoundToBF16());
    }
}

template <class Cache>
struct MergedResults {
    static constexpr int COLS = Cache::COLS;

    float *out;
    ActivationFormat quantizer;
    // Without act_tiles, the rows are not quantized.
    const QuantizedRows &quantized;

    SplitMerge total[2] = {};
    float total_sums[COLS][4] = {};
    float total_weights[2] = {};

    __device__ __forceinline__ MergedResults(float *out, int quantizer, const QuantizedRows &quantized)
        : out(out), quantizer(ActivationFormat(quantizer)), quantized(quantized) {}

    __device__ __forceinline__ void end_split(const KvSplits &, int, const AttentionQueries &, uint32_t,
                                              const OnlineSoftmax (&softmax)[2], const float (&weight_sum)[4],
                                              const float (&split_sums)[COLS][4]) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            total[half].update(softmax[half].largest);
            total_weights[half] = total[half].merge(total_weights[half], weight_sum[2 * half]);
        }
#pragma unroll
        for (int n = 0; n < COLS; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                total_sums[n][i] = total[i / 2].merge(total_sums[n][i], split_sums[n][i]);
        }
    }

    // `rows` is shared memory for 16 heads.
    __device__ __forceinline__ void finish(const QueryTile &query_tile, const AttentionQueries &queries,
                                           uint32_t kv_head, float *rows) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int pairs = query_tile.tokens * queries.group;
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int n = 0; n < COLS; n++) {
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++)
                    total_sums[n][i] = __fdiv_rn(total_sums[n][i], total_weights[half]);
            }
            int pair = lane / 4 + 8 * half;
            if (pair >= pairs) continue;
            size_t row = query_tile.row + pair / queries.group,
                   head = kv_head * queries.group + pair % queries.group;
            Cache::store_sums(out + (row * queries.heads + head) * Cache::DIM, total_sums, half, warp, lane);
            Cache::store_sums(rows + pair * Cache::DIM, total_sums, half, warp, lane);
        }
        quantize_merged<Cache>(query_tile, queries, kv_head, rows, quantizer, quantized);
    }
};

}  // namespace
