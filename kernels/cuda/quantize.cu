// SPDX-License-Identifier: Apache-2.0

// Converts activation rows f32 [tokens][cols] to activation tiles of 8 tokens by 256 values
// (linear/tile.cuh). A warp converts 256 values of one token, eight per lane.
//
//   quantize_q8_0, _q8_1  per 32 values: d = largest magnitude / 127, ties away from zero; d and
//                         d * sum are rounded to f16
//   quantize_q8_k         per 256 values: the value of largest magnitude becomes -127, ties to even
//   quantize_f16, _bf16   a value becomes the sum of two f16 or three bf16; each is the nearest to
//                         what is left, ties to even
//
// The rules of q8_* are those of crates/quant, bit for bit. Columns beyond the row become zero;
// tokens beyond the last are left as they are. Limit: bytes, 4 read and about 1.1 written per value
// (4 and 6 for floats); a step's activations are in the L2 cache.

#include <cuda_bf16.h>

#include "abi/elementwise.cuh"
#include "linear/quantize.cuh"
#include "stream_order.cuh"

namespace {

constexpr int WARPS = QUANTIZE_WARPS;

// What a warp converts: 256 columns of a token.
struct TokenTile {
    const float *x;
    ActTileRow row;
    // How many of the 256 columns the row has.
    int valid;
};

__device__ bool find_token_tile(TokenTile &token_tile, const float *x, int tokens, int cols,
                                uint8_t *act_tiles, int act_tile) {
    int col_tiles = (cols + TILE_COLS - 1) / TILE_COLS;
    int at = blockIdx.x * WARPS + threadIdx.x / 32, token = at / col_tiles, col = at % col_tiles;
    if (token >= tokens) return false;
    token_tile.x = x + static_cast<size_t>(token) * cols + col * TILE_COLS;
    token_tile.row = act_tile_row(act_tiles, act_tile, col_tiles, token, col);
    token_tile.valid = min(TILE_COLS, cols - col * TILE_COLS);
    return true;
}

// Loads values 8 l to 8 l + 7 in lane l. Rows are multiples of 16 long, so a lane's eight values
// are all inside the row or all outside.
__device__ void load(float (&v)[8], const TokenTile &token_tile) {
    int first = threadIdx.x % 32 * 8;
    float4 a = {}, b = {};
    if (first < token_tile.valid) {
        a = *reinterpret_cast<const float4 *>(token_tile.x + first);
        b = *reinterpret_cast<const float4 *>(token_tile.x + first + 4);
    }
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

template <class Quantizer>
__device__ void quantize_values(const TokenTile &token_tile) {
    float v[8];
    load(v, token_tile);
    Quantizer::store(v, token_tile.row);
}

// Writes part `part` of the lane's eight values.
__device__ void store_part(const ActTileRow &row, int part, const uint16_t (&h)[8]) {
    uint4 words = {h[0] | uint32_t(h[1]) << 16, h[2] | uint32_t(h[3]) << 16, h[4] | uint32_t(h[5]) << 16,
                   h[6] | uint32_t(h[7]) << 16};
    *reinterpret_cast<uint4 *>(row.act_tile + part * ACT_TILE_PART_BYTES +
                               act16_tile_offset(row.token, threadIdx.x % 32)) = words;
}

// What is left after a part has been rounded is exact in f32; the next part rounds it.
__device__ void split_into_bf16(const TokenTile &token_tile) {
    float v[8];
    load(v, token_tile);
#pragma unroll
    for (int part = 0; part < parts_of(ActivationFormat::BF16X3); part++) {
        uint16_t h[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            __nv_bfloat16 rounded = __float2bfloat16_rn(v[i]);
            h[i] = __bfloat16_as_ushort(rounded);
            v[i] -= __bfloat162float(rounded);
        }
        store_part(token_tile.row, part, h);
    }
}

// Values are scaled by a power of two, so that the largest lies between 2^13 and 2^14 and nothing
// overflows. A value so small that it loses bits loses none that count beside the largest.
__device__ void split_into_f16(const TokenTile &token_tile) {
    float v[8];
    load(v, token_tile);
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) largest = fmaxf(largest, fabsf(v[i]));
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
    int shift = min(13 + 127 - (__float_as_int(largest) >> 23), 126);
    float factor = __int_as_float((127 + shift) << 23);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] *= factor;
#pragma unroll
    for (int part = 0; part < parts_of(ActivationFormat::F16X2); part++) {
        uint16_t h[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            __half rounded = __float2half_rn(v[i]);
            h[i] = __half_as_ushort(rounded);
            v[i] -= __half2float(rounded);
        }
        store_part(token_tile.row, part, h);
    }
    float *scales = reinterpret_cast<float *>(token_tile.row.act_tile +
                                              parts_of(ActivationFormat::F16X2) * ACT_TILE_PART_BYTES);
    if (threadIdx.x % 32 == 0) scales[token_tile.row.token] = __int_as_float((127 - shift) << 23);
}

}  // namespace

#define QUANTIZE_KERNEL(NAME, ACTIVATION, BODY)                                                  \
    extern "C" __global__ void __launch_bounds__(32 * WARPS)                                     \
        NAME(const float *x, int tokens, int cols, uint8_t *act_tiles) {                         \
        launch_next_kernel();                                                                    \
        wait_for_previous_kernel();                                                              \
        TokenTile token_tile;                                                                    \
        if (find_token_tile(token_tile, x, tokens, cols, act_tiles, act_tile_bytes(ACTIVATION))) \
            BODY(token_tile);                                                                    \
    }                                                                                            \
    CHECK_SIGNATURE(NAME, QuantizeActivations);

QUANTIZE_KERNEL(quantize_q8_0, ActivationFormat::Q8_0, quantize_values<QuantizePer32<ActivationFormat::Q8_0>>)
QUANTIZE_KERNEL(quantize_q8_1, ActivationFormat::Q8_1, quantize_values<QuantizePer32<ActivationFormat::Q8_1>>)
QUANTIZE_KERNEL(quantize_q8_k, ActivationFormat::Q8_K, quantize_values<QuantizePer256>)
QUANTIZE_KERNEL(quantize_f16, ActivationFormat::F16X2, split_into_f16)
QUANTIZE_KERNEL(quantize_bf16, ActivationFormat::BF16X3, split_into_bf16)
