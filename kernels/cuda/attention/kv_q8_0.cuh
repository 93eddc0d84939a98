// SPDX-License-Identifier: Apache-2.0

// Keys and values of q8_0: signed bytes, and an f16 scale per 32 of them. An operand of a product
// is scale times byte, rounded to f16. kv_store.cuh stores no scale with which that overflows.
//
// A pipeline stage has the cache's bytes: rows of DIM bytes with a pad, then the scales. The
// split-KV kernel converts rows to fragments in registers. In the prefill kernel four warps need
// all rows, so the block converts a tile to f16 once.
//
//   stage   | bytes: 64 keys x (DIM + pad) | 64 values x (DIM + pad) | key, value scales |
//
// Within 16 dimensions, the K index of a product is permuted. So the four bytes of one word are the
// four K elements of a lane's B fragment. Queries are stored in that order, and so are the keys of
// the prefill kernel.
//
//   dimension   4 c    4 c + 1    4 c + 2    4 c + 3         word c of 16 bytes, lane 4 g + c
//   K index     2 c    2 c + 1    2 c + 8    2 c + 9

#pragma once

#include "tiles.cuh"

namespace {

// Converts two bytes of a word to f16. The bytes hold their value plus 128, so they are unsigned.
// An f16 from 1,024 on counts in ones, so its last eight bits can be such a byte: 1,024 + byte. The
// subtraction of 1,024 + 128 leaves the value.
__device__ __forceinline__ __half2 as_halves(uint32_t bytes, uint32_t selector) {
    uint32_t magic = __byte_perm(bytes, 0x64646464, selector), offset = 0x64806480;
    return __hsub2(*reinterpret_cast<__half2 *>(&magic), *reinterpret_cast<__half2 *>(&offset));
}

__device__ __forceinline__ uint32_t bits(__half2 x) { return *reinterpret_cast<uint32_t *>(&x); }

// Four signed bytes times their scale, as f16.
__device__ __forceinline__ uint2 scaled(uint32_t word, __half2 scale) {
    uint32_t bytes = word ^ 0x80808080;
    return make_uint2(bits(__hmul2(as_halves(bytes, 0x4140), scale)),
                      bits(__hmul2(as_halves(bytes, 0x4342), scale)));
}

template <int HEAD_DIM>
struct KvQ8_0 {
    using Mma = MmaF16;
    static constexpr int DIM = HEAD_DIM;
    // Pitch of rows in f16: queries, and the converted keys and values of the prefill kernel.
    static constexpr int PITCH = DIM + PAD;
    static constexpr int COLS = output_cols(DIM);
    // Column tiles whose bytes one load of a thread reads. A warp has one or two such parts.
    static constexpr int PART_COLS = COLS > 4 ? COLS / 2 : COLS;
    static constexpr int ROW = DIM + PAD_BYTES;
    static constexpr int VECTORS = DIM / 16;
    static constexpr int SCALES = q8_scales(DIM);
    static constexpr int SCALE_BYTES = SCALES * sizeof(__half);
    static constexpr int ROUNDS = (TILE * VECTORS + THREADS - 1) / THREADS;
    static constexpr int VALUES = TILE * ROW;
    static constexpr int KEY_SCALES = 2 * TILE * ROW;
    static constexpr int VALUE_SCALES = KEY_SCALES + TILE * SCALE_BYTES;
    static constexpr int STAGE_BYTES = VALUE_SCALES + TILE * SCALE_BYTES;
    static constexpr int DEQUANTIZED_BYTES = 2 * TILE * PITCH * sizeof(__half);
    static constexpr bool TAKES_RAW_HEADS = false;
    static_assert(COLS % PART_COLS == 0 && PART_COLS >= 2 && PART_COLS <= 4);
    // Rows of heads of 80 end inside of the last warp's columns. The pad has room for these.
    static_assert(8 * COLS * WARPS <= ROW);

    struct KeyAddress {
        const uint8_t *bytes, *scales;
    };

    static __device__ __forceinline__ KeyAddress key_address(const KvLayerAddress &kv, uint32_t block,
                                                             uint32_t head, uint32_t token) {
        const uint8_t *keys = head_keys(kv, block, head);
        return {keys + size_t(token) * DIM, keys + q8_scales_at(kv.block_tokens, DIM) + token * SCALE_BYTES};
    }

