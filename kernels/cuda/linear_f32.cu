// F32 weights: small matrices (routers of experts) and models nobody serves. One warp per row and four tokens.
//
// Lane l adds the products of columns 128 i + 4 l to + 3, ascending in i, by fmaf; then the lanes' sums are added pairwise,
// lanes 16 apart first. Neither the row count nor the number of tokens changes the order.
// Limit: 4 bytes a weight for every four tokens.

#include "linear/async_copy.cuh"

namespace {

constexpr int WARPS = 8;
constexpr int TOKENS = 4;

}  // namespace

// Grid: (rows / 8, tokens / 4), rounded up. `x` is [tokens][cols], `out` [tokens][rows]; `bias` may be null.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    linear_f32(const float *weights, const float *x, const float *bias, float *out, int cols, int rows, int tokens) {
    let_successor_start();
    wait_for_predecessor();
    int lane = threadIdx.x % 32, row = blockIdx.x * WARPS + threadIdx.x / 32, first = blockIdx.y * TOKENS;
    if (row >= rows) return;
    int count = min(TOKENS, tokens - first);
    const float *w = weights + static_cast<size_t>(row) * cols;
    x += static_cast<size_t>(first) * cols;
    float sum[TOKENS] = {};
    for (int k = 4 * lane; k < cols; k += 128) {
        float four[4] = {};
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (k + i < cols) four[i] = w[k + i];
#pragma unroll
        for (int t = 0; t < TOKENS; t++)
            if (t < count)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (k + i < cols) sum[t] = fmaf(four[i], x[static_cast<size_t>(t) * cols + k + i], sum[t]);
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) sum[t] += __shfl_xor_sync(~0u, sum[t], mask);
        if (lane == 0 && t < count) out[static_cast<size_t>(first + t) * rows + row] = bias == nullptr ? sum[t] : sum[t] + bias[row];
    }
}
