// SPDX-License-Identifier: Apache-2.0

// Q2_K to Q6_K: blocks of 256 values with integer sub-scales, activations with one scale per 256.
//
//   value of 256 columns = (da * d) * P - (da * dmin) * N
//     P = sum over sub-blocks of sub-scale * (quants . activations)
//     N = sum over sub-blocks of minimum * (sum of activations)
//
// d and dmin are the block's scales, da is the activations' scale. Each operation is rounded to
// f32, as in the dot product of crates/quant. P and N are exact integers. So the kernels may add
// sub-blocks in any order, and may multiply quants by a power of two that a shift takes back.

#pragma once

#include "mma.cuh"
#include "tile.cuh"

// One instruction each, which the compiler does not find for shifts: products are bound by their
// instructions.
__device__ inline uint32_t byte_of(uint32_t word, int i) { return __byte_perm(word, 0, 0x4440 | i); }
__device__ inline int signed_byte_of(uint32_t word, int i) {
    // A selector with bit 3 repeats the sign of its byte.
    int value;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(value) : "r"(word), "r"(0x8880 | i * 0x1111));
    return value;
}
__device__ inline uint32_t word_of(uint4 v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Offset of an activation tile's sums per 16 values; its scales [8 tokens] come before.
constexpr int ACT_TILE_SUMS = ACT_TILE_QUANT_BYTES + 32;

__device__ inline int dot16(uint4 w, uint4 a, int sum) {
    sum = dot4_s8(w.x, a.x, sum);
    sum = dot4_s8(w.y, a.y, sum);
    sum = dot4_s8(w.z, a.z, sum);
    return dot4_s8(w.w, a.w, sum);
}

__device__ inline float affine(float da, float d, float dmin, int products, int minimums) {
    return __fsub_rn(__fmul_rn(__fmul_rn(da, d), __int2float_rn(products)),
                     __fmul_rn(__fmul_rn(da, dmin), __int2float_rn(minimums)));
}

__device__ inline float scaled(float da, float d, int products) {
    return __fmul_rn(__fmul_rn(da, d), __int2float_rn(products));
}

// Minimums times sums of activations on the tensor cores, K = 16 sub-blocks of 16. A sum has 16
// bits: its high byte is a signed operand, its low byte an unsigned one. `upper` and `lower` are
// the minimums of sub-blocks 4t to 4t + 3 of rows g and g + 8.
__device__ inline void minimum_products(int (&out)[4], uint32_t upper, uint32_t lower,
                                        const uint8_t *act_tile) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint2 sums = *reinterpret_cast<const uint2 *>(act_tile + ACT_TILE_SUMS + g * 32 + t * 8);
    int high[4], low[4];
    mma16_u8(high, upper, lower, __byte_perm(sums.x, sums.y, 0x7531));
    mma16_u8_u8(low, upper, lower, __byte_perm(sums.x, sums.y, 0x6420));
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = high[i] * 256 + low[i];
}

// Q4_K and Q5_K: eight sub-blocks of 32 with 6-bit scales and minimums.
template <int BITS>
struct AffineKQuant {
    static constexpr ActivationFormat ACTIVATION = ActivationFormat::Q8_K;
    static constexpr int HIGH_BITS = TILE_ROWS * 128;
    static constexpr int SCALE_HEADERS = HIGH_BITS + (BITS == 5 ? TILE_ROWS * 32 : 0);
    static constexpr int TILE_BYTES = SCALE_HEADERS + TILE_ROWS * 16;

    struct ScaleHeader {
        float d, dmin;
        // Of sub-blocks 0 to 3 and 4 to 7, one byte each.
        uint32_t scales[2], minimums[2];
    };

    static __device__ ScaleHeader header(const uint8_t *tile, int row) {
        uint4 h = load16(tile + SCALE_HEADERS + row * 16);
        return {half_to_float(h.x & 0xFFFF),
                half_to_float(h.x >> 16),
                {h.y & 0x3F3F3F3F, (h.w & 0x0F0F0F0F) | (h.y >> 2 & 0x30303030)},
                {h.z & 0x3F3F3F3F, (h.w >> 4 & 0x0F0F0F0F) | (h.z >> 2 & 0x30303030)}};
    }

