// SPDX-License-Identifier: Apache-2.0

// The input of matvec.cuh that is the norm of one row: each block normalises and quantizes the row
// itself. A kernel for the norm would cost a launch, and its sums would wait behind the copies of
// weights. With two rows, blocks that repeat the norm take longer than the kernel. Bits are those
// of norm.cu and quantize.cu.

#pragma once

#include "../norm_rows.cuh"
#include "async_copy.cuh"
#include "params.cuh"
#include "quantize.cuh"

namespace normed_input {

using norm_rows::VECTOR;

constexpr int THREADS = 32 * MATVEC_WARPS;
// A thread of norm.cu has vectors that lie NORM_THREADS apart; a thread here has those of this
// many.
constexpr int NORM_THREADS_PER_THREAD = NORM_THREADS / THREADS;
constexpr int VECTORS = NORM_PRODUCT_COLS_MAX / VECTOR / THREADS;
static_assert(NORM_THREADS % THREADS == 0 && VECTORS % NORM_THREADS_PER_THREAD == 0);

// Waits for the previous kernel, then fills the activation row in shared memory. Calls `loaded`
// when all loads have started. Each block also writes its part of the normalised row and of its
// activation tiles, for kernels that read them later.
template <ActivationFormat KIND, class Loaded>
__device__ void fill_act_rows(const NormedInput &in, const LinearParams &params, uint8_t *act_rows,
                              Loaded loaded) {
    using Quantizer = typename QuantizerOf<KIND>::Type;
    __shared__ float sums[norm_rows::WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int col_tiles = params.col_tiles, vectors = params.cols / VECTOR;
    // Weights do not come from the previous kernel.
    float weights[VECTORS][VECTOR], x[VECTORS][VECTOR];
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        int vector = k * THREADS + threadIdx.x;
        if (vector < vectors) norm_rows::load(weights[k], in.weight + vector * VECTOR);
    }
    wait_for_previous_kernel();
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        int vector = k * THREADS + threadIdx.x;
        if (vector < vectors) norm_rows::load(x[k], in.x + vector * VECTOR);
    }
    loaded();
    float squares[NORM_THREADS_PER_THREAD] = {};
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        if (k * THREADS + threadIdx.x >= vectors) continue;
        float &sum = squares[k % NORM_THREADS_PER_THREAD];
#pragma unroll
        for (int i = 0; i < VECTOR; i++) sum = fmaf(x[k][i], x[k][i], sum);
    }
#pragma unroll
    for (int t = 0; t < NORM_THREADS_PER_THREAD; t++) {
        float sum = warp_sum(squares[t]);
        if (lane == 0) sums[t * MATVEC_WARPS + warp] = sum;
    }
    __syncthreads();
    float factor = norm_rows::norm_factor(norm_rows::add_in_order(sums), params.cols, in.eps);
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        // The vectors of a warp are one tile of columns.
        int vector = k * THREADS + threadIdx.x, tile = k * MATVEC_WARPS + warp;
        if (tile >= col_tiles) continue;
        float normalized[VECTOR] = {};
        if (vector < vectors) {
#pragma unroll
            for (int i = 0; i < VECTOR; i++) normalized[i] = x[k][i] * factor * weights[k][i];
        }
        Quantizer::store(normalized, ActRow<KIND>{act_rows + tile * act_row_bytes(KIND)});
        if (tile % gridDim.x != blockIdx.x) continue;
        if (vector < vectors) norm_rows::store(in.out + vector * VECTOR, normalized);
        Quantizer::store(normalized, act_tile_row(in.quantized, act_tile_bytes(KIND), col_tiles, 0, tile));
    }
}

}  // namespace normed_input
