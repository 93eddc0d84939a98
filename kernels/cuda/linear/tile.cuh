// SPDX-License-Identifier: Apache-2.0

// Offsets in a weight tile (quant::layout: 16 rows by 256 values, planes of 16-byte vectors) and in
// an activation tile (8 tokens by 256 values, quantize.cu). Vectors are swizzled, so that the eight
// rows that ldmatrix reads fall into different banks.

#pragma once

#include <cstdint>
#include <cuda_fp16.h>

#include "abi/tiles.cuh"

// Offset of a plane_offset of 16 bytes of `row` in a plane that has BYTES per row.
template <int BYTES>
__device__ inline int plane_offset(int row, int p) {
    constexpr int pieces = BYTES / 16;
    constexpr int group = pieces >= 8 ? 1 : 8 / pieces;
    constexpr int turns = pieces < 8 ? pieces : 8;
    return row * BYTES + ((p ^ (row / group % turns)) * 16);
}

__device__ inline uint4 load16(const uint8_t *p) { return *reinterpret_cast<const uint4 *>(p); }

__device__ inline float half_to_float(uint32_t bits) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

// What weights of a type are multiplied with: quants of 8 bits with a scale per 32 values, the same
// with a scaled sum beside it, a scale per 256 values with sums per 16; or values as sums of 16-bit
// floats, for weights that are such floats.
enum class ActivationFormat { Q8_0, Q8_1, Q8_K, F16X2, BF16X3 };

// How many 16-bit floats a value is the sum of: 22 bits in two f16 (scaled by a power of two per
// 256 values), 24 in three bf16.
__host__ __device__ constexpr int parts_of(ActivationFormat scaling) {
    return scaling == ActivationFormat::F16X2 ? 2 : scaling == ActivationFormat::BF16X3 ? 3 : 0;
}

// A act_tile: quants of 8 tokens (256 bytes each, plane_offset p of token n at row_tile p ^ n),
// then Q8_0:      scale f32[8 blocks][8 tokens] Q8_1: the same, and the scaled sums f32[8 blocks][8
// tokens] Q8_K:     scale f32[8 tokens], sums i16[8 tokens][16] *_PARTS: first parts of all values,
// 512 bytes a token, pieces in the same places; then the second parts, and the third; F16X2: then
// what each token's sums are multiplied with, f32[8 tokens]
constexpr int ACT_TILE_QUANT_BYTES = ACT_TILE_TOKENS * TILE_COLS;
constexpr int ACT_TILE_PART_BYTES = ACT_TILE_QUANT_BYTES * 2;
__host__ __device__ constexpr int act_tile_bytes(ActivationFormat scaling) {
    if (parts_of(scaling) > 0)
        return parts_of(scaling) * ACT_TILE_PART_BYTES +
               (scaling == ActivationFormat::F16X2 ? ACT_TILE_TOKENS * 4 : 0);
    return ACT_TILE_QUANT_BYTES + (scaling == ActivationFormat::Q8_0   ? 256
                                   : scaling == ActivationFormat::Q8_1 ? 512
                                                                       : 32 + 256);
}

// A plane_offset of a act_tile's quants.
__device__ inline int act_tile_offset(int token, int p) { return token * TILE_COLS + ((p ^ token) * 16); }

__device__ inline int act16_tile_offset(int token, int p) {
    return token * TILE_COLS * 2 + ((p ^ token) * 16);
}

// One token's part of a act_tile, as matvec.cuh keeps it in shared memory: quants, then scales
// (f32[8], or one), then sums (f32[8], or i16[16]).
constexpr int ACT_ROW_SCALES = TILE_COLS;
__host__ __device__ constexpr int act_row_sums(ActivationFormat scaling) {
    return ACT_ROW_SCALES + (scaling == ActivationFormat::Q8_K ? 16 : 32);
}
__host__ __device__ constexpr int act_row_bytes(ActivationFormat scaling) {
    return act_row_sums(scaling) + (scaling == ActivationFormat::Q8_0 ? 0 : 32);
}
