// SPDX-License-Identifier: Apache-2.0

// gate = activation(gate) * up (activation.cuh), value by value, in place.
//
//   *_and_mul             four values per thread
//   *_scalar              one value per thread, if their number is no multiple of four
//   *_q8_0, _q8_1, _q8_k,  also quantize the rows into activation tiles, as quantize.cu does, while
//   *_f16, _bf16           the values are in registers; a warp per token and 256 columns. Unless
//                          `needs_values`, the values themselves are not written. Slots of experts
//                          without a pair are left out
//
// Limit: bytes, 12 per value.

#include "abi/elementwise.cuh"
#include "activation.cuh"
#include "linear/quantize.cuh"
#include "stream_order.cuh"

namespace {

using activation::Gelu, activation::multiply, activation::Silu;

constexpr int WARPS = ACT_AND_MUL_WARPS;

// A warp computes one token's values of one tile of columns.
template <class Activation, class Quantizer>
__device__ void act_and_mul_rows(float *gate, const float *up, int tokens, int cols, bool needs_values,
                                 const uint32_t *pairs_of_rows, QuantizedRows quantized,
                                 bool launches_early) {
    wait_around_launch(launches_early);
    int col_tiles = (cols + TILE_COLS - 1) / TILE_COLS;
    int at = blockIdx.x * WARPS + threadIdx.x / 32, token = at / col_tiles, tile = at % col_tiles;
    if (token >= tokens) return;
    if (pairs_of_rows != nullptr && pairs_of_rows[token] == NO_PAIR) return;
    int col = tile * TILE_COLS + threadIdx.x % 32 * 8;
    float v[8] = {};
    if (col < cols) {
        size_t first = (size_t(token) * cols + col) / 4;
        float4 *g = reinterpret_cast<float4 *>(gate) + first;
        const float4 *u = reinterpret_cast<const float4 *>(up) + first;
        // All loads come before the first use.
        float4 g0 = g[0], u0 = u[0], g1 = g[1], u1 = u[1];
        float4 a = multiply<Activation>(g0, u0), b = multiply<Activation>(g1, u1);
        if (needs_values) g[0] = a, g[1] = b;
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    }
    Quantizer::store(v,
                     act_tile_row(quantized, act_tile_bytes(Quantizer::ACTIVATION), col_tiles, token, tile));
}

}  // namespace

// `vectors` counts vectors of four values. The scalar kernel is for a number of values that is no
// multiple of four.
#define VALUE_KERNELS(NAME, ACTIVATION)                                        \
    extern "C" __global__ void __launch_bounds__(ACT_AND_MUL_THREADS)          \
        NAME(float4 *gate, const float4 *up, uint64_t vectors) {               \
        wait_for_previous_kernel();                                            \
        launch_next_kernel();                                                  \
        uint64_t i = blockIdx.x * uint64_t(ACT_AND_MUL_THREADS) + threadIdx.x; \
        if (i < vectors) gate[i] = multiply<ACTIVATION>(gate[i], up[i]);       \
    }                                                                          \
    CHECK_SIGNATURE(NAME, ActAndMul);                                          \
    extern "C" __global__ void __launch_bounds__(ACT_AND_MUL_THREADS)          \
        NAME##_scalar(float *gate, const float *up, uint64_t values) {         \
        wait_for_previous_kernel();                                            \
        launch_next_kernel();                                                  \
        uint64_t i = blockIdx.x * uint64_t(ACT_AND_MUL_THREADS) + threadIdx.x; \
        if (i < values) gate[i] = multiply<ACTIVATION>(gate[i], up[i]);        \
    }                                                                          \
    CHECK_SIGNATURE(NAME##_scalar, ActAndMulScalar);

#define ROW_KERNEL(NAME, ACTIVATION, QUANTIZER)                                                           \
    extern "C" __global__ void __launch_bounds__(32 * WARPS)                                              \
        NAME(float *gate, const float *up, int tokens, int cols, int needs_values,                        \
             const uint32_t *pairs_of_rows, QuantizedRows quantized, int launches_early) {                \
        act_and_mul_rows<ACTIVATION, QUANTIZER>(gate, up, tokens, cols, needs_values != 0, pairs_of_rows, \
                                                quantized, launches_early != 0);                          \
    }                                                                                                     \
    CHECK_SIGNATURE(NAME, ActAndMulQuantized);

#define ACTIVATION_KERNELS(NAME, ACTIVATION)                                   \
    VALUE_KERNELS(NAME, ACTIVATION)                                            \
    ROW_KERNEL(NAME##_q8_0, ACTIVATION, QuantizePer32<ActivationFormat::Q8_0>) \
    ROW_KERNEL(NAME##_q8_1, ACTIVATION, QuantizePer32<ActivationFormat::Q8_1>) \
    ROW_KERNEL(NAME##_q8_k, ACTIVATION, QuantizePer256)                        \
    ROW_KERNEL(NAME##_f16, ACTIVATION, RoundToF16)                             \
    ROW_KERNEL(NAME##_bf16, ACTIVATION, RoundToBF16)
ACTIVATION_KERNELS(silu_and_mul, Silu)
ACTIVATION_KERNELS(gelu_and_mul, Gelu)
