// SPDX-License-Identifier: Apache-2.0

// Q8_0, Q4_0, Q4_1, Q5_0 and Q5_1: blocks of 32 values, activations with a scale per 32.
//
//   value of 256 columns: sum = 0; for each of 8 blocks, ascending:
//     sum = fmaf(dot, d * da, sum)          dot: exact integer product, d and da: scales
//     sum = fmaf(m, s, sum)                 types _1: minimum, scaled sum of activations
//
// The quants of types _0 are centred. The kernels multiply them by a power of two, so that one xor
// centres them; the scale takes the factor back, exactly.

#pragma once

#include "mma.cuh"
#include "tile.cuh"

// BITS: bits of a quant. MINIMUM: quants are unsigned and have a minimum; otherwise they are
// centred.
template <int BITS, bool MINIMUM>
struct LegacyQuant {
    static constexpr ActivationFormat ACTIVATION = MINIMUM ? ActivationFormat::Q8_1 : ActivationFormat::Q8_0;
    static constexpr int BLOCKS = 8;
    static constexpr int QUANT_BYTES = BITS == 8 ? 256 : 128;
    static constexpr int HIGH_BIT_BYTES = BITS == 5 ? 32 : 0;
    static constexpr int SCALE_BYTES = MINIMUM ? 32 : 16;
    static constexpr int HIGH_BITS = TILE_ROWS * QUANT_BYTES;
    static constexpr int SCALES = HIGH_BITS + TILE_ROWS * HIGH_BIT_BYTES;
    static constexpr int TILE_BYTES = SCALES + TILE_ROWS * SCALE_BYTES;
    static constexpr bool SIGNED = !MINIMUM;
    static constexpr float UNIT = MINIMUM || BITS == 8 ? 1.0f : BITS == 4 ? 1.0f / 16 : 1.0f / 8;

    // Four quants, one byte each: the low or the HIGH nibbles of the bytes of `w`, and bits `at` to
    // `at` + 3 of `high_bits`.
    template <bool HIGH>
    static __device__ uint32_t expand(uint32_t w, uint32_t high_bits, int at) {
        if constexpr (BITS == 8) return w;
        if constexpr (BITS == 4) {
            if constexpr (MINIMUM) return (HIGH ? w >> 4 : w) & 0x0F0F0F0F;
            return ((HIGH ? w : w << 4) & 0xF0F0F0F0) ^ 0x80808080;
        }
        // Moves bit i to bit 8 i. The multiplication adds copies shifted by 0, 7, 14 and 21 bits,
        // which do not overlap.
        uint32_t spread = ((high_bits >> at & 15) * 0x00204081) & 0x01010101;
        if constexpr (MINIMUM) return ((HIGH ? w >> 4 : w) & 0x0F0F0F0F) | spread << 4;
        return (((HIGH ? w >> 1 : w << 3) & 0x78787878) | spread << 7) ^ 0x80808080;
    }

    static __device__ int dot4(uint32_t w, uint32_t a, int sum) {
        if constexpr (SIGNED) return dot4_s8(w, a, sum);
        return dot4_u8(w, a, sum);
    }

    // Scales (and minimums) of blocks 4 half to 4 half + 3 of a row, as f32.
    static __device__ void scales(const uint8_t *tile, int row, int half, float (&d)[4], float (&m)[4]) {
        if constexpr (MINIMUM) {
            uint4 s = load16(tile + SCALES + plane_offset<32>(row, half));
            const uint32_t words[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                d[i] = half_to_float(words[i] & 0xFFFF);
                m[i] = half_to_float(words[i] >> 16);
            }
        } else {
            uint2 s = *reinterpret_cast<const uint2 *>(tile + SCALES + row * 16 + half * 8);
            const uint32_t words[2] = {s.x, s.y};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                d[i] = half_to_float(words[i / 2] >> 16 * (i % 2) & 0xFFFF) * UNIT;
                m[i] = 0;
            }
        }
    }

    // The scale of one block, for types without a minimum.
    static __device__ float scale(const uint8_t *tile, int row, int block) {
        static_assert(!MINIMUM);
        return half_to_float(*reinterpret_cast<const uint16_t *>(tile + SCALES + row * 16 + block * 2)) *
               UNIT;
    }

    static __device__ uint32_t load_high_bits(const uint8_t *tile, int row, int block) {
        if constexpr (BITS != 5) return 0;
        return *reinterpret_cast<const uint32_t *>(tile + HIGH_BITS + plane_offset<32>(row, block / 4) +
                                                   block % 4 * 4);
    }

    // The value of one row's 256 columns for one token.
    static __device__ float dot(const uint8_t *tile, int row, const uint8_t *act_row) {
        float value = 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float d[4], minimum[4];
            scales(tile, row, half, d, minimum);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int b = 4 * half + i;
                uint32_t w[8];
                if constexpr (BITS == 8) {
                    uint4 low = load16(tile + plane_offset<256>(row, 2 * b)),
                          high = load16(tile + plane_offset<256>(row, 2 * b + 1));
                    w[0] = low.x, w[1] = low.y, w[2] = low.z, w[3] = low.w;
                    w[4] = high.x, w[5] = high.y, w[6] = high.z, w[7] = high.w;
                } else {
                    uint4 q = load16(tile + plane_offset<128>(row, b));
                    uint32_t high_bits = load_high_bits(tile, row, b);
                    const uint32_t words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        w[j] = expand<false>(words[j], high_bits, 4 * j);
                        w[j + 4] = expand<true>(words[j], high_bits, 16 + 4 * j);
                    }
                }
                uint4 low = load16(act_row + 32 * b), high = load16(act_row + 32 * b + 16);
                int sum = dot4(w[0], low.x, 0);
                sum = dot4(w[1], low.y, sum);
                sum = dot4(w[2], low.z, sum);
                sum = dot4(w[3], low.w, sum);
                sum = dot4(w[4], high.x, sum);
                sum = dot4(w[5], high.y, sum);
                sum = dot4(w[6], high.z, sum);
                sum = dot4(w[7], high.w, sum);
                float scale = reinterpret_cast<const float *>(act_row + ACT_ROW_SCALES)[b];
                value = fmaf(__int2float_rn(sum), d[i] * scale, value);
                if constexpr (MINIMUM) {
                    float s = reinterpret_cast<const float *>(act_row + act_row_sums(ACTIVATION))[b];
                    value = fmaf(minimum[i], s, value);
                }
            }
        }
        return value;
    }

    // Computes the values of MT weight tiles for NT activation tiles, which are `tile_stride` and
    // `act_tile_stride` bytes apart. Calls `accumulate(mt, nt, i, value)`, where i counts the four
    // elements of C that the lane holds.
    template <int MT, int NT, class Accumulate>
    static __device__ void products(const uint8_t *tile, int tile_stride, const uint8_t *act_tile,
                                    int act_tile_stride, Accumulate accumulate) {
        int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        float value[MT][NT][4] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float d[MT][2][4], minimum[MT][2][4];
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                scales(tile + mt * tile_stride, g, half, d[mt][0], minimum[mt][0]);
                scales(tile + mt * tile_stride, g + 8, half, d[mt][1], minimum[mt][1]);
            }
