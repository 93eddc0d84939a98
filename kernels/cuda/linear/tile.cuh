// Places in a weight tile (quant::layout: 16 rows by 256 values, planes of 16-byte pieces) and in a panel of quantised
// activations (8 tokens by 256 values, quantize.cu).

#pragma once

#include <cstdint>
#include <cuda_fp16.h>

constexpr int TILE_ROWS = 16;
constexpr int TILE_COLS = 256;
constexpr int PANEL_TOKENS = 8;

// Offset of a piece of 16 bytes of `row` in a plane that has BYTES per row.
template <int BYTES>
__device__ inline int piece(int row, int p) {
    constexpr int pieces = BYTES / 16;
    constexpr int group = pieces >= 8 ? 1 : 8 / pieces;
    constexpr int turns = pieces < 8 ? pieces : 8;
    return row * BYTES + ((p ^ (row / group % turns)) * 16);
}

__device__ inline uint4 load16(const uint8_t *p) { return *reinterpret_cast<const uint4 *>(p); }

__device__ inline float half_to_float(uint32_t bits) { return __half2float(__ushort_as_half(static_cast<unsigned short>(bits))); }

// What weights of a type are multiplied with: quants of 8 bits with a scale per 32 values, the same with a scaled sum
// beside it, a scale per 256 values with sums per 16; or values as sums of 16-bit floats, for weights that are such floats.
enum class Scaling { PER_32, PER_32_SUMS, PER_256, F16_PARTS, BF16_PARTS };

// How many 16-bit floats a value is the sum of: 22 bits in two f16 (scaled by a power of two per 256 values), 24 in three bf16.
__host__ __device__ constexpr int parts_of(Scaling scaling) { return scaling == Scaling::F16_PARTS ? 2 : scaling == Scaling::BF16_PARTS ? 3 : 0; }

// A panel: quants of 8 tokens (256 bytes each, piece p of token n at place p ^ n), then
//   PER_32:      scale f32[8 blocks][8 tokens]
//   PER_32_SUMS: the same, and the scaled sums f32[8 blocks][8 tokens]
//   PER_256:     scale f32[8 tokens], sums i16[8 tokens][16]
// *_PARTS: first parts of all values, 512 bytes a token, pieces in the same places; then the second parts, and the third;
//   F16_PARTS: then what each token's sums are multiplied with, f32[8 tokens]
constexpr int PANEL_QUANTS = PANEL_TOKENS * TILE_COLS;
constexpr int PANEL_PART = PANEL_QUANTS * 2;
__host__ __device__ constexpr int panel_bytes(Scaling scaling) {
    if (parts_of(scaling) > 0) return parts_of(scaling) * PANEL_PART + (scaling == Scaling::F16_PARTS ? PANEL_TOKENS * 4 : 0);
    return PANEL_QUANTS + (scaling == Scaling::PER_32 ? 256 : scaling == Scaling::PER_32_SUMS ? 512 : 32 + 256);
}

// A piece of a panel's quants.
__device__ inline int panel_piece(int token, int p) { return token * TILE_COLS + ((p ^ token) * 16); }

__device__ inline int half_panel_piece(int token, int p) { return token * TILE_COLS * 2 + ((p ^ token) * 16); }

// One token's part of a panel, as matvec.cuh keeps it in shared memory: quants, then scales (f32[8], or one), then sums
// (f32[8], or i16[16]).
constexpr int RECORD_SCALES = TILE_COLS;
__host__ __device__ constexpr int record_sums(Scaling scaling) { return RECORD_SCALES + (scaling == Scaling::PER_256 ? 16 : 32); }
__host__ __device__ constexpr int record_bytes(Scaling scaling) { return record_sums(scaling) + (scaling == Scaling::PER_32 ? 0 : 32); }