    static __device__ __forceinline__ void load(uint8_t *stage, const KeyAddress *addresses,
                                                uint32_t head_bytes, KeyRange copied) {
        static_assert(2 * TILE == THREADS);
#pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
            int index = round * THREADS + tile_thread();
            if (TILE * VECTORS % THREADS != 0 && index >= TILE * VECTORS) break;
            int token = index / VECTORS, vector = index % VECTORS;
            const uint8_t *from = addresses[token].bytes + vector * 16;
            uint8_t *to = stage + token * ROW + vector * 16;
            copy_async_16(to, from, copied.contains(token));
            copy_async_16(to + VALUES, from + head_bytes, copied.contains(token));
        }
        int token = tile_thread() % TILE, is_value = tile_thread() / TILE;
        const uint8_t *from = addresses[token].scales + (is_value ? head_bytes : 0);
        uint8_t *to = stage + KEY_SCALES + tile_thread() * SCALE_BYTES;
        constexpr int BYTES = SCALE_BYTES % 16 == 0 ? 16 : SCALE_BYTES % 8 == 0 ? 8 : 4;
#pragma unroll
        for (int at = 0; at < SCALE_BYTES; at += BYTES)
            copy_async<BYTES>(to + at, from + at, copied.contains(token));
    }

    static __device__ __forceinline__ void store_query(__half *row, int dim, uint32_t low, uint32_t high) {
        __half *to = row + dim / 16 * 16 + dim % 16 / 2;
        *reinterpret_cast<uint32_t *>(to) = low;
        *reinterpret_cast<uint32_t *>(to + 8) = high;
    }

    static __device__ __forceinline__ __half scale(const uint8_t *scales, int token, int dim) {
        return reinterpret_cast<const __half *>(scales)[token * SCALES + dim / 32];
    }

