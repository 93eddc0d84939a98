// SPDX-License-Identifier: Apache-2.0

// F16 and BF16 weights: rows as in the file; activations as sums of two or three floats of the same
// type (tile.cuh); sums in f32 on the tensor cores. With activations rounded to one part, the
// product would lose more precision than the weights have.
//
//   value of 256 columns = (last part's sum + previous part's sum) + ...      smallest parts first
//   a part's sum         = one chain of m16n8k16 steps from zero, columns ascending by 16
//
// The chain is the same at one token as at many. Rows are multiples of 16 long. In shared memory
// there are 16 bytes between them, which spreads them over the banks.

#pragma once

#include "async_copy.cuh"
#include "mma.cuh"
#include "tile.cuh"

template <bool IS_BF16>
struct Float16Format {
    static constexpr ActivationFormat ACTIVATION =
        IS_BF16 ? ActivationFormat::BF16X3 : ActivationFormat::F16X2;
    static constexpr int PARTS = parts_of(ACTIVATION);
    // Bytes of one row and 256 columns.
    static constexpr int TILE_BYTES = TILE_COLS * 2;

    static __device__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        if constexpr (IS_BF16) {
            asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                "{%8, %9}, {%0, %1, %2, %3};"
                : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
        } else {
            asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
                "%9}, {%0, %1, %2, %3};"
                : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
        }
    }

    // As the other formats' `products`, but only the first `cols` columns exist.
    template <int MT, int NT, class Accumulate>
    static __device__ void products(const uint8_t *tile, int tile_stride, const uint8_t *act_tile,
                                    int act_tile_stride, int cols, Accumulate accumulate) {
        int lane = threadIdx.x % 32;
        const uint8_t *row = tile + (lane % 16) * (tile_stride / TILE_ROWS) + lane / 16 * 16;
        float value[PARTS][MT][NT][4] = {};
#pragma unroll
        for (int pair = 0; pair < TILE_COLS / 32; pair++) {
            if (32 * pair >= cols) break;
            bool both = 32 * pair + 16 < cols;
            uint32_t a[MT][2][4];
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
#pragma unroll
                for (int k = 0; k < 2; k++)
                    load_matrices(a[mt][k], row + mt * tile_stride + (2 * pair + k) * 32);
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                uint32_t b[PARTS][4];
#pragma unroll
                for (int part = 0; part < PARTS; part++)
                    load_matrices(b[part], act_tile + nt * act_tile_stride + part * ACT_TILE_PART_BYTES +
                                               act16_tile_offset(lane % 8, 4 * pair + lane / 8));
#pragma unroll
                for (int mt = 0; mt < MT; mt++) {
#pragma unroll
                    for (int part = 0; part < PARTS; part++)
                        mma(value[part][mt][nt], a[mt][0], b[part][0], b[part][1]);
                    if (!both) continue;
#pragma unroll
                    for (int part = 0; part < PARTS; part++)
                        mma(value[part][mt][nt], a[mt][1], b[part][2], b[part][3]);
                }
            }
        }
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            // The powers of two that take back the scaling of this lane's two tokens.
            float2 scale = {1.0f, 1.0f};
            if constexpr (!IS_BF16)
                scale = reinterpret_cast<const float2 *>(act_tile + nt * act_tile_stride +
                                                         PARTS * ACT_TILE_PART_BYTES)[lane % 4];
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float sum = value[PARTS - 1][mt][nt][i];
#pragma unroll
                    for (int part = PARTS - 2; part >= 0; part--) sum += value[part][mt][nt][i];
                    accumulate(mt, nt, i, sum * (i % 2 ? scale.y : scale.x));
                }
        }
    }
};

using F16 = Float16Format<false>;
using BF16 = Float16Format<true>;
