// SPDX-License-Identifier: Apache-2.0

// Values of 256 columns of Q6_K weights for wgmma_product.cuh. A weight times its sub-scale has up
// to 13 bits, too many for an exact f16. So its two bytes are 8-bit operands:
//
//   w = (q - 32) sub-scale = 256 high + low      -4,064 to 4,096; high signed, low unsigned
//   P = 256 sum (high a) + sum (low a)           32-bit integers; at most 133 million
//   value = (da d) P                             the order of kquants.cuh
//
// The products of all high bytes are summed first, then multiplied by 256, and the products of the
// low bytes are added to them. So one set of sums is live:
//
//   registers      | expand | expand | ... | x 256 |                  | values
//   tensor cores            | high 0 | ... | 7     | low 0 | ... | 7  |
//
// Limit: instructions. Per 256 columns, a warp issues some 450 to expand weights and 380 for its 64
// values; the tensor cores of a multiprocessor need 2,048 clocks for both warpgroups. Measured on
// an H200 for 512 tokens: 407 to 468 TOPS (matmul.cuh: 196 to 210).

#pragma once

#include "kquants.cuh"
#include "wgmma_product.cuh"

#if HAS_WGMMA

namespace wgmma_product {

struct Q6KProducts {
    using Sum = int;
    using Layout = Q6_K_Layout;
    static constexpr bool HAS_SUMS = false;
    static constexpr ActivationFormat ACTIVATION = Q6_K::ACTIVATION;
    static constexpr int TILE_BYTES = Q6_K::TILE_BYTES;
    // Blocks of 32 columns: two sub-blocks.
    static constexpr int BLOCKS = 8;

    // Bytes of four weights of one sub-block. Two products and their offsets fit one 32-bit
    // multiplication: (q - 32) scale + 2^15 is positive and below 2^16.
    static __device__ void multiply_by_scale(uint32_t q, int scale, uint32_t &high, uint32_t &low) {
        uint32_t offsets = uint32_t(scale) * uint32_t(-0x00200020) + 0x80008000;
        uint32_t even = __byte_perm(q, 0, 0x4240) * uint32_t(scale) + offsets;
        uint32_t odd = __byte_perm(q, 0, 0x4341) * uint32_t(scale) + offsets;
        low = __byte_perm(even, odd, 0x6240);
        // Flipping the top bit takes 2^15 back.
        high = __byte_perm(even, odd, 0x7351) ^ 0x80808080;
    }

    // Four quants of run j (kquants.cuh), 0 to 63, one byte each.
    static __device__ uint32_t quants(uint32_t low, uint32_t high, int j) {
        uint32_t nibbles = (j < 2 ? low : low >> 4) & 0x0F0F0F0F;
        return nibbles | ((j < 2 ? high << (4 - 2 * j) : high >> (2 * j - 4)) & 0x30303030);
    }

    // 256 times the high sums plus the low sums. Products are still in flight at the end.
    template <int TOKENS, class Units>
    static __device__ void multiply_columns(int (&P)[TOKENS / 2], const ColumnTile &columns, Units &units) {
        int lane = threadIdx.x % 32, g = lane / 4;
        const uint8_t *tile = columns.weights;
        const int8_t *scales = reinterpret_cast<const int8_t *>(tile + Layout::SUB_SCALES) + g * 16;
        uint32_t words[3][4], high[2][4], low[BLOCKS][4];
        const uint8_t *unit = nullptr;
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
            int half = block / 4, run = block % 4;
            if (run == 0)
#pragma unroll
                for (int i = 0; i < 3; i++)
                    load_matrices(words[i], tile + Layout::word_offset(lane % 16, half, lane / 16, i));
#pragma unroll
            for (int i = 0; i < 4; i++)
                multiply_by_scale(quants(words[run % 2][i], words[2][i], run),
                                  scales[i % 2 * 8 * 16 + 2 * block + i / 2], high[block % 2][i],
                                  low[block][i]);
            if (block == 0) unit = units.wait();
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            if (block == 0)
                WgmmaIntegers<TOKENS, true>::template run<0>(P, high[0], eight_bit_operand(unit, 0));
            else
                WgmmaIntegers<TOKENS, true>::template run<1>(P, high[block % 2],
                                                             eight_bit_operand(unit, block));
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            // The fragments of the block before may be overwritten.
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        pin_registers(P);
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) P[i] *= 256;
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int block = 0; block < BLOCKS; block++)
            WgmmaIntegers<TOKENS, false>::template run<1>(P, low[block], eight_bit_operand(unit, block));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    }

    template <int TOKENS, class Units, class Take>
    static __device__ void finish_values(int (&P)[TOKENS / 2], const ColumnTile &columns, Units &units,
                                         Take take) {
        int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const uint16_t *scales = reinterpret_cast<const uint16_t *>(columns.weights + Layout::SCALES) + g;
        float d[2] = {half_to_float(scales[0]), half_to_float(scales[8])};
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        pin_registers(P);
#pragma unroll
        for (int group = 0; group < TOKENS / ACT_TILE_TOKENS; group++) {
            float2 da = reinterpret_cast<const float2 *>(units.scales(group))[t];
            float values[4];
#pragma unroll
            for (int i = 0; i < 4; i++) values[i] = scaled(i % 2 ? da.y : da.x, d[i / 2], P[4 * group + i]);
            take(group, values);
        }
        units.advance();
        units.release();
    }
};

}  // namespace wgmma_product

#endif
