// SPDX-License-Identifier: Apache-2.0

// Values of 256 columns of Q4_K and Q5_K weights for wgmma_product.cuh. A quant times its sub-scale
// has up to 11 bits, too many for an 8-bit operand. So the sub-scale is divided:
//
//   scale = 8 high + low                    both 0 to 7; a quant times either is at most 217
//   P = 8 sum (q high a) + sum (q low a)    32-bit integers; at most 64 million
//   N = sum minimum * (sum of 16 a)         one step of f16 integers; sums are at most 2,032
//   value = (da d) P - (da dmin) N          the order of kquants.cuh
//
// Four quants in a register times a part of their scale are one 32-bit multiplication. The products
// with high parts are summed first, then multiplied by 8, and those with low parts are added to
// them. So one set of sums is live:
//
//   registers      | quants | x high | ... | x 8 | x low | ...              | values
//   tensor cores            | high 0, 1    | ... | 6, 7  | low 0, 1 | ... | N |
//
// Limit: instructions. Per 256 columns and 64 tokens, a warp issues some 640, of which 250 make
// operands and multiply, and seven belong to each of its 32 values.

#pragma once

#include "kquants.cuh"
#include "wgmma_product.cuh"

#if HAS_WGMMA

namespace wgmma_product {

// Byte `i` of `word` as two equal halves: 0x6400 is 1,024, whose last place is 1.
__device__ __forceinline__ uint32_t byte_to_halves(uint32_t word, int i) {
    uint32_t halves, biased = __byte_perm(word, 0x64646464, 0x4040 | i | i << 8);
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(biased), "r"(0x64006400));
    return halves;
}

// Rows of 16 bytes without a swizzle: the sums of 8 tokens, as two matrices of 8 by 8.
__device__ __forceinline__ uint64_t sums_descriptor(const uint8_t *sums) {
    return (shared_address(sums) & 0x3FFFF) >> 4 | uint64_t(128 >> 4) << 16 |
           uint64_t(F16_SUMS_BYTES >> 4) << 32;
}

template <int BITS>
struct AffineKProducts {
    using Quant = AffineKQuant<BITS>;
    using Sum = int;
    static constexpr bool HAS_SUMS = true;
    static constexpr ActivationFormat ACTIVATION = Quant::ACTIVATION;
    static constexpr int TILE_BYTES = Quant::TILE_BYTES;
    // Sub-blocks of 32 columns. Two share a plane of nibbles.
    static constexpr int BLOCKS = 8, PAIRS = BLOCKS / 2;

    // 8 times the sums of high parts plus those of low parts. Products are still in flight at the
    // end.
    template <int TOKENS, class Units>
    static __device__ void multiply_columns(int (&P)[TOKENS / 2], const ColumnTile &columns, Units &units) {
        int lane = threadIdx.x % 32;
        const uint8_t *tile = columns.weights;
        // High and low parts of the scales of rows g and g + 8, a byte for each sub-block.
        uint32_t parts[2][2][2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            auto header = Quant::header(tile, lane / 4 + 8 * r);
#pragma unroll
            for (int word = 0; word < 2; word++) {
                parts[0][r][word] = header.scales[word] >> 3 & 0x07070707;
                parts[1][r][word] = header.scales[word] & 0x07070707;
            }
        }
        uint32_t high_bits[4] = {};
        if constexpr (BITS == 5)
            load_matrices(high_bits, tile + Quant::HIGH_BITS + plane_offset<32>(lane % 16, lane / 16));
        // Fragments: rows g and g + 8 of the first 16 columns of a sub-block, then of the others.
        uint32_t quants[BLOCKS][4], a[2][2][4];
        auto multiply_by_scales = [&](int pair, int part) {
#pragma unroll
            for (int k = 0; k < 2; k++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int block = 2 * pair + k;
                    uint32_t scale = __byte_perm(parts[part][i % 2][block / 4], 0, 0x4440 | block % 4);
                    a[pair % 2][k][i] = quants[block][i] * scale;
                }
        };
        const uint8_t *unit = nullptr;
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            uint32_t nibbles[4];
            load_matrices(nibbles, tile + plane_offset<128>(lane % 16, 2 * pair + lane / 16));
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int k = 0; k < 2; k++)
                    quants[2 * pair + k][i] = Quant::expand(nibbles[i], high_bits[i], 2 * pair + k);
            multiply_by_scales(pair, 0);
            if (pair == 0) unit = units.wait();
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            if (pair == 0)
                WgmmaIntegers<TOKENS, false>::template run<0>(P, a[0][0], eight_bit_operand(unit, 0));
            else
                WgmmaIntegers<TOKENS, false>::template run<1>(P, a[pair % 2][0],
                                                              eight_bit_operand(unit, 2 * pair));
            WgmmaIntegers<TOKENS, false>::template run<1>(P, a[pair % 2][1],
                                                          eight_bit_operand(unit, 2 * pair + 1));
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            // The fragments of the pair before may be overwritten.
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        }
        multiply_by_scales(0, 1);
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        pin_registers(P);
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) P[i] *= 8;
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            if (pair > 0) multiply_by_scales(pair, 1);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int k = 0; k < 2; k++)
                WgmmaIntegers<TOKENS, false>::template run<1>(P, a[pair % 2][k],
                                                              eight_bit_operand(unit, 2 * pair + k));
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            if (pair + 1 < PAIRS) asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        }
    }

    // Computes the values of 256 columns. Calls `take(group, values)` for each group of 8 tokens,
    // with two tokens of row g and of row g + 8. N is computed for 32 tokens at a time, the next
    // ones while values are taken.
    template <int TOKENS, class Units, class Take>
    static __device__ void finish_values(int (&P)[TOKENS / 2], const ColumnTile &columns, Units &units,
                                         Take take) {
        const uint8_t *sums = columns.sums;
        int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        // Columns are the 16 sums. Sub-block s has sums 2 s and 2 s + 1.
        uint32_t minimums[4];
        float d[2], dmin[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            auto header = Quant::header(columns.weights, g + 8 * r);
            d[r] = header.d, dmin[r] = header.dmin;
            minimums[r] = byte_to_halves(header.minimums[0], t);
            minimums[2 + r] = byte_to_halves(header.minimums[1], t);
        }
        constexpr int SLICE = TOKENS < 32 ? TOKENS : 32, SLICES = TOKENS / SLICE;
        // With 160 tokens, a second buffer does not fit the registers.
        constexpr int BUFFERS = TOKENS > 32 && TOKENS <= 128 ? 2 : 1;
        float N[BUFFERS][SLICE / 2];
        auto multiply_sums = [&](int slice) {
            uint64_t b = sums_descriptor(sums + slice * (SLICE / ACT_TILE_TOKENS) * F16_SUMS_BYTES);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
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
                pin_registers(P);
                units.advance();
                units.release();
            }
            float(&N_slice)[SLICE / 2] = N[slice % BUFFERS];
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
                    values[i] = __fsub_rn(__fmul_rn(__fmul_rn(a, d[i / 2]), __int2float_rn(P[4 * j + i])),
                                          __fmul_rn(__fmul_rn(a, dmin[i / 2]), N_slice[4 * group + i]));
                }
                take(j, values);
            }
        }
    }
};

using Q4KProducts = AffineKProducts<4>;
using Q5KProducts = AffineKProducts<5>;

}  // namespace wgmma_product

#endif
