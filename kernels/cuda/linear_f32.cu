// SPDX-License-Identifier: Apache-2.0

// out[t][r] = sum_k weights[r][k] * x[t][k] + bias[r] with F32 weights. Only small matrices (the
// routers of experts) matter: whole models in F32 are not served.
//
// A warp computes one row for one token or four, or eight rows for eight tokens. Order of sums:
// lane l adds the products of columns 128 i + 4 l to 128 i + 4 l + 3, ascending in i, by fmaf; then
// the lanes' sums are added pairwise, lanes 16 apart first. Neither the number of rows nor that of
// tokens changes this order.
//
// Limit: loads from the first-level cache, five of 16 bytes per 16 products of a lane. With eight
// rows a warp these are 16 per 256, and products are the limit. Such blocks leave multiprocessors
// idle below some 500 tokens.

#include "abi/linear.cuh"
#include "numeric.cuh"
#include "stream_order.cuh"

namespace {

constexpr int WARPS = LINEAR_F32_WARPS;
constexpr int TOKENS = LINEAR_F32_TOKENS;

// Columns k to k + 3 of a row; zero beyond its end. ALIGNED: rows are multiples of four long.
template <bool ALIGNED>
__device__ float4 load4(const float *row, int k, int cols) {
    if constexpr (ALIGNED) return *reinterpret_cast<const float4 *>(row + k);
    float v[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (k + i < cols) v[i] = row[k + i];
    return {v[0], v[1], v[2], v[3]};
}

// A warp computes one row for four tokens.
template <bool ALIGNED>
__device__ void multiply_tokens(const float *weights, const float *x, const float *bias, float *out, int cols,
                                int rows, int tokens) {
    wait_for_previous_kernel();
    int lane = threadIdx.x % 32, row = blockIdx.x * WARPS + threadIdx.x / 32, first = blockIdx.y * TOKENS;
    if (row >= rows) return;
    const float *w = weights + static_cast<size_t>(row) * cols, *v[TOKENS];
    // If fewer than TOKENS tokens are left, the last one is computed again; the store below skips
    // it.
#pragma unroll
    for (int t = 0; t < TOKENS; t++) v[t] = x + static_cast<size_t>(min(first + t, tokens - 1)) * cols;
    float sum[TOKENS] = {};
    for (int k = 4 * lane; k < cols; k += 128) {
        float4 a = load4<ALIGNED>(w, k, cols), b[TOKENS];
#pragma unroll
        for (int t = 0; t < TOKENS; t++) b[t] = load4<ALIGNED>(v[t], k, cols);
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            float &s = sum[t];
            s = fmaf(a.x, b[t].x, s);
            if (ALIGNED || k + 1 < cols) s = fmaf(a.y, b[t].y, s);
            if (ALIGNED || k + 2 < cols) s = fmaf(a.z, b[t].z, s);
            if (ALIGNED || k + 3 < cols) s = fmaf(a.w, b[t].w, s);
        }
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        float s = sum[t];
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) s += __shfl_xor_sync(~0u, s, mask);
        if (lane == 0 && first + t < tokens)
            out[static_cast<size_t>(first + t) * rows + row] = bias == nullptr ? s : s + bias[row];
    }
}

// The sums of 32 values over the lanes; lane l returns that of values[l]. The additions are those
// of `warp_sum`, lanes 16 apart first. But where two lanes would add the same values, each of them
// goes on with half of the values.
__device__ float warp_sums(float (&values)[32]) {
    int lane = threadIdx.x % 32;
    // Both loops have constant bounds, so that the values stay in registers.
#pragma unroll
    for (int step = 4; step >= 0; step--) {
        const int distance = 1 << step;
        bool upper = lane & distance;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            if (i >= distance) continue;
            float own = upper ? values[i + distance] : values[i],
                  others = upper ? values[i] : values[i + distance];
            values[i] = own + __shfl_xor_sync(~0u, others, distance);
        }
    }
    return values[0];
}

constexpr int TILE_ROWS = LINEAR_F32_TILE_ROWS, TILE_TOKENS = LINEAR_F32_TILE_TOKENS;
constexpr int TILE_WARPS = LINEAR_F32_TILE_WARPS;

// A warp computes TILE_ROWS rows for TILE_TOKENS tokens. A block has TILE_WARPS groups of rows, and
// as many of tokens. Rows are whole vectors of four.
__device__ void multiply_tile(const float *weights, const float *x, const float *bias, float *out, int cols,
                              int rows, int tokens) {
    static_assert(TILE_TOKENS == 8 && TILE_ROWS % 4 == 0, "32 products are four rows");
    wait_for_previous_kernel();
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int first_row = (blockIdx.x * TILE_WARPS + warp % TILE_WARPS) * TILE_ROWS,
        first = (blockIdx.y * TILE_WARPS + warp / TILE_WARPS) * TILE_TOKENS;
    if (first_row >= rows || first >= tokens) return;
    // If fewer rows or tokens are left, the last one is computed again; the stores below skip it.
    uint32_t row_offset[TILE_ROWS], token_offset[TILE_TOKENS];
#pragma unroll
    for (int r = 0; r < TILE_ROWS; r++) row_offset[r] = min(first_row + r, rows - 1) * cols;
#pragma unroll
    for (int t = 0; t < TILE_TOKENS; t++) token_offset[t] = min(first + t, tokens - 1) * cols;
    float sums[TILE_ROWS / 4][32] = {};
    for (int k = 4 * lane; k < cols; k += 128) {
        float4 a[TILE_ROWS];
#pragma unroll
        for (int r = 0; r < TILE_ROWS; r++)
            a[r] = *reinterpret_cast<const float4 *>(weights + row_offset[r] + k);
#pragma unroll
        for (int t = 0; t < TILE_TOKENS; t++) {
            float4 b = *reinterpret_cast<const float4 *>(x + token_offset[t] + k);
#pragma unroll
            for (int r = 0; r < TILE_ROWS; r++) {
                float &s = sums[r / 4][r % 4 * TILE_TOKENS + t];
                s = fmaf(a[r].x, b.x, s);
                s = fmaf(a[r].y, b.y, s);
                s = fmaf(a[r].z, b.z, s);
                s = fmaf(a[r].w, b.w, s);
            }
        }
    }
#pragma unroll
    for (int part = 0; part < TILE_ROWS / 4; part++) {
        float sum = warp_sums(sums[part]);
        int row = first_row + 4 * part + lane / TILE_TOKENS, token = first + lane % TILE_TOKENS;
        if (row >= rows || token >= tokens) continue;
        out[static_cast<size_t>(token) * rows + row] = bias == nullptr ? sum : sum + bias[row];
    }
}

