// Q2_K to Q6_K: blocks of 256 values with integer sub-scales, activations with one scale per 256.
//
// The value of 256 columns is (da * d) * P - (da * dmin) * N, each operation rounded to f32 as quant's own dot does it.
// P, the sum over sub-blocks of scale * product, and N, that of minimum * sum of activations, are exact integers, so
// sub-blocks may be taken in any order and quants may be multiplied by a power of two that a shift takes back.

#pragma once

#include "mma.cuh"
#include "tile.cuh"

__device__ inline uint32_t byte_of(uint32_t word, int i) { return word >> 8 * i & 0xFF; }
__device__ inline int signed_byte_of(uint32_t word, int i) { return static_cast<int8_t>(word >> 8 * i); }
__device__ inline uint32_t word_of(uint4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Scale of token `token` in a panel's [8 tokens], and its sums per 16 values.
constexpr int PANEL_SUMS = PANEL_QUANTS + 32;

__device__ inline int dot16(uint4 w, uint4 a, int sum) {
    sum = dot4_s8(w.x, a.x, sum);
    sum = dot4_s8(w.y, a.y, sum);
    sum = dot4_s8(w.z, a.z, sum);
    return dot4_s8(w.w, a.w, sum);
}

__device__ inline float affine(float da, float d, float dmin, int products, int minimums) {
    return __fsub_rn(__fmul_rn(__fmul_rn(da, d), __int2float_rn(products)), __fmul_rn(__fmul_rn(da, dmin), __int2float_rn(minimums)));
}

__device__ inline float scaled(float da, float d, int products) { return __fmul_rn(__fmul_rn(da, d), __int2float_rn(products)); }

// Minimums times sums on the tensor cores: 16 sub-blocks of 16, the sums' low bytes unsigned and high bytes signed.
// `upper` and `lower` are the minimums of sub-blocks 4t to 4t + 3 of rows g and g + 8.
__device__ inline void minimum_products(int (&out)[4], uint32_t upper, uint32_t lower, const uint8_t *panel) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint2 sums = *reinterpret_cast<const uint2 *>(panel + PANEL_SUMS + g * 32 + t * 8);
    int high[4];
    mma16_u8(high, upper, lower, __byte_perm(sums.x, sums.y, 0x7531));
#pragma unroll
    for (int i = 0; i < 4; i++) high[i] *= 256;
    mma16_u8_u8(out, upper, lower, __byte_perm(sums.x, sums.y, 0x6420), high);
}

// Q4_K and Q5_K: eight sub-blocks of 32 with 6-bit scales and minimums.
template <int BITS>
struct AffineK {
    static constexpr Scaling SCALING = Scaling::PER_256;
    static constexpr int FIFTHS = TILE_ROWS * 128;
    static constexpr int HEADS = FIFTHS + (BITS == 5 ? TILE_ROWS * 32 : 0);
    static constexpr int TILE_BYTES = HEADS + TILE_ROWS * 16;

    struct Head {
        float d, dmin;
        // Of sub-blocks 0 to 3 and 4 to 7, a byte each.
        uint32_t scales[2], minimums[2];
    };

    static __device__ Head head(const uint8_t *tile, int row) {
        uint4 h = load16(tile + HEADS + row * 16);
        return {half_to_float(h.x & 0xFFFF),
                half_to_float(h.x >> 16),
                {h.y & 0x3F3F3F3F, (h.w & 0x0F0F0F0F) | (h.y >> 2 & 0x30303030)},
                {h.z & 0x3F3F3F3F, (h.w >> 4 & 0x0F0F0F0F) | (h.z >> 2 & 0x30303030)}};
    }

    // Sub-block s of four quants; `w` has its nibbles (the high ones if s is odd), `fifth` its top bits in bits s.
    static __device__ uint32_t expand(uint32_t w, uint32_t fifth, int s) {
        uint32_t q = (s % 2 ? w >> 4 : w) & 0x0F0F0F0F;
        if constexpr (BITS == 5) q |= (s < 4 ? fifth << (4 - s) : fifth >> (s - 4)) & 0x10101010;
        return q;
    }

    static __device__ uint4 expand16(uint4 w, uint4 fifth, int s) {
        return {expand(w.x, fifth.x, s), expand(w.y, fifth.y, s), expand(w.z, fifth.z, s), expand(w.w, fifth.w, s)};
    }

