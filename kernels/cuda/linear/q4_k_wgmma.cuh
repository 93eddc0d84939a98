// SPDX-License-Identifier: Apache-2.0

// Values of 256 columns of Q4_K weights for wgmma_product.cuh. Nothing is rounded before the end:
//
//   X = sum (q - 8) scale a         256 columns of one row and token, 16 steps of 16 columns;
//                                   at most 504 * 127 * 256 = 16.4 million, and 2^24 is 16.8
//   Y = sum scale * (sum of 16 a)   one step over the 16 sums of a
//   N = sum minimum * (sum of 16 a) one step
//   P = 8 Y + X                     rounded once, as the conversion of the integer is
//   value = (da d) P - (da dmin) N  the order of kquants.cuh; values of 256 columns are then added
//                                   in ascending order of columns
//
// Limit: instructions beside the tensor cores. Per 256 columns, those of a multiprocessor are busy
// for 2,300 of 3,600 clocks. A warp issues some 300 instructions that expand weights and 520 for
// its 64 values, seven operations each. Both share the register file with the tensor cores.
// Measured on an H200: 415 to 485 TFLOP/s for 512 tokens (matmul.cuh: 265 to 290).
//
// Tried, with the same bits: warpgroups that multiply by turns (within 1%), Y and N by mma.sync (5%
// slower), -72 scale from shared memory (3% slower), constants of the expansion as immediates (3%
// slower), two stages of weights (2% slower).

#pragma once

#include "kquants.cuh"
#include "wgmma_product.cuh"

#if HAS_WGMMA