    // Four quants of sub-block `s`, one byte each. Their low four bits are nibbles of `w`: the high
    // nibbles if s is odd. Their fifth bit is bit s of the bytes of `high_bits`.
    static __device__ uint32_t expand(uint32_t w, uint32_t high_bits, int s) {
        uint32_t q = (s % 2 ? w >> 4 : w) & 0x0F0F0F0F;
        if constexpr (BITS == 5) q |= (s < 4 ? high_bits << (4 - s) : high_bits >> (s - 4)) & 0x10101010;
        return q;
    }

    // The same; or 16 times as much if `raised` and s is odd, without a shift.
    static __device__ uint32_t expand_raised(uint32_t w, uint32_t high_bits, int s, bool raised) {
        return raised && s % 2 ? w & 0xF0F0F0F0 : expand(w, high_bits, s);
    }

    static __device__ uint4 expand16(uint4 w, uint4 high_bits, int s) {
        return {expand(w.x, high_bits.x, s), expand(w.y, high_bits.y, s), expand(w.z, high_bits.z, s),
                expand(w.w, high_bits.w, s)};
    }

    static __device__ float dot(const uint8_t *tile, int row, const uint8_t *act_row) {
        ScaleHeader h = header(tile, row);
        int products = 0, minimums = 0;
        uint4 high_bits[2] = {};
        if constexpr (BITS == 5) {
            high_bits[0] = load16(tile + HIGH_BITS + plane_offset<32>(row, 0));
            high_bits[1] = load16(tile + HIGH_BITS + plane_offset<32>(row, 1));
        }
#pragma unroll
        for (int pair = 0; pair < 4; pair++) {
            int sums[2] = {};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint4 q = load16(tile + plane_offset<128>(row, 2 * pair + half));
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    uint4 w = expand16(q, high_bits[half], 2 * pair + k);
                    sums[k] = dot16(w, load16(act_row + 64 * pair + 32 * k + 16 * half), sums[k]);
                }
            }
#pragma unroll
            for (int k = 0; k < 2; k++) {
                int s = 2 * pair + k;
                products += int(byte_of(h.scales[s / 4], s % 4)) * sums[k];
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 sums = load16(act_row + act_row_sums(ACTIVATION) + 16 * half);
#pragma unroll
            for (int k = 0; k < 2; k++) {
                // Minimums of two sub-blocks, each twice: a sub-block of 32 has two sums of 16.
                uint32_t twice = __byte_perm(h.minimums[half], 0, k ? 0x3322 : 0x1100);
                minimums = __dp2a_lo(int(word_of(sums, 2 * k)), int(twice), minimums);
                minimums = __dp2a_hi(int(word_of(sums, 2 * k + 1)), int(twice), minimums);
            }
        }
        float da = *reinterpret_cast<const float *>(act_row + ACT_ROW_SCALES);
        return affine(da, h.d, h.dmin, products, minimums);
    }

    template <int MT, int NT, class Accumulate>
    static __device__ void products(const uint8_t *tile, int tile_stride, const uint8_t *act_tile,
                                    int act_tile_stride, Accumulate accumulate) {
        int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        ScaleHeader headers[MT][2];
        uint32_t high_bits[MT][4] = {};
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            headers[mt][0] = header(tile + mt * tile_stride, g);
            headers[mt][1] = header(tile + mt * tile_stride, g + 8);
            if constexpr (BITS == 5)
                load_matrices(high_bits[mt],
                              tile + mt * tile_stride + HIGH_BITS + plane_offset<32>(lane % 16, lane / 16));
        }
        // Sums of even and of odd sub-blocks. The odd ones may be 16 times as large, at most 2^28.
        constexpr bool RAISED = BITS == 4 && MT * NT <= 2;
        int products[MT][NT][4] = {}, odd[MT][NT][4] = {};
#pragma unroll
        for (int pair = 0; pair < 4; pair++) {
            uint32_t a[MT][2][4];
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                uint32_t q[4];
                load_matrices(q,
                              tile + mt * tile_stride + plane_offset<128>(lane % 16, 2 * pair + lane / 16));
#pragma unroll
                for (int k = 0; k < 2; k++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        a[mt][k][i] = expand_raised(q[i], high_bits[mt][i], 2 * pair + k, RAISED);
            }
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                uint32_t b[4];
                load_matrices(
                    b, act_tile + nt * act_tile_stride + act_tile_offset(lane % 8, 4 * pair + lane / 8));
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    int s = 2 * pair + k;
#pragma unroll
                    for (int mt = 0; mt < MT; mt++) {
                        int sum[4];
                        mma_u8(sum, a[mt][k], b[2 * k], b[2 * k + 1], 0);
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            (RAISED && k ? odd : products)[mt][nt][i] +=
                                int(byte_of(headers[mt][i / 2].scales[s / 4], s % 4)) * sum[i];
                    }
                }
            }
        }
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            // Minimums per 16 values: sub-blocks 2t and 2t + 1 of 32, each twice.
            uint32_t minimums[2];
