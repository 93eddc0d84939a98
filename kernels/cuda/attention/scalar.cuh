// SPDX-License-Identifier: Apache-2.0

// Attention in f32, without tensor cores, for types and shapes that have no tensor-core kernel. A
// block computes one row and head.
//
//   grid: (rows, heads)      queries, out: f32 [rows][heads][dim]
//   per tile of 64 keys: scores, two threads a key -> weights -> sums, a thread per dim -> merge
//
// Limit: latency of loads, since keys and values are not staged in shared memory.

#pragma once

#include "../kv_store.cuh"
#include "tiles.cuh"

namespace {

template <class KvReader>
__device__ void attention_scalar(KvLayerAddress kv, AttentionQueries queries, int dim, const uint32_t *tables,
                                 const uint32_t *table_starts, const uint32_t *positions, float *out) {
    // The query, then the sums.
    extern __shared__ __align__(16) float values[];
    __shared__ float weights[TILE];
    wait_for_previous_kernel();
    launch_next_kernel();
    const uint32_t row = blockIdx.x, head = blockIdx.y, kv_head = head / queries.group;
    const uint32_t position = positions[row];
    const uint32_t *table = tables + table_starts[row];
    const float *query = queries.values + (size_t(row) * queries.heads + head) * dim;
    float *sums = values + dim;
    for (int i = threadIdx.x; i < dim; i += THREADS) {
        values[i] = query[i] * queries.scale;
        sums[i] = 0.0f;
    }
    __syncthreads();
    SplitMerge total;
    float total_weight = 0.0f;
    const uint32_t lowest = first_key(position, queries.window);
    for (uint32_t first = lowest / TILE * TILE; first <= position; first += TILE) {
        int keys = min(position - first + 1, uint32_t(TILE)), hidden = lowest > first ? lowest - first : 0;
        // Two threads share a key.
        uint32_t key = threadIdx.x / 2;
        float score = 0.0f;
        const bool is_seen = int(key) >= hidden && int(key) < keys;
        if (is_seen) {
            uint32_t at = first + key, block = table[at / kv.block_tokens];
            const KvReader from(kv, head_keys(kv, block, kv_head), at % kv.block_tokens, dim);
            for (int i = threadIdx.x % 2; i < dim; i += 2) score = fmaf(values[i], from[i], score);
        }
        score += __shfl_xor_sync(~0u, score, 1);
        if (threadIdx.x % 2 == 0) weights[key] = is_seen ? score : NO_SCORE;
        __syncthreads();
        float largest = weights[0];
        for (int i = 1; i < TILE; i++) largest = fmaxf(largest, weights[i]);
        __syncthreads();
        if (threadIdx.x < TILE)
            weights[threadIdx.x] =
                weights[threadIdx.x] == NO_SCORE ? 0.0f : exp2_fast(weights[threadIdx.x] - largest);
        __syncthreads();
        float tile_weight = 0.0f;
        for (int i = 0; i < TILE; i++) tile_weight += weights[i];
        total.update(largest);
        total_weight = total.merge(total_weight, tile_weight);
        for (int i = threadIdx.x; i < dim; i += THREADS) {
            float sum = 0.0f;
            for (int k = hidden; k < keys; k++) {
                uint32_t at = first + k, block = table[at / kv.block_tokens];
                const KvReader from(kv, head_keys(kv, block, kv_head) + kv.head_bytes, at % kv.block_tokens,
                                    dim);
                sum = fmaf(weights[k], from[i], sum);
            }
            sums[i] = total.merge(sums[i], sum);
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < dim; i += THREADS)
        out[(size_t(row) * queries.heads + head) * dim + i] = __fdiv_rn(sums[i], total_weight);
}

}  // namespace

#define SCALAR_KERNEL(SUFFIX, KV_READER)                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS) attention_scalar_##SUFFIX(         \
        KvLayerAddress kv, AttentionQueries queries, int dim, const uint32_t *tables,        \
        const uint32_t *table_starts, const uint32_t *positions, float *out) {               \
        attention_scalar<KV_READER>(kv, queries, dim, tables, table_starts, positions, out); \
    }                                                                                        \
    CHECK_SIGNATURE(attention_scalar_##SUFFIX, AttentionScalar);
