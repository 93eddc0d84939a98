// Root mean square norms: out = x / sqrt(mean(x^2) + eps) * weight.
//
//   rms_norm        one thread block per row
//   add_rms_norm    x += y first: the residual stream and the norm of the next block in one pass
//   rms_norm_heads  one warp per head, in place
//   add             x += y alone
//
// A row is summed by the same number of threads however many rows there are: thread t takes the vectors t, t + THREADS, ...,
// warps add by a butterfly, warp sums are added in order. Limit: bytes (8 to 16 per value); at one row the latency of two
// passes through memory, some 2 us.

#include "numeric.cuh"

namespace {

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;
// float4 vectors that a thread keeps between its two passes: rows of up to 8,192 values.
constexpr int KEPT = 4;

__device__ float block_sum(float x) {
    __shared__ float sums[WARPS];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    float total = sums[0];
#pragma unroll
    for (int warp = 1; warp < WARPS; warp++) total += sums[warp];
    return total;
}

__device__ float norm_factor(float squares, int cols, float eps) {
    return __frcp_rn(__fsqrt_rn(__fdiv_rn(squares, static_cast<float>(cols)) + eps));
}

__device__ float add_squares(float sum, float4 v) {
    return fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, fmaf(v.x, v.x, sum))));
}

__device__ float4 scaled(float4 v, float factor, float4 w) {
    return make_float4(v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w);
}

template <bool ADD>
__device__ void norm_row(float *x, const float *y, const float *weight, float eps, float *out, int cols) {
    float squares = 0.0f;
    if (cols % 4 == 0 && cols <= 4 * KEPT * THREADS) {
        int vectors = cols / 4;
        float4 kept[KEPT];
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            int i = k * THREADS + threadIdx.x;
            if (i >= vectors) break;
            float4 v = reinterpret_cast<const float4 *>(x)[i];
            if (ADD) {
                float4 u = reinterpret_cast<const float4 *>(y)[i];
                v = make_float4(v.x + u.x, v.y + u.y, v.z + u.z, v.w + u.w);
                reinterpret_cast<float4 *>(x)[i] = v;
            }
            kept[k] = v;
            squares = add_squares(squares, v);
        }
        float factor = norm_factor(block_sum(squares), cols, eps);
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            int i = k * THREADS + threadIdx.x;
            if (i >= vectors) break;
            reinterpret_cast<float4 *>(out)[i] = scaled(kept[k], factor, reinterpret_cast<const float4 *>(weight)[i]);
        }
        return;
    }
    for (int i = threadIdx.x; i < cols; i += THREADS) {
        float v = x[i];
        if (ADD) x[i] = v = v + y[i];
        squares = fmaf(v, v, squares);
    }
    float factor = norm_factor(block_sum(squares), cols, eps);
    for (int i = threadIdx.x; i < cols; i += THREADS) out[i] = x[i] * factor * weight[i];
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) rms_norm(float *x, const float *weight, float eps, float *out, int cols) {
    wait_for_predecessor();
    let_successor_start();
    size_t row = size_t(blockIdx.x) * cols;
    norm_row<false>(x + row, nullptr, weight, eps, out + row, cols);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    add_rms_norm(float *x, const float *y, const float *weight, float eps, float *out, int cols) {
    wait_for_predecessor();
    let_successor_start();
    size_t row = size_t(blockIdx.x) * cols;
    norm_row<true>(x + row, y + row, weight, eps, out + row, cols);
}

// `heads` over all rows; a head is `head_dim` values of x.
extern "C" __global__ void __launch_bounds__(128) rms_norm_heads(float *x, const float *weight, float eps, int heads, int head_dim) {
    wait_for_predecessor();
    let_successor_start();
    int head = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (head >= heads) return;
    x += size_t(head) * head_dim;
    float squares = 0.0f;
    for (int i = lane; i < head_dim; i += 32) squares = fmaf(x[i], x[i], squares);
    float factor = norm_factor(warp_sum(squares), head_dim, eps);
    for (int i = lane; i < head_dim; i += 32) x[i] = x[i] * factor * weight[i];
}

extern "C" __global__ void __launch_bounds__(256) add(float *x, const float *y, uint64_t values) {
    wait_for_predecessor();
    let_successor_start();
    uint64_t i = blockIdx.x * uint64_t(256) + threadIdx.x;
    if (i < values) x[i] += y[i];
}
