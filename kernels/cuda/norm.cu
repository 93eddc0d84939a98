// SPDX-License-Identifier: Apache-2.0

// Root mean square norms: out = x / sqrt(mean(x^2) + eps) * weight, of f32 rows [rows][cols].
//
//   rms_norm              one thread block per row
//   add_rms_norm          x += y first: the residual sum and the norm of the next layer in one pass
//   add_normed_rms_norm   x += norm(y) first, for models that normalise what attention and
//                         feed-forward give
//   *_q8_0, _q8_1, _q8_k, also quantize the row into activation tiles while its values are in
//   *_f16, _bf16          registers; `out` may then be null
//   *_short*              rows of at most NORM_SHORT_COLS_MAX values, in whole vectors
//   rms_norm_heads        one warp per head, in place
//   add_residual          x += y alone
//   scale                 x *= factor alone
//
// norm_rows.cuh has the order of sums; the number of rows does not change it. Limit: bytes, 8 to 16
// per value. At one row it is the latency of a load, a reduction and a store, some 2 us. With many
// rows it is the number of rows in flight, so short rows have kernels with fewer registers.

#include "abi/elementwise.cuh"
#include "linear/quantize.cuh"
#include "norm_rows.cuh"
#include "stream_order.cuh"

namespace {

using namespace norm_rows;

constexpr int THREADS = NORM_THREADS;
// Vectors that a thread keeps in registers between its two passes.
constexpr int LONG_VECTORS = 4, SHORT_VECTORS = 1;
static_assert(VECTOR * LONG_VECTORS * THREADS == NORM_QUANTIZED_COLS_MAX);
static_assert(VECTOR * SHORT_VECTORS * THREADS == NORM_SHORT_COLS_MAX);

// Sums of a block with different numbers have shared memory of their own.
template <int NUMBER>
__device__ float block_sum(float x) {
    __shared__ float sums[WARPS];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    return add_in_order(sums);
}

// The row is not quantized.
struct NoQuantizer {
    static constexpr bool QUANTIZES = false;
};

template <class Quantizer>
struct WithQuantizer : Quantizer {
    static constexpr bool QUANTIZES = true;
};

// What a kernel adds to x first.
enum class Added { NOTHING, Y, NORMED_Y };

// The norm of y: vectors of a thread.
template <int VECTORS_PER_THREAD>
struct NormedY {
    // There are no registers for two weights of long rows.
    static constexpr bool KEEPS_WEIGHTS = VECTORS_PER_THREAD == SHORT_VECTORS;
    float weights[KEEPS_WEIGHTS ? VECTORS_PER_THREAD : 1][VECTOR];
    float values[VECTORS_PER_THREAD][VECTOR];

    __device__ __forceinline__ void load_weights(int k, const float *y_weight) {
        if constexpr (KEEPS_WEIGHTS) load(weights[k], y_weight + (k * THREADS + threadIdx.x) * VECTOR);
    }

    __device__ __forceinline__ void compute(const float *y, const float *y_weight, float eps, int cols) {
        const int vectors = cols / VECTOR;
        float squares = 0.0f;
#pragma unroll
        for (int k = 0; k < VECTORS_PER_THREAD; k++) {
            int vector = k * THREADS + threadIdx.x;
            if (vector >= vectors) continue;
            load(values[k], y + vector * VECTOR);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) squares = fmaf(values[k][i], values[k][i], squares);
        }
        const float factor = norm_factor(block_sum<1>(squares), cols, eps);
#pragma unroll
        for (int k = 0; k < VECTORS_PER_THREAD; k++) {
            int vector = k * THREADS + threadIdx.x;
            if (vector >= vectors) continue;
            float(&own)[VECTOR] = weights[KEEPS_WEIGHTS ? k : 0];
            if constexpr (!KEEPS_WEIGHTS) load(own, y_weight + vector * VECTOR);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) values[k][i] = values[k][i] * factor * own[i];
        }
    }
};

