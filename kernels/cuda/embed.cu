// SPDX-License-Identifier: Apache-2.0

// out[i] = table[tokens[i]] as f32: rows of the embedding table. An entry DRAWN_TOKEN | n of
// `tokens` stands for drawn[n], which argmax.cu or shortlist.cu wrote in the step before.
//
//   quantized types: table in tiles of 16 rows by 256 values, grid (tiles of a row, tokens)
//     planes of the row's tile -> block bytes in shared memory -> a thread decodes one value
//   float types: table in rows, same grid, a thread per value
//
// `decode` has the operations of crates/quant in the same order, so host and GPU get the same bits.
// Limit: latency; a row is a few KB.

#include <cuda_bf16.h>

#include "abi/elementwise.cuh"
#include "linear/planes.cuh"
#include "stream_order.cuh"

namespace {

constexpr int ROW_BYTES_MAX = 8 * 34;

// ggml's type ids.
enum Type {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    BF16 = 30
};

__device__ float half_at(const uint8_t *p) { return half_to_float(p[0] | p[1] << 8); }

// Scale and minimum of sub-block s of Q4_K and Q5_K.
__device__ void scale_min(const uint8_t *packed, int s, int &scale, int &min) {
    if (s < 4) {
        scale = packed[s] & 63, min = packed[s + 4] & 63;
    } else {
        scale = (packed[s + 4] & 15) | packed[s - 4] >> 6 << 4,
        min = packed[s + 4] >> 4 | packed[s] >> 6 << 4;
    }
}

__device__ float affine(float d, int scale, int q, float dmin, int min) {
    return __fsub_rn(__fmul_rn(__fmul_rn(d, float(scale)), float(q)), __fmul_rn(dmin, float(min)));
}

__device__ float scaled(float d, int scale, int q) { return __fmul_rn(__fmul_rn(d, float(scale)), float(q)); }

// Value `e` of the block `b`.
__device__ float decode(int type, const uint8_t *b, int e) {
    int nibble = e < 16 ? 0 : 4;
    switch (type) {
        case Q8_0: return __fmul_rn(float(int8_t(b[2 + e])), half_at(b));
        case Q4_0: return __fmul_rn(float((b[2 + e % 16] >> nibble & 15) - 8), half_at(b));
        case Q4_1:
            return __fadd_rn(__fmul_rn(float(b[4 + e % 16] >> nibble & 15), half_at(b)), half_at(b + 2));
        case Q5_0:
            return __fmul_rn(float(((b[6 + e % 16] >> nibble & 15) | (b[2 + e / 8] >> e % 8 & 1) << 4) - 16),
                             half_at(b));
        case Q5_1:
            return __fadd_rn(
                __fmul_rn(float((b[8 + e % 16] >> nibble & 15) | (b[4 + e / 8] >> e % 8 & 1) << 4),
                          half_at(b)),
                half_at(b + 2));
        default: break;
    }
    int h = e / 128, j = e % 128 / 32, l = e % 32;
    switch (type) {
        case Q2_K:
            return affine(half_at(b + 80), b[e / 16] & 15, b[16 + 32 * h + l] >> 2 * j & 3, half_at(b + 82),
                          b[e / 16] >> 4);
        case Q3_K: {
            int s = e / 16, low = s < 8 ? b[96 + s] & 15 : b[96 + s - 8] >> 4;
            int scale = (low | (b[104 + s % 4] >> 2 * (s / 4) & 3) << 4) - 32;
            return scaled(half_at(b + 108), scale,
                          ((b[32 + 32 * h + l] >> 2 * j & 3) | (b[l] >> (4 * h + j) & 1) << 2) - 4);
        }
        case Q4_K:
        case Q5_K: {
            int s = e / 32, scale, min;
            scale_min(b + 4, s, scale, min);
            int q = b[(type == Q4_K ? 16 : 48) + s / 2 * 32 + l] >> 4 * (s % 2) & 15;
            if (type == Q5_K) q |= (b[16 + l] >> s & 1) << 4;
            return affine(half_at(b), scale, q, half_at(b + 2), min);
        }
        default: {
            int q = ((b[64 * h + 32 * (j % 2) + l] >> 4 * (j / 2) & 15) | (b[128 + 32 * h + l] >> 2 * j & 3)
                                                                              << 4) -
                    32;
            return scaled(half_at(b + 208), int8_t(b[192 + e / 16]), q);
        }
    }
}

// The host knows how many tokens were drawn.
__device__ uint32_t token_of(uint32_t entry, const uint32_t *drawn) {
    return entry & DRAWN_TOKEN ? drawn[entry & ~DRAWN_TOKEN] : entry;
}

}  // namespace

