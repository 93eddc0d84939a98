// Long chunks: a block is 64 (row, head) pairs of one kv head and visits all their keys; a warp has 16 pairs. Merges in
// registers.

#pragma once

#include "ring.cuh"

namespace {

// One column tile of eight values is 4 registers of a thread; two sets of DIM / 8 of them are most of what it has.
template <class Cache>
__device__ void chunk_rows(const KvLayer &kv, const Queries &queries, const uint32_t *tables, const Item *items, const uint32_t *item_count, float *out) {
    using Product = typename Cache::Product;
    constexpr int DIM = Cache::DIM, PITCH = Cache::PITCH;
    constexpr int COLS = DIM / 8;
    constexpr int STAGES = Ring<Cache>::STAGES;
    extern __shared__ __align__(16) uint8_t shared[];
    __half *const made = reinterpret_cast<__half *>(shared + STAGES * Cache::STAGE_BYTES);
    __half *const query_tile = reinterpret_cast<__half *>(shared + STAGES * Cache::STAGE_BYTES + Cache::MADE_BYTES);
    __shared__ typename Ring<Cache>::Look places;

    const uint32_t count = *item_count;
    if (blockIdx.x >= count) return;
    // Late chunks have the most keys: they go first.
    const Item item = items[count - 1 - blockIdx.x];
    const uint32_t kv_head = blockIdx.y;
    const int pairs = item.tokens * queries.group;
    const uint32_t last = item.position + item.tokens - 1;
    const int tiles = last / TILE + 1;
    const int split_tiles = 1 << item.split_shift;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Ring<Cache> ring{{kv, tables + item.table, kv_head, 0, last}, places, shared, tiles};
    ring.look_up();
    __syncthreads();

    wait_for_predecessor();
    let_successor_start();
    ring.load(0);
    load_queries<Cache>(query_tile, queries, item, kv_head, pairs, 16 * WARPS);

    uint32_t position[2];
    Softmax softmax[2];
    Total total[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int pair = warp * 16 + lane / 4 + 8 * half;
        position[half] = item.position + min(pair / queries.group, int(item.tokens) - 1);
    }
    float sums[COLS][4] = {}, total_sums[COLS][4] = {};
    float weight_sum[4] = {}, total_weights[2] = {};

    for (int tile = 0; tile < tiles; tile++) {
        const uint8_t *stage = ring.take(tile);
        const __half *keys = Cache::halves(stage, made), *values = keys + TILE * PITCH;

        float scores[TILE / 8][4] = {};
#pragma unroll
        for (int k = 0; k < DIM / 16; k++) {
            uint32_t query[4];
            load_matrices(query, down_then_right(query_tile + warp * 16 * PITCH + 16 * k, PITCH));
#pragma unroll
            for (int n = 0; n < TILE / 8; n += 2) {
                uint32_t key[4];
                load_matrices(key, right_then_down(keys + n * 8 * PITCH + 16 * k, PITCH));
                Product::multiply(scores[n], query, key[0], key[1]);
                Product::multiply(scores[n + 1], query, key[2], key[3]);
            }
        }
        float largest[2] = {NONE, NONE};
#pragma unroll
        for (int n = 0; n < TILE / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t key = tile * TILE + n * 8 + lane % 4 * 2 + i % 2;
                if (key > position[i / 2]) scores[n][i] = NONE;
                largest[i / 2] = fmaxf(largest[i / 2], scores[n][i]);
            }
        }
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 1));
            largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 2));
            factor[half] = softmax[half].raise(largest[half]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            weight_sum[i] *= factor[i / 2];
#pragma unroll
            for (int n = 0; n < COLS; n++) sums[n][i] *= factor[i / 2];
        }
#pragma unroll
        for (int k = 0; k < TILE / 16; k++) {
            // What a product leaves in a thread is what the next one takes from it.
            uint32_t weights[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float(&s)[4] = scores[2 * k + i / 2];
                weights[i] = Product::pack(softmax[i % 2].weight(s[i % 2 * 2]), softmax[i % 2].weight(s[i % 2 * 2 + 1]));
            }
            Product::multiply(weight_sum, weights, Product::ONES, Product::ONES);
#pragma unroll
            for (int n = 0; n < COLS; n += 2) {
                uint32_t value[4];
                load_matrices_transposed(value, down_then_right(values + 16 * k * PITCH + n * 8, PITCH));
                Product::multiply(sums[n], weights, value[0], value[1]);
                Product::multiply(sums[n + 1], weights, value[2], value[3]);
            }
        }
        if ((tile + 1) % split_tiles == 0 || tile + 1 == tiles) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                total[half].take(softmax[half].largest);
                total_weights[half] = total[half].merge(total_weights[half], weight_sum[2 * half]);
                softmax[half] = Softmax();
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
        size_t row = item.row + pair / queries.group, head = kv_head * queries.group + pair % queries.group;
        float *to = out + (row * queries.heads + head) * DIM + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < COLS; n++) {
            float a = __fdiv_rn(total_sums[n][2 * half], total_weights[half]);
            float b = __fdiv_rn(total_sums[n][2 * half + 1], total_weights[half]);
            *reinterpret_cast<float2 *>(to + n * 8) = make_float2(a, b);
        }
    }
}

}  // namespace

#define CHUNK(DIM, CACHE)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                                 \
        attention_chunk_##DIM(const __grid_constant__ KvLayer kv, const __grid_constant__ Queries queries,                   \
                              const uint32_t *tables, const Item *items, const uint32_t *item_count, float *out) {           \
        chunk_rows<CACHE>(kv, queries, tables, items, item_count, out);                                                      \
    }
