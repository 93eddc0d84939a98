// SPDX-License-Identifier: Apache-2.0

// Offsets in a weight tile (quant::layout: 16 rows by 256 values, planes of 16-byte vectors) and in
// an activation tile (quantize.cu: 8 tokens by 256 values). Vectors are swizzled, so that the eight
// rows that ldmatrix reads fall into different banks.

#pragma once

#include <cstdint>
#include <cuda_fp16.h>

#include "abi/tiles.cuh"

// Offset of 16-byte vector `p` of `row` in a plane that has BYTES per row.
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

// What weights of a type are multiplied with: Q8_0, quants of 8 bits with a scale per 32 values;
// Q8_1, the same with a scaled sum beside it; Q8_K, a scale per 256 values with sums per 16; F16
// and BF16, values rounded to the weights' type.
enum class ActivationFormat { Q8_0, Q8_1, Q8_K, F16, BF16 };

// An activation tile:
//
//   quants     [2 units of 128 columns][8 tokens][128 bytes]; vector p of token n is at place
//              p ^ n, as wgmma and ldmatrix read it
//     Q8_0     then scales f32[8 blocks][8 tokens]
//     Q8_1     the same, then scaled sums f32[8 blocks][8 tokens]
//     Q8_K     then scales f32[8 tokens], sums i16[8 tokens][16]
//
//   F16, BF16  [4 units of 64 columns][8 tokens][128 bytes], with the same order of vectors
//
// F16 sums: the sums of Q8_K as f16 integers, for products on wgmma. They are written beside the
// activation tiles.
//
//   [column tile][groups of 8 tokens][288 bytes]: sums 0 to 7 of 8 tokens, then sums 8 to 15, 16
//   bytes per token; then scales f32[8 tokens]
constexpr int ACT_TILE_QUANT_BYTES = ACT_TILE_TOKENS * TILE_COLS, ACT_UNIT_BYTES = ACT_TILE_TOKENS * 128;
__host__ __device__ constexpr int act_tile_bytes(ActivationFormat format) {
    return format == ActivationFormat::Q8_0   ? ACT_TILE_QUANT_BYTES + 256
           : format == ActivationFormat::Q8_1 ? ACT_TILE_QUANT_BYTES + 512
           : format == ActivationFormat::Q8_K ? ACT_TILE_QUANT_BYTES + 32 + 256
                                              : ACT_TILE_QUANT_BYTES * 2;
}

// Offset of vector `p` of a token in an activation tile.
__device__ inline int act_tile_offset(int token, int p) {
    return p / 8 * ACT_UNIT_BYTES + token * 128 + ((p % 8 ^ token) * 16);
}

// An activation row: one token's part of an activation tile, as matvec.cuh keeps it in shared
// memory.
//
//   | quants, 256 bytes | scales: f32[8], or one and padding | sums: none, f32[8] or i16[16] |
constexpr int ACT_ROW_SCALES = TILE_COLS;
__host__ __device__ constexpr int act_row_sums(ActivationFormat scaling) {
    return ACT_ROW_SCALES + (scaling == ActivationFormat::Q8_K ? 16 : 32);
}
__host__ __device__ constexpr int act_row_bytes(ActivationFormat scaling) {
    return act_row_sums(scaling) + (scaling == ActivationFormat::Q8_0 ? 0 : 32);
}
