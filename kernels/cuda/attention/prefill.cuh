// SPDX-License-Identifier: Apache-2.0

// Attention for long runs of tokens, drawn in attention.cu. A block computes 64 (row, head) pairs
// of one KV head over all their keys; each warp computes 16 pairs and merges their splits in
// registers.
//
//   grid: (query tiles, KV heads, parts)      queries, out: f32 [rows][heads][DIM]
//   per tile of 64 keys: S = Q K^T -> online softmax -> O += P V; at the end of a split: merge

#pragma once

#include "kv_pipeline.cuh"

namespace {

// A column tile of eight dimensions takes 4 registers of a thread. Two sets of column tiles (the
// split's sums and the merged sums) take most of a thread's registers. So for heads of more than
// 128, a block computes one of two parts of the dimensions; both compute all scores.
template <int DIM>
constexpr int PREFILL_PARTS = DIM > PREFILL_PART_DIM_MAX ? 2 : 1;

template <class Cache>
__device__ void attention_prefill(const KvLayerAddress &kv, const AttentionQueries &queries,
                                  const uint32_t *tables, const QueryTile *query_tiles,
                                  const uint32_t *query_tile_count, float *out) {
    using Mma = typename Cache::Mma;
    constexpr int DIM = Cache::DIM, PITCH = Cache::PITCH;
    constexpr int COLS = DIM / 8 / PREFILL_PARTS<DIM>;
    static_assert(COLS % 2 == 0 && 8 * COLS <= PREFILL_PART_DIM_MAX);
    constexpr int STAGES = KvPipeline<Cache>::STAGES;
    extern __shared__ __align__(16) uint8_t shared[];
    __half *const dequantized = reinterpret_cast<__half *>(shared + STAGES * Cache::STAGE_BYTES);
    __half *const query_rows =
        reinterpret_cast<__half *>(shared + STAGES * Cache::STAGE_BYTES + Cache::DEQUANTIZED_BYTES);
    __shared__ typename KvPipeline<Cache>::AddressBuffer addresses;

    const uint32_t count = *query_tile_count;
    if (blockIdx.x >= count) return;
    // Later query tiles of a sequence have more keys, so the first blocks take the last tiles.
    const QueryTile query_tile = query_tiles[count - 1 - blockIdx.x];
    const uint32_t kv_head = blockIdx.y;
    const int first_col = blockIdx.z * COLS * 8;
    const int pairs = query_tile.tokens * queries.group;
    const uint32_t last = query_tile.position + query_tile.tokens - 1;
    const uint32_t lowest = first_key(query_tile.position, queries.window);
    const int first_tile = lowest / TILE, tiles = last / TILE + 1 - first_tile;
    const int split_tiles = 1 << query_tile.split_shift;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    KvPipeline<Cache> pipeline{
        {kv, tables + query_tile.table, kv_head, uint32_t(first_tile) * TILE, lowest, last},
        addresses,
        shared,
        ATTENTION_STAGES,
        tiles};
    pipeline.prefetch();
    __syncthreads();

    wait_for_previous_kernel();
    launch_next_kernel();
    pipeline.load_tile(0);
    load_queries<Cache>(query_rows, queries, query_tile, kv_head, pairs, 16 * WARPS);

    uint32_t position[2];
    OnlineSoftmax softmax[2];
    SplitMerge total[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int pair = warp * 16 + lane / 4 + 8 * half;
        position[half] = query_tile.position + min(pair / queries.group, int(query_tile.tokens) - 1);
    }
    float sums[COLS][4] = {}, total_sums[COLS][4] = {};
    float weight_sum[4] = {}, total_weights[2] = {};

    for (int tile = 0; tile < tiles; tile++) {
        const uint8_t *stage = pipeline.wait(tile);
        const __half *keys = Cache::f16_tiles(stage, dequantized), *values = keys + TILE * PITCH + first_col;

        float scores[TILE / 8][4] = {};
#pragma unroll
        for (int k = 0; k < DIM / 16; k++) {
            uint32_t query[4];
            load_matrices(query, fragment_address_a(query_rows + warp * 16 * PITCH + 16 * k, PITCH));
#pragma unroll
            for (int n = 0; n < TILE / 8; n += 2) {
                uint32_t key[4];
                load_matrices(key, fragment_address_b(keys + n * 8 * PITCH + 16 * k, PITCH));
                Mma::multiply(scores[n], query, key[0], key[1]);
                Mma::multiply(scores[n + 1], query, key[2], key[3]);
            }
        }
        float largest[2] = {NO_SCORE, NO_SCORE};
#pragma unroll
        for (int n = 0; n < TILE / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t key = (first_tile + tile) * TILE + n * 8 + lane % 4 * 2 + i % 2;
                if (is_hidden(position[i / 2], key, queries.window)) scores[n][i] = NO_SCORE;
                largest[i / 2] = fmaxf(largest[i / 2], scores[n][i]);
            }
        }
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 1));
            largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 2));
            factor[half] = softmax[half].update_max(largest[half]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            weight_sum[i] *= factor[i / 2];
#pragma unroll
            for (int n = 0; n < COLS; n++) sums[n][i] *= factor[i / 2];
        }