namespace wgmma_product {

// a * b + c, and the operations alone, on two halves.
__device__ __forceinline__ uint32_t fma_halves(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
__device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ uint32_t subtract_halves(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// Byte `i` of `word` as two equal halves: 0x6400 is 1,024, whose last place is 1.
__device__ __forceinline__ uint32_t byte_to_halves(uint32_t word, int i) {
    return subtract_halves(__byte_perm(word, 0x64646464, 0x4040 | i | i << 8), 0x64006400);
}

// Bits 4 to 7 of both halves, and 64 as a half, whose last place is 1/16: a nibble at these bits
// counts ones.
constexpr uint32_t NIBBLES = 0x00F000F0, HALVES_64 = 0x54005400;

// (w & mask) | bias: 64 plus a nibble in both halves.
__device__ __forceinline__ uint32_t nibbles(uint32_t w, uint32_t mask, uint32_t bias) {
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(w), "r"(mask), "r"(bias));
    return d;
}

// (64 + q) scale - 72 scale = (q - 8) scale, exactly. -72 in both halves:
constexpr uint32_t MINUS_72 = 0xD480D480;

// Rows of 16 bytes without a swizzle: the sums of 8 tokens, as two matrices of 8 by 8.
__device__ __forceinline__ uint64_t sums_descriptor(const uint8_t *sums) {
    return (shared_address(sums) & 0x3FFFF) >> 4 | uint64_t(128 >> 4) << 16 |
           uint64_t(F16_SUMS_BYTES >> 4) << 32;
}

struct Q4KProducts {
    using Sum = float;
    static constexpr bool EIGHT_BIT = false;
    static constexpr ActivationFormat ACTIVATION = Q4_K::ACTIVATION;
    static constexpr int TILE_BYTES = Q4_K::TILE_BYTES, SCALE_HEADERS = Q4_K::SCALE_HEADERS;
    // {minimum, scale} of 8 sub-blocks, each as two equal halves. Padding keeps rows in different
    // banks.
    static constexpr int UNPACKED_ROW = 72;

    // A lane unpacks four sub-blocks of a row of the warp.
    static __device__ void unpack_scales(const uint8_t *tile, uint8_t *unpacked) {
        int lane = threadIdx.x % 32, row = lane % TILE_ROWS, half = lane / TILE_ROWS;
        auto header = Q4_K::header(tile, row);
        uint32_t scales = half == 0 ? header.scales[0] : header.scales[1];
        uint32_t minimums = half == 0 ? header.minimums[0] : header.minimums[1];
        uint8_t *to = unpacked + row * UNPACKED_ROW + half * 32;
#pragma unroll
        for (int s = 0; s < 4; s++)
            *reinterpret_cast<uint2 *>(to + s * 8) =
                make_uint2(byte_to_halves(minimums, s), byte_to_halves(scales, s));
    }

    // X over 256 columns. Products with the last unit are still in flight at the end.
    template <int TOKENS, class Units>
    static __device__ void multiply_columns(float (&X)[TOKENS / 2], const ColumnTile &columns, Units &units) {
        int lane = threadIdx.x % 32;
        const uint8_t *tile = columns.weights, *scales = columns.unpacked + lane / 4 * UNPACKED_ROW,
                      *unit = nullptr;
        uint32_t q[2][4];
        load_matrices(q[0], tile + plane_offset<128>(lane % 16, lane / 16));
        // Scales of rows g and g + 8, a sub-block ahead.
        uint32_t sub_scales[2][2];
        auto load_scales = [&](int s) {
            sub_scales[s % 2][0] = *reinterpret_cast<const uint32_t *>(scales + s * 8 + 4);
            sub_scales[s % 2][1] = *reinterpret_cast<const uint32_t *>(scales + s * 8 + 4 + 8 * UNPACKED_ROW);
        };
        load_scales(0);
        uint32_t mask = NIBBLES, bias = HALVES_64;
        // In registers, they are operands of one instruction; as constants, of two.
        asm volatile("" : "+r"(mask), "+r"(bias));
        uint32_t a[2][2][4];
#pragma unroll
        for (int s = 0; s < 8; s++) {
            int pair = s / 2, k = s % 2;
            if (k == 0 && pair < 3)
                load_matrices(q[(pair + 1) % 2],
                              tile + plane_offset<128>(lane % 16, 2 * (pair + 1) + lane / 16));
            if (s < 7) load_scales(s + 1);
#pragma unroll
            for (int v = 0; v < 2; v++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    uint32_t w = q[pair % 2][2 * v + r], scale = sub_scales[s % 2][r];
                    uint32_t offset = multiply_halves(scale, MINUS_72);
                    // Columns of 16 are even ones first, as in the units.
                    a[s % 2][v][r] = fma_halves(nibbles(k ? w : w << 4, mask, bias), scale, offset);
                    a[s % 2][v][2 + r] = fma_halves(nibbles(k ? w >> 8 : w >> 4, mask, bias), scale, offset);
                }
            // Two sub-blocks are 64 columns.
            constexpr int PAIRS_OF_STAGE = Units::STAGE_COLS / 64;
            if (k == 0 && pair % PAIRS_OF_STAGE == 0) unit = units.wait();
            uint64_t b = operand_descriptor(unit, F16_UNIT_BYTES) +
                         pair % PAIRS_OF_STAGE * (Units::UNIT_BYTES >> 4) + 4 * k;
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            if (s == 0)
                WgmmaFromRegisters<TOKENS>::template run<0>(X, a[0][0], b);
            else
                WgmmaFromRegisters<TOKENS>::template run<1>(X, a[s % 2][0], b);
            WgmmaFromRegisters<TOKENS>::template run<1>(X, a[s % 2][1], b + 2);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            // The products of the sub-block before have ended: their fragments may be overwritten.
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            units.release();
            if (k == 1 && pair % PAIRS_OF_STAGE == PAIRS_OF_STAGE - 1) units.advance();
        }
    }

    // Computes the values of 256 columns. Calls `take(group, values)` for each group of 8 tokens,
    // with two tokens of row g and of row g + 8. Y and N are computed for 32 tokens at a time, the
    // next ones while values are taken.
    template <int TOKENS, class Units, class Take>
    static __device__ void finish_values(float (&X)[TOKENS / 2], const ColumnTile &columns, Units &units,
                                         Take take) {
        const uint8_t *tile = columns.weights, *sums = columns.sums;
        int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        // Columns are the 16 sums. Sub-block s has sums 2 s and 2 s + 1.
        uint32_t minimums[4], factors[4];
        const uint8_t *corrections = columns.unpacked + g * UNPACKED_ROW + t * 8;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint2 both =
                *reinterpret_cast<const uint2 *>(corrections + i / 2 * 32 + i % 2 * 8 * UNPACKED_ROW);
            minimums[i] = both.x, factors[i] = both.y;
        }
        float d[2], dmin[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            uint32_t bits = *reinterpret_cast<const uint32_t *>(tile + SCALE_HEADERS + (g + 8 * r) * 16);
            d[r] = half_to_float(bits & 0xFFFF), dmin[r] = half_to_float(bits >> 16);
        }
        constexpr int SLICE = TOKENS < 32 ? TOKENS : 32, SLICES = TOKENS / SLICE;
        // Blocks of up to 64 tokens have fewer registers, and other warps that hide the latency.
        // With 160 tokens, a second buffer does not fit the registers.
        constexpr int BUFFERS = TOKENS > 64 && TOKENS <= 128 ? 2 : 1;
        float Y[BUFFERS][SLICE / 2], N[BUFFERS][SLICE / 2];
        auto multiply_sums = [&](int slice) {
            uint64_t b = sums_descriptor(sums + slice * (SLICE / ACT_TILE_TOKENS) * F16_SUMS_BYTES);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            WgmmaFromRegisters<SLICE>::template run<0>(Y[slice % BUFFERS], factors, b);
            WgmmaFromRegisters<SLICE>::template run<0>(N[slice % BUFFERS], minimums, b);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        };
        multiply_sums(0);
#pragma unroll
        for (int slice = 0; slice < SLICES; slice++) {
            if (BUFFERS == 1 && slice > 0) multiply_sums(slice);
            if (BUFFERS == 2 && slice + 1 < SLICES) {
                multiply_sums(slice + 1);
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            } else {
                asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            }
            if (slice == 0) {
                pin_registers(X);
                units.release();
            }
            float(&Y_slice)[SLICE / 2] = Y[slice % BUFFERS], (&N_slice)[SLICE / 2] = N[slice % BUFFERS];
            pin_registers(Y_slice);
            pin_registers(N_slice);
#pragma unroll
            for (int group = 0; group < SLICE / ACT_TILE_TOKENS; group++) {
                int j = slice * (SLICE / ACT_TILE_TOKENS) + group;
                float2 da =
                    *reinterpret_cast<const float2 *>(sums + j * F16_SUMS_BYTES + F16_SUMS_SCALES + t * 8);
                float values[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float a = i % 2 ? da.y : da.x;
                    float P = fmaf(8.0f, Y_slice[4 * group + i], X[4 * j + i]);
                    values[i] = __fsub_rn(__fmul_rn(__fmul_rn(a, d[i / 2]), P),
                                          __fmul_rn(__fmul_rn(a, dmin[i / 2]), N_slice[4 * group + i]));
                }
                take(j, values);
            }
        }
    }
};

}  // namespace wgmma_product

#endif