#pragma unroll
            for (int r = 0; r < 2; r++)
                minimums[r] = __byte_perm(t < 2 ? headers[mt][r].minimums[0] : headers[mt][r].minimums[1], 0,
                                          t % 2 ? 0x3322 : 0x1100);
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                int mins[4];
                minimum_products(mins, minimums[0], minimums[1], act_tile + nt * act_tile_stride);
                float2 da = reinterpret_cast<const float2 *>(act_tile + nt * act_tile_stride +
                                                             ACT_TILE_QUANT_BYTES)[t];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    accumulate(mt, nt, i,
                               affine(i % 2 ? da.y : da.x, headers[mt][i / 2].d, headers[mt][i / 2].dmin,
                                      products[mt][nt][i] + (odd[mt][nt][i] >> 4), mins[i]));
            }
        }
    }
};

using Q4_K = AffineKQuant<4>;
using Q5_K = AffineKQuant<5>;
static_assert(Q4_K::TILE_BYTES == 16 * 144 && Q5_K::TILE_BYTES == 16 * 176);

// Q2_K, Q3_K and Q6_K: sixteen sub-blocks of 16. A block has two halves h of 128 values. A half has
// four runs j of 32 values, which share bytes. A run has two halves e of 16 values; each is
// sub-block 8h + 2j + e. `Layout` says where the bytes are:
//
//   WORDS                      16-byte vectors that the runs' halves e are made of
//   word_offset(row, h, e, i)  where vector i is in the tile
//   expand(words, h, j)        four quants of run j, times 2^SHIFT
//   header(tile, row)          scale, sub-scales (and minimums), one byte per sub-block
template <class Layout>
struct SubBlock16KQuant {
    static constexpr ActivationFormat ACTIVATION = ActivationFormat::Q8_K;

    static __device__ uint4 expand16(const uint4 (&words)[Layout::WORDS], int h, int j) {
        uint32_t out[4];
#pragma unroll
        for (int w = 0; w < 4; w++) {
            uint32_t four[Layout::WORDS];
#pragma unroll
            for (int i = 0; i < Layout::WORDS; i++) four[i] = word_of(words[i], w);
            out[w] = Layout::expand(four, h, j);
        }
        return {out[0], out[1], out[2], out[3]};
    }

    // Unsigned sub-scales are below 128, so they may be read as signed.
    static __device__ int sub_scale(const uint32_t (&scales)[4], int s) {
        return signed_byte_of(scales[s / 4], s % 4);
    }

    static __device__ float dot(const uint8_t *tile, int row, const uint8_t *act_row) {
        auto header = Layout::header(tile, row);
        int products = 0;
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                uint4 words[Layout::WORDS];
#pragma unroll
                for (int i = 0; i < Layout::WORDS; i++)
                    words[i] = load16(tile + Layout::word_offset(row, h, e, i));
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    int s = 8 * h + 2 * j + e;
                    uint4 w = expand16(words, h, j);
                    products += sub_scale(header.scales, s) * dot16(w, load16(act_row + 16 * s), 0);
                }
            }
        float da = *reinterpret_cast<const float *>(act_row + ACT_ROW_SCALES);
        if constexpr (Layout::MINIMUMS) {
            int minimums = 0;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint4 sums = load16(act_row + act_row_sums(ACTIVATION) + 16 * half);
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    int four = int(header.minimums[2 * half + k]);
                    minimums = __dp2a_lo(int(word_of(sums, 2 * k)), four, minimums);
                    minimums = __dp2a_hi(int(word_of(sums, 2 * k + 1)), four, minimums);
                }
            }
            return affine(da, header.d, header.dmin, products >> Layout::SHIFT, minimums);
        } else {
            return scaled(da, header.d, products >> Layout::SHIFT);
        }
    }

    template <int MT, int NT, class Accumulate>
    static __device__ void products(const uint8_t *tile, int tile_stride, const uint8_t *act_tile,
                                    int act_tile_stride, Accumulate accumulate) {
        int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        decltype(Layout::header(tile, 0)) headers[MT][2];
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int r = 0; r < 2; r++) headers[mt][r] = Layout::header(tile + mt * tile_stride, g + 8 * r);
        int products[MT][NT][4] = {};
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                // The A fragment of each run: rows 0 to 7, and rows 8 to 15.
                uint32_t a[MT][4][2];
