// SPDX-License-Identifier: Apache-2.0

// Keys and values of two bytes, f16 or bf16. Tensor cores multiply them as they are in the cache.
//
//   stage   | 64 keys x PITCH | 64 values x PITCH |   PITCH: DIM, to whole columns of four warps,
//                                                     and PAD, which spreads rows over the banks

#pragma once

#include <type_traits>

#include "tiles.cuh"

namespace {

template <class MmaType, int HEAD_DIM>
struct Kv16Bit {
    using Mma = MmaType;
    static constexpr int DIM = HEAD_DIM;
    static constexpr int COLS = output_cols(DIM);
    static constexpr int PITCH = 8 * COLS * WARPS + PAD;
    static constexpr int VECTORS = DIM / 8;
    static constexpr int STAGE_BYTES = 2 * TILE * PITCH * sizeof(__half);
    // The prefill kernel multiplies keys and values in the stages, so it needs no memory for f16
    // copies.
    static constexpr int DEQUANTIZED_BYTES = 0;
    // Whether raw_heads.cuh can prepare heads of this size.
    static constexpr bool TAKES_RAW_HEADS = DIM % 64 == 0;
    using Value = std::conditional_t<Mma::IS_BF16, __nv_bfloat16, __half>;

    // Address of a token's keys; the values are `head_bytes` behind them.
    using KeyAddress = const uint8_t *;

    static __device__ __forceinline__ KeyAddress key_address(const KvLayerAddress &kv, uint32_t block,
                                                             uint32_t head, uint32_t token) {
        return head_keys(kv, block, head) + size_t(token) * (DIM * sizeof(__half));
    }

    // Starts the copies of the 64 keys at `addresses`, and of their values. Keys and values that
    // are not copied become zero.
    static __device__ __forceinline__ void load(uint8_t *stage, const KeyAddress *addresses,
                                                uint32_t head_bytes, KeyRange copied) {
        constexpr int ROUNDS = TILE * VECTORS / THREADS;
        static_assert(TILE * VECTORS % THREADS == 0);
        __half *keys = reinterpret_cast<__half *>(stage), *values = keys + TILE * PITCH;
#pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
            int index = round * THREADS + tile_thread();
            int token = index / VECTORS, vector = index % VECTORS;
            const uint8_t *from = addresses[token] + vector * 16;
            copy_async_16(keys + token * PITCH + vector * 8, from, copied.contains(token));
            copy_async_16(values + token * PITCH + vector * 8, from + head_bytes, copied.contains(token));
        }
    }

    // Stores one key and its value in a stage; called by four warps.
    static __device__ __forceinline__ void put(uint8_t *stage, int key, const Value *from_key,
                                               const Value *from_value) {
        Value *keys = reinterpret_cast<Value *>(stage), *values = keys + TILE * PITCH;
        for (int i = tile_thread(); i < DIM; i += THREADS) {
            keys[key * PITCH + i] = from_key[i];
            values[key * PITCH + i] = from_value[i];
        }
    }

    // Stores four dimensions of a query.
    static __device__ __forceinline__ void store_query(__half *row, int dim, uint32_t low, uint32_t high) {
        *reinterpret_cast<uint2 *>(row + dim) = make_uint2(low, high);
    }

    // Loads the B fragments of two products: keys `first` to `first + 15`, dimensions 16 k to 16 k
    // + 15.
    static __device__ __forceinline__ void load_key_fragment(uint32_t (&b)[4], const uint8_t *stage,
                                                             int first, int k) {
        load_matrices(
            b, fragment_address_b(reinterpret_cast<const __half *>(stage) + first * PITCH + 16 * k, PITCH));
    }

    // Adds the share of keys 16 k to 16 k + 15 to this warp's dimensions, which are a quarter of
    // all.
    static __device__ __forceinline__ void accumulate_values(float (&sums)[COLS][4],
                                                             const uint32_t (&weights)[4],
                                                             const uint8_t *stage, int warp, int k) {
        const __half *values = reinterpret_cast<const __half *>(stage) + TILE * PITCH;
        const __half *corner = values + 16 * k * PITCH + warp * COLS * 8;
#pragma unroll
        for (int n = 0; n < COLS; n += 2) {
            // One ldmatrix loads two column tiles. An odd last one is loaded with its left
            // neighbour.
            constexpr int BACK = COLS % 2;
            const int at = n + 1 < COLS ? n : n - BACK;
            uint32_t value[4];
            load_matrices_transposed(value, fragment_address_a(corner + at * 8, PITCH));
            if (n + 1 < COLS) {
                Mma::multiply(sums[n], weights, value[0], value[1]);
                Mma::multiply(sums[n + 1], weights, value[2], value[3]);
            } else {
                Mma::multiply(sums[n], weights, value[2 * BACK], value[2 * BACK + 1]);
            }
        }
    }

    // Stores the sums of this thread for one row: row g if `half` is 0, row g + 8 if it is 1.
    static __device__ __forceinline__ void store_sums(float *row, const float (&sums)[COLS][4], int half,
                                                      int warp, int lane) {
        float *to = row + warp * COLS * 8 + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < COLS; n++) {
            if (DIM % 32 == 0 || (warp * COLS + n) * 8 < DIM)
                *reinterpret_cast<float2 *>(to + n * 8) =
                    make_float2(sums[n][2 * half], sums[n][2 * half + 1]);
        }
    }

    // Keys, then values, as the prefill kernel multiplies them: rows of PITCH values.
    static __device__ __forceinline__ const __half *f16_tiles(const uint8_t *stage, __half *) {
        return reinterpret_cast<const __half *>(stage);
    }
};

}  // namespace