// Grid: (tiles of a row, tokens). The output row of a token beyond the table is not written.
extern "C" __global__ void __launch_bounds__(TILE_COLS)
    embed_quantized(const __grid_constant__ TilePlanes planes, int type, const uint8_t *tiles,
                    const uint32_t *tokens, const uint32_t *drawn, float *out, int cols, int rows) {
    __shared__ __align__(16) uint8_t raw[ROW_BYTES_MAX];
    launch_next_kernel();
    // A thread copies two bytes of the row, which has some in each plane.
    static_assert(ROW_BYTES_MAX <= 2 * TILE_COLS);
    auto row_bytes = [&](int plane) { return planes.len[plane] * planes.blocks[plane]; };
    int plane = 0, in_plane = 2 * threadIdx.x;
    for (; plane < planes.planes && in_plane >= row_bytes(plane); plane++) in_plane -= row_bytes(plane);
    wait_for_previous_kernel();
    uint32_t token = token_of(tokens[blockIdx.y], drawn);
    if (token >= static_cast<uint32_t>(rows)) return;
    int row = token % TILE_ROWS;
    const uint8_t *tile =
        tiles + (static_cast<size_t>(token / TILE_ROWS) * gridDim.x + blockIdx.x) * planes.tile_bytes;
    if (plane < planes.planes) {
        int at = planes.base[plane] + row * row_bytes(plane) + in_plane;
        const uint16_t two_bytes = *reinterpret_cast<const uint16_t *>(tile + at);
        BlockByte source = find_block_byte(planes, at);
        *reinterpret_cast<uint16_t *>(raw + source.block * planes.block_bytes + source.byte) = two_bytes;
    }
    __syncthreads();
    int col = blockIdx.x * TILE_COLS + threadIdx.x;
    if (col >= cols) return;
    int block_len = TILE_COLS / planes.blocks[0];
    const uint8_t *block = raw + threadIdx.x / block_len * planes.block_bytes;
    out[static_cast<size_t>(blockIdx.y) * cols + col] = decode(type, block, threadIdx.x % block_len);
}
CHECK_SIGNATURE(embed_quantized, EmbedQuantized);

// The same for tables of F32, F16 and BF16.
extern "C" __global__ void __launch_bounds__(TILE_COLS)
    embed_float(int type, const uint8_t *table, const uint32_t *tokens, const uint32_t *drawn, float *out,
                int cols, int rows) {
    launch_next_kernel();
    wait_for_previous_kernel();
    uint32_t token = token_of(tokens[blockIdx.y], drawn);
    int col = blockIdx.x * TILE_COLS + threadIdx.x;
    if (token >= static_cast<uint32_t>(rows) || col >= cols) return;
    size_t at = static_cast<size_t>(token) * cols + col;
    float value = type == F32   ? reinterpret_cast<const float *>(table)[at]
                  : type == F16 ? __half2float(reinterpret_cast<const __half *>(table)[at])
                                : __bfloat162float(reinterpret_cast<const __nv_bfloat16 *>(table)[at]);
    out[static_cast<size_t>(blockIdx.y) * cols + col] = value;
}
CHECK_SIGNATURE(embed_float, EmbedFloat);