#pragma unroll
        for (int k = 0; k < TILE / 16; k++) {
            // The C fragments that hold a thread's scores are the A fragment that it needs for its
            // weights: no exchange between lanes is necessary.
            uint32_t weights[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float(&s)[4] = scores[2 * k + i / 2];
                weights[i] =
                    Mma::pack(softmax[i % 2].weight(s[i % 2 * 2]), softmax[i % 2].weight(s[i % 2 * 2 + 1]));
            }
            Mma::multiply(weight_sum, weights, Mma::ONES, Mma::ONES);
#pragma unroll
            for (int n = 0; n < COLS; n += 2) {
                uint32_t value[4];
                load_matrices_transposed(value, fragment_address_a(values + 16 * k * PITCH + n * 8, PITCH));
                Mma::multiply(sums[n], weights, value[0], value[1]);
                Mma::multiply(sums[n + 1], weights, value[2], value[3]);
            }
        }
        if ((first_tile + tile + 1) % split_tiles == 0 || tile + 1 == tiles) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                total[half].update(softmax[half].largest);
                total_weights[half] = total[half].merge(total_weights[half], weight_sum[2 * half]);
                softmax[half] = OnlineSoftmax();
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                weight_sum[i] = 0.0f;
#pragma unroll
                for (int n = 0; n < COLS; n++) {
                    total_sums[n][i] = total[i / 2].merge(total_sums[n][i], sums[n][i]);
                    sums[n][i] = 0.0f;
                }
            }
        }
        // The next round overwrites this stage.
        __syncthreads();
    }

#pragma unroll
    for (int half = 0; half < 2; half++) {
        int pair = warp * 16 + lane / 4 + 8 * half;
        if (pair >= pairs) continue;
        size_t row = query_tile.row + pair / queries.group,
               head = kv_head * queries.group + pair % queries.group;
        float *to = out + (row * queries.heads + head) * DIM + first_col + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < COLS; n++) {
            float a = __fdiv_rn(total_sums[n][2 * half], total_weights[half]);
            float b = __fdiv_rn(total_sums[n][2 * half + 1], total_weights[half]);
            *reinterpret_cast<float2 *>(to + n * 8) = make_float2(a, b);
        }
    }
}

}  // namespace

#define PREFILL_KERNEL(DIM, CACHE)                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_prefill_##DIM(                \
        const __grid_constant__ KvLayerAddress kv, const __grid_constant__ AttentionQueries queries, \
        const uint32_t *tables, const QueryTile *query_tiles, const uint32_t *query_tile_count,      \
        float *out) {                                                                                \
        attention_prefill<CACHE>(kv, queries, tables, query_tiles, query_tile_count, out);           \
    }                                                                                                \
    CHECK_SIGNATURE(attention_prefill_##DIM, AttentionPrefill);