// Rows of any length, from memory in each pass.
template <Added ADDED>
__device__ void normalize_any_row(float *x, const float *y, const float *y_weight, const float *weight,
                                  float eps, float *out, int cols) {
    float y_factor = 0.0f, squares = 0.0f;
    if constexpr (ADDED == Added::NORMED_Y) {
        float y_squares = 0.0f;
        for (int i = threadIdx.x; i < cols; i += THREADS) y_squares = fmaf(y[i], y[i], y_squares);
        y_factor = norm_factor(block_sum<1>(y_squares), cols, eps);
    }
    for (int i = threadIdx.x; i < cols; i += THREADS) {
        float v = x[i];
        if constexpr (ADDED == Added::Y) x[i] = v = v + y[i];
        if constexpr (ADDED == Added::NORMED_Y) x[i] = v = v + y[i] * y_factor * y_weight[i];
        squares = fmaf(v, v, squares);
    }
    float factor = norm_factor(block_sum<0>(squares), cols, eps);
    for (int i = threadIdx.x; i < cols; i += THREADS) out[i] = x[i] * factor * weight[i];
}

// If `Quantizer` quantizes, or rows are short, norm.rs launches the kernel only for rows that
// consist of whole vectors and that the registers of a block can hold.
template <Added ADDED, class Quantizer, int VECTORS_PER_THREAD>
__device__ void normalize_row(float *x, const float *y, const float *y_weight, const float *weight, float eps,
                              float *out, int cols, QuantizedRows quantized, bool launches_early) {
    constexpr bool ADD = ADDED != Added::NOTHING, NORMS_Y = ADDED == Added::NORMED_Y;
    const int vectors = cols / VECTOR;
    // Weights do not come from the previous kernel. Loaded after the sum, they would wait behind
    // the next product's copies.
    float weights[VECTORS_PER_THREAD][VECTOR];
    NormedY<VECTORS_PER_THREAD> normed_y;
    if (cols % VECTOR == 0) {
#pragma unroll
        for (int k = 0; k < VECTORS_PER_THREAD; k++) {
            int vector = k * THREADS + threadIdx.x;
            if (vector >= vectors) continue;
            load(weights[k], weight + vector * VECTOR);
            if constexpr (NORMS_Y) normed_y.load_weights(k, y_weight);
        }
    }
    wait_around_launch(launches_early);
    size_t row = size_t(blockIdx.x) * cols;
    x += row;
    if (out != nullptr) out += row;
    if (ADD) y += row;
    float squares = 0.0f;
    constexpr bool FITS = Quantizer::QUANTIZES || VECTORS_PER_THREAD == SHORT_VECTORS;
    if (FITS || (cols % VECTOR == 0 && cols <= VECTOR * VECTORS_PER_THREAD * THREADS)) {
        float kept[VECTORS_PER_THREAD][VECTOR];
        if constexpr (NORMS_Y) normed_y.compute(y, y_weight, eps, cols);
#pragma unroll
        for (int k = 0; k < VECTORS_PER_THREAD; k++) {
            int vector = k * THREADS + threadIdx.x;
            if (vector >= vectors) continue;
            load(kept[k], x + vector * VECTOR);
            if (ADD) {
                float added[VECTOR];
                if constexpr (!NORMS_Y) load(added, y + vector * VECTOR);
#pragma unroll
                for (int i = 0; i < VECTOR; i++) kept[k][i] += NORMS_Y ? normed_y.values[k][i] : added[i];
                store(x + vector * VECTOR, kept[k]);
            }
#pragma unroll
            for (int i = 0; i < VECTOR; i++) squares = fmaf(kept[k][i], kept[k][i], squares);
        }
        float factor = norm_factor(block_sum<0>(squares), cols, eps);
#pragma unroll
        for (int k = 0; k < VECTORS_PER_THREAD; k++) {
            int vector = k * THREADS + threadIdx.x;
            // The vectors of a warp are one tile of columns. `Quantizer::store` needs all lanes of
            // a warp, so a warp skips a tile as a whole.
            if (vector / 32 * 32 >= vectors) continue;
            float normalized[VECTOR] = {};
            if (vector < vectors) {
#pragma unroll
                for (int i = 0; i < VECTOR; i++) normalized[i] = kept[k][i] * factor * weights[k][i];
                if (!Quantizer::QUANTIZES || out != nullptr) store(out + vector * VECTOR, normalized);
            }
            if constexpr (Quantizer::QUANTIZES) {
                int col_tiles = (cols + TILE_COLS - 1) / TILE_COLS;
                Quantizer::store(normalized, act_tile_row(quantized, act_tile_bytes(Quantizer::ACTIVATION),
                                                          col_tiles, blockIdx.x, vector / 32));
            }
        }
        return;
    }
    if constexpr (!FITS) normalize_any_row<ADDED>(x, y, y_weight, weight, eps, out, cols);
}

}  // namespace

