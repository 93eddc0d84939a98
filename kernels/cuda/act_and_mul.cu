// SPDX-License-Identifier: Apache-2.0

// gate = activation(gate) * up, value by value, in place.
//
//   activation(x) = x / (1 + exp(-(linear x + cubic x^3)))
//   SiLU has `linear` 1 and `cubic` 0; ops::Activation::GeluTanh has other factors.
//
//   act_and_mul           four values per thread
//   act_and_mul_scalar    one value per thread, if their number is no multiple of four
//   *_q8_0, _q8_1, _q8_k,  also quantize the rows into activation tiles, as quantize.cu does, while
//   *_f16, _bf16           the values are in registers; a warp per token and 256 columns. Unless
//                          `needs_values`, the values themselves are not written. Slots of experts
//                          without a pair are left out
//
// Limit: bytes, 12 per value.

#include "abi/elementwise.cuh"
#include "linear/quantize.cuh"
#include "numeric.cuh"
#include "stream_order.cuh"

namespace {

constexpr int WARPS = ACT_AND_MUL_WARPS;

struct Activation {
    float linear, cubic;

    __device__ float operator()(float gate, float up) const {
        // 0 times the square of an infinite gate would be NaN.
        const float factor = cubic == 0.0f ? linear : fmaf(cubic * gate, gate, linear);
        return __fdiv_rn(gate, 1.0f + exp_exact(-gate * factor)) * up;
    }

    __device__ float4 operator()(float4 g, float4 u) const {
        const Activation &self = *this;
        return make_float4(self(g.x, u.x), self(g.y, u.y), self(g.z, u.z), self(g.w, u.w));
    }
};

// A warp computes one token's values of one tile of columns.
template <class Quantizer>
__device__ void act_and_mul_rows(float *gate, const float *up, Activation activation, int tokens, int cols,
                                 bool needs_values, const uint32_t *pairs_of_rows, QuantizedRows quantized,
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
        float4 a = activation(g0, u0), b = activation(g1, u1);
        if (needs_values) g[0] = a, g[1] = b;
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    }
    Quantizer::store(v,
                     act_tile_row(quantized, act_tile_bytes(Quantizer::ACTIVATION), col_tiles, token, tile));
}

}  // namespace

// `vectors` counts vectors of four values.
extern "C" __global__ void __launch_bounds__(ACT_AND_MUL_THREADS)
    act_and_mul(float4 *gate, const float4 *up, float linear, float cubic, uint64_t vectors) {
    wait_for_previous_kernel();
    launch_next_kernel();
    uint64_t i = blockIdx.x * uint64_t(ACT_AND_MUL_THREADS) + threadIdx.x;
    if (i < vectors) gate[i] = Activation{linear, cubic}(gate[i], up[i]);
}
CHECK_SIGNATURE(act_and_mul, ActAndMul);

// For a number of values that is no multiple of four.
extern "C" __global__ void __launch_bounds__(ACT_AND_MUL_THREADS)
    act_and_mul_scalar(float *gate, const float *up, float linear, float cubic, uint64_t values) {
    wait_for_previous_kernel();
    launch_next_kernel();
    uint64_t i = blockIdx.x * uint64_t(ACT_AND_MUL_THREADS) + threadIdx.x;
    if (i < values) gate[i] = Activation{linear, cubic}(gate[i], up[i]);
}
CHECK_SIGNATURE(act_and_mul_scalar, ActAndMulScalar);

#define ACT_AND_MUL_KERNEL(SUFFIX, QUANTIZER)                                                             \
    extern "C" __global__ void __launch_bounds__(32 * WARPS) act_and_mul##SUFFIX(                         \
        float *gate, const float *up, float linear, float cubic, int tokens, int cols, int needs_values,  \
        const uint32_t *pairs_of_rows, QuantizedRows quantized, int launches_early) {                     \
        act_and_mul_rows<QUANTIZER>(gate, up, Activation{linear, cubic}, tokens, cols, needs_values != 0, \
                                    pairs_of_rows, quantized, launches_early != 0);                       \
    }                                                                                                     \
    CHECK_SIGNATURE(act_and_mul##SUFFIX, ActAndMulQuantized);
ACT_AND_MUL_KERNEL(_q8_0, QuantizePer32<ActivationFormat::Q8_0>)
ACT_AND_MUL_KERNEL(_q8_1, QuantizePer32<ActivationFormat::Q8_1>)
ACT_AND_MUL_KERNEL(_q8_k, QuantizePer256)
ACT_AND_MUL_KERNEL(_f16, RoundToF16)
ACT_AND_MUL_KERNEL(_bf16, RoundToBF16)