    static __device__ __forceinline__ void load_key_fragment(uint32_t (&b)[4], const uint8_t *stage,
                                                             int first, int k) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < 2; n++) {
            int key = first + 8 * n + lane / 4;
            uint32_t word = *reinterpret_cast<const uint32_t *>(stage + key * ROW + 16 * k + lane % 4 * 4);
            uint2 both = scaled(word, __half2half2(scale(stage + KEY_SCALES, key, 16 * k)));
            b[2 * n] = both.x, b[2 * n + 1] = both.y;
        }
    }

    // The dimension that is column `index` of column tile `n` of a part. If a part has 2 or 4
    // column tiles, the dimensions that a thread needs are neighbours, which one load reads. If it
    // has 3, the dimensions of a column tile are neighbours.
    static __device__ __forceinline__ int output_column(int n, int part, int index) {
        return part * PART_COLS * 8 + (PART_COLS % 2 ? 8 * n + index : PART_COLS * index + n);
    }

    // Loads one byte of a value for each column tile of a part.
    static __device__ __forceinline__ uint32_t load_value_bytes(const uint8_t *row, int part, int index) {
        const uint8_t *from = row + output_column(0, part, index);
        if constexpr (PART_COLS == 4) return *reinterpret_cast<const uint32_t *>(from);
        if constexpr (PART_COLS == 2) return *reinterpret_cast<const uint16_t *>(from);
        return from[0] | from[8] << 8 | from[16] << 16;
    }

    static __device__ __forceinline__ void accumulate_values(float (&sums)[COLS][4],
                                                             const uint32_t (&weights)[4],
                                                             const uint8_t *stage, int warp, int k) {
#pragma unroll
        for (int part = 0; part < COLS / PART_COLS; part++)
            accumulate_part(&sums[part * PART_COLS], weights, stage, warp * (COLS / PART_COLS) + part, k);
    }

    static __device__ __forceinline__ void accumulate_part(float (*sums)[4], const uint32_t (&weights)[4],
                                                           const uint8_t *stage, int part, int k) {
        const int lane = threadIdx.x % 32;
        uint32_t b[PART_COLS][2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            // The two keys of one register of a B fragment.
            const int key = 16 * k + lane % 4 * 2 + 8 * half;
            const uint8_t *row = stage + VALUES + key * ROW;
            uint32_t first = load_value_bytes(row, part, lane / 4),
                     second = load_value_bytes(row + ROW, part, lane / 4);
            uint32_t pairs[2] = {__byte_perm(first, second, 0x5140) ^ 0x80808080,
                                 __byte_perm(first, second, 0x7362) ^ 0x80808080};
#pragma unroll
            for (int n = 0; n < PART_COLS; n++) {
                // If a part has 2 or 4 column tiles, they lie in one block of 32 dimensions, which
                // has one scale.
                const int dim = part * PART_COLS * 8 + (PART_COLS % 2 ? 8 * n : 0);
                __half2 scales = __halves2half2(scale(stage + VALUE_SCALES, key, dim),
                                                scale(stage + VALUE_SCALES, key + 1, dim));
                b[n][half] = bits(__hmul2(as_halves(pairs[n / 2], n % 2 ? 0x4342 : 0x4140), scales));
            }
        }
#pragma unroll
        for (int n = 0; n < PART_COLS; n++) Mma::multiply(sums[n], weights, b[n][0], b[n][1]);
    }

    static __device__ __forceinline__ void store_sums(float *row, const float (&sums)[COLS][4], int half,
                                                      int warp, int lane) {
#pragma unroll
        for (int part = 0; part < COLS / PART_COLS; part++)
            store_part(row, &sums[part * PART_COLS], half, warp * (COLS / PART_COLS) + part, lane);
    }

    static __device__ __forceinline__ void store_part(float *row, const float (*sums)[4], int half, int part,
                                                      int lane) {
        // A thread has columns 2 c and 2 c + 1 of each column tile.
        const int index = lane % 4 * 2;
        if constexpr (PART_COLS % 2) {
#pragma unroll
            for (int n = 0; n < PART_COLS; n++) {
                if (DIM % 32 == 0 || (part * PART_COLS + n) * 8 < DIM)
                    *reinterpret_cast<float2 *>(row + output_column(n, part, index)) =
                        make_float2(sums[n][2 * half], sums[n][2 * half + 1]);
            }
        } else {
            float2 *to = reinterpret_cast<float2 *>(row + output_column(0, part, index));
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int n = 0; n < PART_COLS; n += 2)
                    to[(i * PART_COLS + n) / 2] =
                        make_float2(sums[n][2 * half + i], sums[n + 1][2 * half + i]);
            }
        }
    }

    // Converts a stage to f16 for the prefill kernel: keys, then values, in rows of PITCH values.
    static __device__ __forceinline__ const __half *f16_tiles(const uint8_t *stage, __half *dequantized) {
#pragma unroll
        for (int round = 0; round < 2 * ROUNDS; round++) {
            const bool is_value = round >= ROUNDS;
            int index = round % ROUNDS * THREADS + threadIdx.x;
            if (TILE * VECTORS % THREADS != 0 && index >= TILE * VECTORS) continue;
            int token = index / VECTORS, vector = index % VECTORS;
            uint4 bytes =
                *reinterpret_cast<const uint4 *>(stage + (is_value ? VALUES : 0) + token * ROW + vector * 16);
            __half2 d =
                __half2half2(scale(stage + (is_value ? VALUE_SCALES : KEY_SCALES), token, 16 * vector));
            uint2 a = scaled(bytes.x, d), b = scaled(bytes.y, d), c = scaled(bytes.z, d),
                  e = scaled(bytes.w, d);
            uint4 low = is_value ? make_uint4(a.x, a.y, b.x, b.y) : make_uint4(a.x, b.x, c.x, e.x);
            uint4 high = is_value ? make_uint4(c.x, c.y, e.x, e.y) : make_uint4(a.y, b.y, c.y, e.y);
            uint4 *to = reinterpret_cast<uint4 *>(dequantized + (is_value ? TILE * PITCH : 0) +
                                                  token * PITCH + vector * 16);
            // A thread stores two vectors of 16 bytes. Threads of `vector` 4 to 7 store the second
            // one first, so that the stores of eight threads fall into different banks.
            const bool swapped = vector & 4;
            to[swapped] = swapped ? high : low;
            to[!swapped] = swapped ? low : high;
        }
        __syncthreads();
        return dequantized;
    }
};

}  // namespace