#define NORM_KERNELS_OF(SUFFIX, QUANTIZER, VECTORS)                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                    \
        rms_norm##SUFFIX(float *x, const float *weight, float eps, float *out, int cols,                     \
                         QuantizedRows quantized, int launches_early) {                                      \
        normalize_row<Added::NOTHING, QUANTIZER, VECTORS>(x, nullptr, nullptr, weight, eps, out, cols,       \
                                                          quantized, launches_early != 0);                   \
    }                                                                                                        \
    CHECK_SIGNATURE(rms_norm##SUFFIX, RmsNorm);                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                    \
        add_rms_norm##SUFFIX(float *x, const float *y, const float *weight, float eps, float *out, int cols, \
                             QuantizedRows quantized, int launches_early) {                                  \
        normalize_row<Added::Y, QUANTIZER, VECTORS>(x, y, nullptr, weight, eps, out, cols, quantized,        \
                                                    launches_early != 0);                                    \
    }                                                                                                        \
    CHECK_SIGNATURE(add_rms_norm##SUFFIX, AddRmsNorm);                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS) add_normed_rms_norm##SUFFIX(                       \
        float *x, const float *y, const float *y_weight, const float *weight, float eps, float *out,         \
        int cols, QuantizedRows quantized, int launches_early) {                                             \
        normalize_row<Added::NORMED_Y, QUANTIZER, VECTORS>(x, y, y_weight, weight, eps, out, cols,           \
                                                           quantized, launches_early != 0);                  \
    }                                                                                                        \
    CHECK_SIGNATURE(add_normed_rms_norm##SUFFIX, AddNormedRmsNorm);
#define NORM_KERNELS(SUFFIX, QUANTIZER)              \
    NORM_KERNELS_OF(SUFFIX, QUANTIZER, LONG_VECTORS) \
    NORM_KERNELS_OF(_short##SUFFIX, QUANTIZER, SHORT_VECTORS)
NORM_KERNELS(, NoQuantizer)
NORM_KERNELS(_q8_0, WithQuantizer<QuantizePer32<ActivationFormat::Q8_0>>)
NORM_KERNELS(_q8_1, WithQuantizer<QuantizePer32<ActivationFormat::Q8_1>>)
NORM_KERNELS(_q8_k, WithQuantizer<QuantizePer256>)
NORM_KERNELS(_f16, WithQuantizer<RoundToF16>)
NORM_KERNELS(_bf16, WithQuantizer<RoundToBF16>)

// `heads` counts the heads of all rows; a head is `head_dim` values of `x`.
extern "C" __global__ void __launch_bounds__(32 * NORM_HEADS)
    rms_norm_heads(float *x, const float *weight, float eps, int heads, int head_dim) {
    wait_for_previous_kernel();
    launch_next_kernel();
    int head = blockIdx.x * NORM_HEADS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (head >= heads) return;
    x += size_t(head) * head_dim;
    float squares = 0.0f;
    for (int i = lane; i < head_dim; i += 32) squares = fmaf(x[i], x[i], squares);
    float factor = norm_factor(warp_sum(squares), head_dim, eps);
    for (int i = lane; i < head_dim; i += 32) x[i] = x[i] * factor * weight[i];
}
CHECK_SIGNATURE(rms_norm_heads, RmsNormHeads);

extern "C" __global__ void __launch_bounds__(ADD_THREADS)
    add_residual(float *x, const float *y, uint64_t values) {
    wait_for_previous_kernel();
    launch_next_kernel();
    uint64_t i = blockIdx.x * uint64_t(ADD_THREADS) + threadIdx.x;
    if (i < values) x[i] += y[i];
}
CHECK_SIGNATURE(add_residual, AddResidual);

extern "C" __global__ void __launch_bounds__(ADD_THREADS) scale(float *x, float factor, uint64_t values) {
    wait_for_previous_kernel();
    launch_next_kernel();
    uint64_t i = blockIdx.x * uint64_t(ADD_THREADS) + threadIdx.x;
    if (i < values) x[i] *= factor;
}
CHECK_SIGNATURE(scale, Scale);