#pragma unroll
                for (int mt = 0; mt < MT; mt++) {
                    uint32_t words[2][Layout::WORDS];
#pragma unroll
                    for (int i = 0; i < Layout::WORDS; i++) {
                        uint32_t rows[2];
                        load_matrices(rows,
                                      tile + mt * tile_stride + Layout::word_offset(lane % 16, h, e, i));
                        words[0][i] = rows[0], words[1][i] = rows[1];
                    }
#pragma unroll
                    for (int j = 0; j < 4; j++)
#pragma unroll
                        for (int r = 0; r < 2; r++) a[mt][j][r] = Layout::expand(words[r], h, j);
                }
#pragma unroll
                for (int nt = 0; nt < NT; nt++) {
                    uint32_t b[4];
                    load_matrices(b, act_tile + nt * act_tile_stride +
                                         act_tile_offset(lane % 8, 8 * h + e + 2 * (lane / 8)));
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        int s = 8 * h + 2 * j + e;
#pragma unroll
                        for (int mt = 0; mt < MT; mt++) {
                            int sum[4];
                            mma16_s8(sum, a[mt][j][0], a[mt][j][1], b[j]);
#pragma unroll
                            for (int i = 0; i < 4; i++)
                                products[mt][nt][i] += sub_scale(headers[mt][i / 2].scales, s) * sum[i];
                        }
                    }
                }
            }
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            uint32_t minimums[2] = {};
            if constexpr (Layout::MINIMUMS) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const uint32_t *all = headers[mt][r].minimums;
                    minimums[r] = t == 0 ? all[0] : t == 1 ? all[1] : t == 2 ? all[2] : all[3];
                }
            }
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                float2 da = reinterpret_cast<const float2 *>(act_tile + nt * act_tile_stride +
                                                             ACT_TILE_QUANT_BYTES)[t];
                int mins[4] = {};
                if constexpr (Layout::MINIMUMS)
                    minimum_products(mins, minimums[0], minimums[1], act_tile + nt * act_tile_stride);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const auto &header = headers[mt][i / 2];
                    float d = i % 2 ? da.y : da.x;
                    int sum = products[mt][nt][i] >> Layout::SHIFT;
                    if constexpr (Layout::MINIMUMS) {
                        accumulate(mt, nt, i, affine(d, header.d, header.dmin, sum, mins[i]));
                    } else {
                        accumulate(mt, nt, i, scaled(d, header.d, sum));
                    }
                }
            }
        }
    }
};

// A row's scale, and its sub-scales, four to a word.
struct SubScaleHeader {
    float d;
    uint32_t scales[4];
};

struct SubScaleMinimumHeader {
    float d, dmin;
    uint32_t scales[4], minimums[4];
};

// 8-bit signed sub-scales. Expanded quants are 4 (q - 32); flipping their top bit subtracts the 32.
// It is flipped in all runs of the high bits at once.
struct Q6_K_Layout {
    static constexpr int HIGHS = TILE_ROWS * 128;
    static constexpr int SUB_SCALES = HIGHS + TILE_ROWS * 64;
    static constexpr int SCALES = SUB_SCALES + TILE_ROWS * 16;
    static constexpr int TILE_BYTES = SCALES + TILE_ROWS * 2;
    static constexpr int WORDS = 3, SHIFT = 2;
    static constexpr bool MINIMUMS = false;

    // Vector 0 has the low nibbles of runs 0 and 2, vector 1 those of runs 1 and 3. Vector 2 has
    // the high bits of all runs.
    static __device__ int word_offset(int row, int h, int e, int i) {
        return i < 2 ? plane_offset<128>(row, 4 * h + 2 * i + e) : HIGHS + plane_offset<64>(row, 2 * h + e);
    }

    static __device__ uint32_t expand(const uint32_t (&words)[WORDS], int, int j) {
        uint32_t low = words[j % 2], high = words[2] ^ 0xAAAAAAAA;
        uint32_t nibbles = (j < 2 ? low << 2 : low >> 2) & 0x3C3C3C3C;
        return nibbles | (high << (6 - 2 * j) & 0xC0C0C0C0);
    }