    template <int M>
    static __device__ void dot(const uint8_t *tile, int row, const uint8_t *record, int stride, float (&value)[M]) {
        Head h = head(tile, row);
        int products[M] = {}, minimums[M] = {};
        uint4 fifth[2] = {};
        if constexpr (BITS == 5) {
            fifth[0] = load16(tile + FIFTHS + piece<32>(row, 0));
            fifth[1] = load16(tile + FIFTHS + piece<32>(row, 1));
        }
#pragma unroll
        for (int pair = 0; pair < 4; pair++) {
            int sums[M][2] = {};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint4 q = load16(tile + piece<128>(row, 2 * pair + half));
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    uint4 w = expand16(q, fifth[half], 2 * pair + k);
#pragma unroll
                    for (int m = 0; m < M; m++) sums[m][k] = dot16(w, load16(record + m * stride + 64 * pair + 32 * k + 16 * half), sums[m][k]);
                }
            }
#pragma unroll
            for (int k = 0; k < 2; k++) {
                int s = 2 * pair + k;
#pragma unroll
                for (int m = 0; m < M; m++) products[m] += int(byte_of(h.scales[s / 4], s % 4)) * sums[m][k];
            }
        }
#pragma unroll
        for (int m = 0; m < M; m++) {
            const uint8_t *token = record + m * stride;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint4 sums = load16(token + record_sums(SCALING) + 16 * half);
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    // Two sub-blocks' minimums, twice each: a sub-block of 32 has two sums of 16.
                    uint32_t twice = __byte_perm(h.minimums[half], 0, k ? 0x3322 : 0x1100);
                    minimums[m] = __dp2a_lo(int(word_of(sums, 2 * k)), int(twice), minimums[m]);
                    minimums[m] = __dp2a_hi(int(word_of(sums, 2 * k + 1)), int(twice), minimums[m]);
                }
            }
            float da = *reinterpret_cast<const float *>(token + RECORD_SCALES);
            value[m] = affine(da, h.d, h.dmin, products[m], minimums[m]);
        }
    }

    template <int MT, int NT, class Take>
    static __device__ void products(const uint8_t *tile, int tile_stride, const uint8_t *panel, int panel_stride, Take take) {
        int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        Head heads[MT][2];
        uint32_t fifth[MT][4] = {};
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            heads[mt][0] = head(tile + mt * tile_stride, g);
            heads[mt][1] = head(tile + mt * tile_stride, g + 8);
            if constexpr (BITS == 5) load_matrices(fifth[mt], tile + mt * tile_stride + FIFTHS + piece<32>(lane % 16, lane / 16));
        }
        int products[MT][NT][4] = {};
#pragma unroll
        for (int pair = 0; pair < 4; pair++) {
            uint32_t a[MT][2][4];
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                uint32_t q[4];
                load_matrices(q, tile + mt * tile_stride + piece<128>(lane % 16, 2 * pair + lane / 16));
#pragma unroll
                for (int k = 0; k < 2; k++)
#pragma unroll
                    for (int i = 0; i < 4; i++) a[mt][k][i] = expand(q[i], fifth[mt][i], 2 * pair + k);
            }
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                uint32_t b[4];
                load_matrices(b, panel + nt * panel_stride + panel_piece(lane % 8, 4 * pair + lane / 8));
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    int s = 2 * pair + k;
#pragma unroll
                    for (int mt = 0; mt < MT; mt++) {
                        int sum[4];
                        mma_u8(sum, a[mt][k], b[2 * k], b[2 * k + 1], 0);
#pragma unroll
                        for (int i = 0; i < 4; i++) products[mt][nt][i] += int(byte_of(heads[mt][i / 2].scales[s / 4], s % 4)) * sum[i];
                    }
                }
            }
        }
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            // Sums of 16: sub-blocks 2t and 2t + 1 of 32, twice each.
            uint32_t minimums[2];
#pragma unroll
            for (int r = 0; r < 2; r++)
                minimums[r] = __byte_perm(t < 2 ? heads[mt][r].minimums[0] : heads[mt][r].minimums[1], 0, t % 2 ? 0x3322 : 0x1100);
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                int mins[4];
                minimum_products(mins, minimums[0], minimums[1], panel + nt * panel_stride);
                float2 da = reinterpret_cast<const float2 *>(panel + nt * panel_stride + PANEL_QUANTS)[t];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    take(mt, nt, i, affine(i % 2 ? da.y : da.x, heads[mt][i / 2].d, heads[mt][i / 2].dmin, products[mt][nt][i], mins[i]));
            }
        }
    }
};

using Q4_K = AffineK<4>;
using Q5_K = AffineK<5>;
static_assert(Q4_K::TILE_BYTES == 16 * 144 && Q5_K::TILE_BYTES == 16 * 176);

// Sixteen sub-blocks of 16 in two halves of 128: run j (0 to 3) of 32 values of half h is two bits (or a nibble and two
// bits) of the same bytes. `FORMAT` gives four quants of run j from the words that hold them.
//
// Q6_K: 8-bit signed scales; quants are 4 (q - 32): the top bit's xor centres them.
struct Q6_K {
    static constexpr Scaling SCALING = Scaling::PER_256;
    static constexpr int HIGHS = TILE_ROWS * 128;
    static constexpr int SUBS = HIGHS + TILE_ROWS * 64;
    static constexpr int SCALES = SUBS + TILE_ROWS * 16;
    static constexpr int TILE_BYTES = SCALES + TILE_ROWS * 2;
    static constexpr int SHIFT = 2;

