// SPDX-License-Identifier: Apache-2.0

// What four warps compute of a tile of keys and values: drawn in attention.cu.

#pragma once

#include "tiles.cuh"

namespace {

// Pitch of the 16 rows of weights, in 16-bit values.
constexpr int WEIGHT_PITCH = TILE + PAD;

struct BlockBarrier {
    __device__ __forceinline__ void operator()() const { __syncthreads(); }
};

// The state of 16 (row, head) pairs within a split, over its tiles. Four warps have a state
// together. Without WINDOWS, a row sees all keys before it.
template <class Cache, bool WINDOWS = true>
struct SplitTiles {
    using Mma = typename Cache::Mma;
    static constexpr int DIM = Cache::DIM;
    static constexpr int COLS = Cache::COLS;

    uint32_t query[DIM / 16][4];
    // A thread has rows lane / 4 and lane / 4 + 8 of the tile.
    uint32_t position[2];
    uint32_t window;
    // In shared memory of the four warps.
    __half *weight_tile;
    float (&largest_by_warp)[WARPS][16];

    OnlineSoftmax softmax[2];
    float sums[COLS][4] = {};
    float weight_sum[4] = {};

    __device__ __forceinline__ SplitTiles(const QueryTile &query_tile, const AttentionQueries &queries,
                                          const __half *query_rows, __half *weight_tile,
                                          float (&largest_by_warp)[WARPS][16])
        : window(queries.window), weight_tile(weight_tile), largest_by_warp(largest_by_warp) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int k = 0; k < DIM / 16; k++)
            load_matrices(query[k], fragment_address_a(query_rows + 16 * k, Cache::PITCH));
#pragma unroll
        for (int half = 0; half < 2; half++)
            position[half] =
                query_tile.position + min((lane / 4 + 8 * half) / queries.group, int(query_tile.tokens) - 1);
    }

    __device__ __forceinline__ void reset() {
#pragma unroll
        for (int half = 0; half < 2; half++) softmax[half] = OnlineSoftmax();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            weight_sum[i] = 0.0f;
#pragma unroll
            for (int n = 0; n < COLS; n++) sums[n][i] = 0.0f;
        }
    }

    // Adds the tile in `stage`, whose keys begin at position `first`. `warp` counts the four warps,
    // and `barrier` is theirs: it must follow before the next call, and before the stage is
    // overwritten.
    template <class Barrier>
    __device__ __forceinline__ void add_tile(const uint8_t *stage, uint32_t first, int warp,
                                             const Barrier &barrier) {
        const int lane = threadIdx.x % 32;
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
                uint32_t key = first + warp * 16 + n * 8 + lane % 4 * 2 + i % 2;
                const uint32_t row = position[i / 2];
                if (WINDOWS ? is_hidden(row, key, window) : key > row) scores[n][i] = NO_SCORE;
                largest[i / 2] = fmaxf(largest[i / 2], scores[n][i]);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 1));
            largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 2));
            if (lane % 4 == 0) largest_by_warp[warp][lane / 4 + 8 * half] = largest[half];
        }
        barrier();
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
        barrier();
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
    }
};

}  // namespace