    static __device__ SubScaleHeader header(const uint8_t *tile, int row) {
        uint4 sub_scales = load16(tile + SUB_SCALES + row * 16);
        return {half_to_float(reinterpret_cast<const uint16_t *>(tile + SCALES)[row]),
                {sub_scales.x, sub_scales.y, sub_scales.z, sub_scales.w}};
    }
};

// 4-bit sub-scales and minimums; quants are 0 to 3.
struct Q2_K_Layout {
    static constexpr int SUB_SCALES = TILE_ROWS * 64;
    static constexpr int SCALES = SUB_SCALES + TILE_ROWS * 16;
    static constexpr int TILE_BYTES = SCALES + TILE_ROWS * 4;
    static constexpr int WORDS = 1, SHIFT = 0;
    static constexpr bool MINIMUMS = true;

    static __device__ int word_offset(int row, int h, int e, int) { return plane_offset<64>(row, 2 * h + e); }

    static __device__ uint32_t expand(const uint32_t (&words)[WORDS], int, int j) {
        return words[0] >> 2 * j & 0x03030303;
    }

    static __device__ SubScaleMinimumHeader header(const uint8_t *tile, int row) {
        uint4 sub_scales = load16(tile + SUB_SCALES + row * 16);
        uint32_t scales = reinterpret_cast<const uint32_t *>(tile + SCALES)[row];
        SubScaleMinimumHeader header = {half_to_float(scales & 0xFFFF), half_to_float(scales >> 16), {}, {}};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            header.scales[i] = word_of(sub_scales, i) & 0x0F0F0F0F;
            header.minimums[i] = word_of(sub_scales, i) >> 4 & 0x0F0F0F0F;
        }
        return header;
    }
};

// 6-bit signed sub-scales, expanded to 4 (s - 32). Expanded quants are 32 (q - 4).
struct Q3_K_Layout {
    static constexpr int HIGH_BIT_MASKS = TILE_ROWS * 64;
    static constexpr int SUB_SCALES = HIGH_BIT_MASKS + TILE_ROWS * 32;
    static constexpr int SCALES = SUB_SCALES + TILE_ROWS * 12;
    static constexpr int TILE_BYTES = SCALES + TILE_ROWS * 2;
    static constexpr int WORDS = 2, SHIFT = 7;
    static constexpr bool MINIMUMS = false;

    // Vector 0 has two bits of all runs of the half; vector 1 has the third bits of all runs of
    // both halves.
    static __device__ int word_offset(int row, int h, int e, int i) {
        return i == 0 ? plane_offset<64>(row, 2 * h + e) : HIGH_BIT_MASKS + plane_offset<32>(row, e);
    }

    static __device__ uint32_t expand(const uint32_t (&words)[WORDS], int h, int j) {
        uint32_t low = (j < 3 ? words[0] << (5 - 2 * j) : words[0] >> 1) & 0x60606060;
        return low | (~(words[1] << (7 - 4 * h - j)) & 0x80808080);
    }

    static __device__ SubScaleHeader header(const uint8_t *tile, int row) {
        const uint32_t *packed = reinterpret_cast<const uint32_t *>(tile + SUB_SCALES + row * 12);
        SubScaleHeader header = {half_to_float(reinterpret_cast<const uint16_t *>(tile + SCALES)[row]), {}};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t low = (i < 2 ? packed[i] : packed[i - 2] >> 4) & 0x0F0F0F0F;
            uint32_t high = packed[2] >> 2 * i & 0x03030303;
            header.scales[i] = (low << 2 | high << 6) ^ 0x80808080;
        }
        return header;
    }
};

struct Q6_K : SubBlock16KQuant<Q6_K_Layout> {
    static constexpr int TILE_BYTES = Q6_K_Layout::TILE_BYTES;
};
struct Q2_K : SubBlock16KQuant<Q2_K_Layout> {
    static constexpr int TILE_BYTES = Q2_K_Layout::TILE_BYTES;
};
struct Q3_K : SubBlock16KQuant<Q3_K_Layout> {
    static constexpr int TILE_BYTES = Q3_K_Layout::TILE_BYTES;
};
static_assert(Q6_K::TILE_BYTES == 16 * 210 && Q2_K::TILE_BYTES == 16 * 84 && Q3_K::TILE_BYTES == 16 * 110);