    // Four quants of run j from the word of low bits that has it and the word of high bits.
    static __device__ uint32_t expand(uint32_t low, uint32_t high, int j) {
        uint32_t nibbles = (j < 2 ? low << 2 : low >> 2) & 0x3C3C3C3C;
        return (nibbles | (high << (6 - 2 * j) & 0xC0C0C0C0)) ^ 0x80808080;
    }

    static __device__ uint4 expand16(uint4 low, uint4 high, int j) {
        return {expand(low.x, high.x, j), expand(low.y, high.y, j), expand(low.z, high.z, j), expand(low.w, high.w, j)};
    }

    static __device__ float scale(const uint8_t *tile, int row) {
        return half_to_float(reinterpret_cast<const uint16_t *>(tile + SCALES)[row]);
    }

    template <int M>
    static __device__ void dot(const uint8_t *tile, int row, const uint8_t *record, int stride, float (&value)[M]) {
        uint4 subs = load16(tile + SUBS + row * 16);
        int products[M] = {};
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                uint4 high = load16(tile + HIGHS + piece<64>(row, 2 * h + e));
                uint4 low[2] = {load16(tile + piece<128>(row, 4 * h + e)), load16(tile + piece<128>(row, 4 * h + 2 + e))};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    int s = 8 * h + 2 * j + e;
                    uint4 w = expand16(low[j % 2], high, j);
                    int sub = signed_byte_of(word_of(subs, s / 4), s % 4);
#pragma unroll
                    for (int m = 0; m < M; m++) products[m] += sub * dot16(w, load16(record + m * stride + 16 * s), 0);
                }
            }
#pragma unroll
        for (int m = 0; m < M; m++) {
            float da = *reinterpret_cast<const float *>(record + m * stride + RECORD_SCALES);
            value[m] = scaled(da, scale(tile, row), products[m] >> SHIFT);
        }
    }

    template <int MT, int NT, class Take>
    static __device__ void products(const uint8_t *tile, int tile_stride, const uint8_t *panel, int panel_stride, Take take) {
        int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        uint4 subs[MT][2];
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            subs[mt][0] = load16(tile + mt * tile_stride + SUBS + g * 16);
            subs[mt][1] = load16(tile + mt * tile_stride + SUBS + (g + 8) * 16);
        }
        int products[MT][NT][4] = {};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            // Rows 0 to 7 and 8 to 15 of both pieces.
            uint32_t high[MT][4];
#pragma unroll
            for (int mt = 0; mt < MT; mt++) load_matrices(high[mt], tile + mt * tile_stride + HIGHS + piece<64>(lane % 16, 2 * h + lane / 16));
#pragma unroll
            for (int e = 0; e < 2; e++) {
                uint32_t a[MT][4][2];
#pragma unroll
                for (int mt = 0; mt < MT; mt++) {
                    uint32_t low[4];
                    load_matrices(low, tile + mt * tile_stride + piece<128>(lane % 16, 4 * h + e + 2 * (lane / 16)));
#pragma unroll
                    for (int j = 0; j < 4; j++)
#pragma unroll
                        for (int r = 0; r < 2; r++) a[mt][j][r] = expand(low[2 * (j % 2) + r], high[mt][2 * e + r], j);
                }
#pragma unroll
                for (int nt = 0; nt < NT; nt++) {
                    uint32_t b[4];
                    load_matrices(b, panel + nt * panel_stride + panel_piece(lane % 8, 8 * h + e + 2 * (lane / 8)));
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        int s = 8 * h + 2 * j + e;
#pragma unroll
                        for (int mt = 0; mt < MT; mt++) {
                            int sum[4];
                            mma16_s8(sum, a[mt][j][0], a[mt][j][1], b[j]);
#pragma unroll
                            for (int i = 0; i < 4; i++) products[mt][nt][i] += signed_byte_of(word_of(subs[mt][i / 2], s / 4), s % 4) * sum[i];
                        }
                    }
                }
            }
        }
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            float d[2] = {scale(tile + mt * tile_stride, g), scale(tile + mt * tile_stride, g + 8)};
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                float2 da = reinterpret_cast<const float2 *>(panel + nt * panel_stride + PANEL_QUANTS)[t];
#pragma unroll
                for (int i = 0; i < 4; i++) take(mt, nt, i, scaled(i % 2 ? da.y : da.x, d[i / 2], products[mt][nt][i] >> SHIFT));
            }
        }
    }
};
static_assert(Q6_K::TILE_BYTES == 16 * 210);
