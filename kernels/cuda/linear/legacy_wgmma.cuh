// SPDX-License-Identifier: Apache-2.0

// Values of 256 columns of Q8_0, Q4_0 and Q5_0 weights for wgmma_product.cuh. For each block of 32
// columns, one step gives the exact integer product. Then, in ascending order of blocks as in
// legacy.cuh:
//
//   value = fmaf(product, d * da, value)
//
// While one warpgroup takes products into values, the other one may multiply. Nothing orders them.
//
// Limit: instructions. Per block of 32 columns, a warp issues three for each of its 64 values, and
// reads 16 scales; the tensor cores need 64 clocks. Measured on an H200 with Q8_0 for 512 tokens:
// 327 to 351 TOPS, in a version with the same copies (matmul.cuh: 241 to 260). Q4_0 and Q5_0 were
// not measured.
//
// Tried, with the same bits: f16 integers, as for Q4_K (4% slower at 128 tokens, 20% at 64), and
// products of one half of the tokens while those of the other half become values (within 2%).

#pragma once

#include "legacy.cuh"
#include "wgmma_product.cuh"

#if HAS_WGMMA

namespace wgmma_product {

template <class Quant>
struct LegacyProducts {
    static_assert(Quant::SIGNED);
    using Sum = float;
    static constexpr bool HAS_SUMS = false;
    static constexpr ActivationFormat ACTIVATION = Quant::ACTIVATION;
    static constexpr int TILE_BYTES = Quant::TILE_BYTES;

    template <int TOKENS, class Units>
    static __device__ void multiply_columns(float (&values)[TOKENS / 2], const ColumnTile &columns,
                                            Units &units) {
        constexpr int GROUPS = TOKENS / ACT_TILE_TOKENS;
        int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        int products[TOKENS / 2];
        // Fragments of two pairs of blocks.
        uint32_t a[2][2][4];
        Quant::load_fragments(columns.weights, 0, a[0]);
        const uint8_t *unit = units.wait();
        auto begin = [&](int block) {
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            WgmmaIntegers<TOKENS, true>::template run<0>(products, a[block / 2 % 2][block % 2],
                                                         eight_bit_operand(unit, block));
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        };
        begin(0);
#pragma unroll
        for (int block = 0; block < Quant::BLOCKS; block++) {
            int next = block + 1;
            if (next < Quant::BLOCKS && next % 2 == 0)
                Quant::load_fragments(columns.weights, next, a[next / 2 % 2]);
            float d[2];
#pragma unroll
            for (int r = 0; r < 2; r++) d[r] = Quant::scale(columns.weights, g + 8 * r, block);
            auto load_scales = [&](int group) {
                return reinterpret_cast<const float2 *>(units.scales(group) + block * ACT_TILE_TOKENS)[t];
            };
            // These are loaded while the products are computed. More registers are not free.
            constexpr int EARLY = GROUPS < 4 ? GROUPS : 4;
            float2 early[EARLY];
#pragma unroll
            for (int group = 0; group < EARLY; group++) early[group] = load_scales(group);
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            pin_registers(products);
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                float2 da = group < EARLY ? early[group % EARLY] : load_scales(group);
#pragma unroll
                for (int element = 0; element < 4; element++) {
                    float scale = d[element / 2] * (element % 2 ? da.y : da.x);
                    float &value = values[4 * group + element];
                    value =
                        fmaf(__int2float_rn(products[4 * group + element]), scale, block == 0 ? 0.0f : value);
                }
            }
            if (next < Quant::BLOCKS) begin(next);
        }
    }

    template <int TOKENS, class Units, class Take>
    static __device__ void finish_values(float (&values)[TOKENS / 2], const ColumnTile &, Units &units,
                                         Take take) {
        units.advance();
        units.release();
#pragma unroll
        for (int group = 0; group < TOKENS / ACT_TILE_TOKENS; group++) {
            float four[4];
#pragma unroll
            for (int i = 0; i < 4; i++) four[i] = values[4 * group + i];
            take(group, four);
        }
    }
};

}  // namespace wgmma_product

#endif
