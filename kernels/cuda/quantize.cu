// SPDX-License-Identifier: Apache-2.0

// Converts activation rows f32 [tokens][cols] to activation tiles of 8 tokens by 256 values
// (linear/tile.cuh). A warp converts 256 values of one token, eight per lane.
//
//   quantize_q8_0, _q8_1  per 32 values: d = largest magnitude / 127, ties away from zero; d and
//                         d * sum are rounded to f16
//   quantize_q8_k         per 256 values: the value of largest magnitude becomes -127, ties to even
//   quantize_f16, _bf16   each value: the nearest, ties to even; F16 saturates at 65,504
//
// The rules are those of crates/quant, bit for bit. Columns beyond the row become zero; tokens
// beyond the last are left as they are. Limit: bytes, 4 read and about 1.1 written per value (2 for
// floats); a step's activations are in the L2 cache.

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
                                QuantizedRows quantized, int act_tile) {
    int col_tiles = (cols + TILE_COLS - 1) / TILE_COLS;
    int at = blockIdx.x * WARPS + threadIdx.x / 32, token = at / col_tiles, col = at % col_tiles;
    if (token >= tokens) return false;
    token_tile.x = x + static_cast<size_t>(token) * cols + col * TILE_COLS;
    token_tile.row = act_tile_row(quantized, act_tile, col_tiles, token, col);
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

}  // namespace

#define QUANTIZE_KERNEL(NAME, ACTIVATION, BODY)                                                  \
    extern "C" __global__ void __launch_bounds__(32 * WARPS)                                     \
        NAME(const float *x, int tokens, int cols, QuantizedRows quantized) {                    \
        launch_next_kernel();                                                                    \
        wait_for_previous_kernel();                                                              \
        TokenTile token_tile;                                                                    \
        if (find_token_tile(token_tile, x, tokens, cols, quantized, act_tile_bytes(ACTIVATION))) \
            BODY(token_tile);                                                                    \
    }                                                                                            \
    CHECK_SIGNATURE(NAME, QuantizeActivations);

QUANTIZE_KERNEL(quantize_q8_0, ActivationFormat::Q8_0, quantize_values<QuantizePer32<ActivationFormat::Q8_0>>)
QUANTIZE_KERNEL(quantize_q8_1, ActivationFormat::Q8_1, quantize_values<QuantizePer32<ActivationFormat::Q8_1>>)
QUANTIZE_KERNEL(quantize_q8_k, ActivationFormat::Q8_K, quantize_values<QuantizePer256>)
QUANTIZE_KERNEL(quantize_f16, ActivationFormat::F16, quantize_values<RoundToF16>)
QUANTIZE_KERNEL(quantize_bf16, ActivationFormat::BF16, quantize_values<RoundToBF16>)