#pragma unroll
            for (int pair = 0; pair < 2; pair++) {
                int b = 4 * half + 2 * pair;
                uint32_t a[MT][2][4];
#pragma unroll
                for (int mt = 0; mt < MT; mt++) load_fragments(tile + mt * tile_stride, b, a[mt]);
#pragma unroll
                for (int nt = 0; nt < NT; nt++) {
                    const uint8_t *p = act_tile + nt * act_tile_stride;
                    uint32_t bq[4];
                    load_matrices(bq, p + act_tile_offset(lane % 8, 2 * b + lane / 8));
#pragma unroll
                    for (int k = 0; k < 2; k++) {
                        float2 scale =
                            reinterpret_cast<const float2 *>(p + ACT_TILE_QUANT_BYTES)[(b + k) * 4 + t];
                        float2 s = {};
                        if constexpr (MINIMUM)
                            s = reinterpret_cast<const float2 *>(p + ACT_TILE_QUANT_BYTES +
                                                                 256)[(b + k) * 4 + t];
#pragma unroll
                        for (int mt = 0; mt < MT; mt++) {
                            int sum[4];
                            if constexpr (SIGNED) {
                                mma_s8(sum, a[mt][k], bq[2 * k], bq[2 * k + 1], INT_BIAS);
                            } else {
                                mma_u8(sum, a[mt][k], bq[2 * k], bq[2 * k + 1], INT_BIAS);
                            }
#pragma unroll
                            for (int i = 0; i < 4; i++) {
                                float &v = value[mt][nt][i];
                                int row = i / 2, block = 2 * pair + k;
                                v = fmaf(unbias(sum[i]), d[mt][row][block] * (i % 2 ? scale.y : scale.x), v);
                                if constexpr (MINIMUM)
                                    v = fmaf(minimum[mt][row][block], i % 2 ? s.y : s.x, v);
                            }
                        }
                    }
                }
            }
        }
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int i = 0; i < 4; i++) accumulate(mt, nt, i, value[mt][nt][i]);
    }

    // Loads the A fragments of blocks b and b + 1.
    static __device__ void load_fragments(const uint8_t *tile, int b, uint32_t (&a)[2][4]) {
        int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        if constexpr (BITS == 8) {
            // Rows 0 to 7 and 8 to 15 of the block's first 16 bytes, then of its second.
            int row = lane % 16;
            load_matrices(a[0], tile + plane_offset<256>(row, 2 * b + lane / 16));
            load_matrices(a[1], tile + plane_offset<256>(row, 2 * b + 2 + lane / 16));
        } else {
            uint32_t q[4];
            load_matrices(q, tile + plane_offset<128>(lane % 16, b + lane / 16));
#pragma unroll
            for (int k = 0; k < 2; k++) {
                uint32_t upper = load_high_bits(tile, g, b + k), lower = load_high_bits(tile, g + 8, b + k);
                a[k][0] = expand<false>(q[2 * k], upper, 4 * t);
                a[k][1] = expand<false>(q[2 * k + 1], lower, 4 * t);
                a[k][2] = expand<true>(q[2 * k], upper, 16 + 4 * t);
                a[k][3] = expand<true>(q[2 * k + 1], lower, 16 + 4 * t);
            }
        }
    }
};

using Q8_0 = LegacyQuant<8, false>;
using Q4_0 = LegacyQuant<4, false>;
using Q4_1 = LegacyQuant<4, true>;
using Q5_0 = LegacyQuant<5, false>;
using Q5_1 = LegacyQuant<5, true>;
static_assert(Q8_0::TILE_BYTES == 16 * 8 * 34 && Q4_0::TILE_BYTES == 16 * 8 * 18 &&
              Q4_1::TILE_BYTES == 16 * 8 * 20);
static_assert(Q5_0::TILE_BYTES == 16 * 8 * 22 && Q5_1::TILE_BYTES == 16 * 8 * 24);