// A warp computes one row for up to TOKENS tokens. It loads the weights of the first 128 * STEPS
// columns before it waits for the activations, and all values of so many columns before it adds:
// loads that wait for sums took half of the time of a router's product.
template <bool ALIGNED, int TOKENS, int STEPS>
__device__ void multiply_few(const float *weights, const float *x, const float *bias, float *out, int cols,
                             int rows, int tokens) {
    const int lane = threadIdx.x % 32, row = blockIdx.x * LINEAR_F32_FEW_WARPS + threadIdx.x / 32;
    const int first = blockIdx.y * TOKENS;
    if (row >= rows) return;
    auto load_columns = [&](const float *from, int at, float4(&to)[STEPS]) {
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            int k = at + 128 * step + 4 * lane;
            if (k < cols) to[step] = load4<ALIGNED>(from, k, cols);
        }
    };
    const float *w = weights + static_cast<size_t>(row) * cols;
    float4 a[STEPS], b[TOKENS][STEPS];
    load_columns(w, 0, a);
    wait_for_previous_kernel();
    float sum[TOKENS] = {};
    for (int at = 0; at < cols; at += 128 * STEPS) {
        if (at > 0) load_columns(w, at, a);
            // If fewer than TOKENS tokens are left, the last one is computed again; the store below
            // skips it.
#pragma unroll
        for (int t = 0; t < TOKENS; t++)
            load_columns(x + static_cast<size_t>(min(first + t, tokens - 1)) * cols, at, b[t]);
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            int k = at + 128 * step + 4 * lane;
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                float &s = sum[t];
                if (k < cols) s = fmaf(a[step].x, b[t][step].x, s);
                if (ALIGNED ? k < cols : k + 1 < cols) s = fmaf(a[step].y, b[t][step].y, s);
                if (ALIGNED ? k < cols : k + 2 < cols) s = fmaf(a[step].z, b[t][step].z, s);
                if (ALIGNED ? k < cols : k + 3 < cols) s = fmaf(a[step].w, b[t][step].w, s);
            }
        }
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        float s = warp_sum(sum[t]);
        if (lane == 0 && first + t < tokens)
            out[static_cast<size_t>(first + t) * rows + row] = bias == nullptr ? s : s + bias[row];
    }
}

}  // namespace

// Grid: (rows / 8, tokens / 4), rounded up. `x` is [tokens][cols], `out` [tokens][rows]. Both are
// 16-byte aligned, like `weights`. `bias` may be null.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    linear_f32(const float *weights, const float *x, const float *bias, float *out, int cols, int rows,
               int tokens) {
    launch_next_kernel();
    if (cols % 4 == 0) {
        multiply_tokens<true>(weights, x, bias, out, cols, rows, tokens);
    } else {
        multiply_tokens<false>(weights, x, bias, out, cols, rows, tokens);
    }
}
CHECK_SIGNATURE(linear_f32, LinearF32);

// The same for one token, and for few. These kernels have registers for values under way. With
// two warps a block, few share one first-level cache, through which each loads all activations.
#define LINEAR_F32_FEW_KERNEL(NAME, TOKENS, STEPS)                                                    \
    extern "C" __global__ void __launch_bounds__(32 * LINEAR_F32_FEW_WARPS)                           \
        NAME(const float *weights, const float *x, const float *bias, float *out, int cols, int rows, \
             int tokens) {                                                                            \
        launch_next_kernel();                                                                         \
        if (cols % 4 == 0) {                                                                          \
            multiply_few<true, TOKENS, STEPS>(weights, x, bias, out, cols, rows, tokens);             \
        } else {                                                                                      \
            multiply_few<false, TOKENS, STEPS>(weights, x, bias, out, cols, rows, tokens);            \
        }                                                                                             \
    }                                                                                                 \
    CHECK_SIGNATURE(NAME, LinearF32);
LINEAR_F32_FEW_KERNEL(linear_f32_token, 1, 16)
LINEAR_F32_FEW_KERNEL(linear_f32_few, TOKENS, 8)

// The same for many tokens. `cols` is a multiple of four.
extern "C" __global__ void __launch_bounds__(32 * TILE_WARPS * TILE_WARPS)
    linear_f32_tiles(const float *weights, const float *x, const float *bias, float *out, int cols, int rows,
                     int tokens) {
    launch_next_kernel();
    multiply_tile(weights, x, bias, out, cols, rows, tokens);
}
CHECK_SIGNATURE(linear_f32_tiles, LinearF32);
