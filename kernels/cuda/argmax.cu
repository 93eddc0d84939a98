// SPDX-License-Identifier: Apache-2.0

// out[r] = the index of the largest value of row r; of equal values, the lowest index. NO_BEST for
// a row that holds a NaN or whose largest value is infinite.
//
//   x [rows][cols] f32, out [rows]; grid: rows, one thread block each
//   a thread: values t, t + THREADS, ...  ->  warp: butterfly  ->  first warp: the 32 warps' values
//
// Limit: bytes, 4 per value, at the rate at which one multiprocessor reads and compares. Measured:
// 24 us (25 GB/s) for the logits of 152,000 tokens, for as many rows as there are multiprocessors.

#include <cstdint>

#include "abi/elementwise.cuh"
#include "stream_order.cuh"

namespace {

constexpr int THREADS = ARGMAX_THREADS;
constexpr uint32_t NO_BEST = 0xFFFFFFFF;

struct Candidate {
    float value;
    uint32_t index;
};

// Whether `b` ranks before `a`. A NaN ranks first, so that the result shows it.
__device__ bool before(const Candidate &b, const Candidate &a) {
    bool b_nan = b.value != b.value, a_nan = a.value != a.value;
    if (a_nan || b_nan) return b_nan && !a_nan;
    return b.value > a.value || (b.value == a.value && b.index < a.index);
}

__device__ Candidate best_of_warp(Candidate best) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        Candidate other = {__shfl_xor_sync(~0u, best.value, distance),
                           __shfl_xor_sync(~0u, best.index, distance)};
        if (before(other, best)) best = other;
    }
    return best;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    argmax_rows(const float *x, uint32_t cols, uint32_t *out) {
    __shared__ Candidate warp_best[THREADS / 32];
    wait_for_previous_kernel();
    launch_next_kernel();
    x += size_t(blockIdx.x) * cols;
    Candidate best = {-INFINITY, NO_BEST - 1};
    // A thread has this many independent loads in flight.
    constexpr int ROUND = 4;
    for (uint32_t first = threadIdx.x; first < cols; first += ROUND * THREADS) {
        float v[ROUND];
#pragma unroll
        for (int k = 0; k < ROUND; k++)
            v[k] = first + k * THREADS < cols ? x[first + k * THREADS] : -INFINITY;
#pragma unroll
        for (int k = 0; k < ROUND; k++) {
            Candidate other = {v[k], first + k * THREADS};
            if (first + k * THREADS < cols && before(other, best)) best = other;
        }
    }
    best = best_of_warp(best);
    if (threadIdx.x % 32 == 0) warp_best[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    best = best_of_warp(warp_best[threadIdx.x]);
    if (threadIdx.x == 0) out[blockIdx.x] = isfinite(best.value) ? best.index : NO_BEST;
}
CHECK_SIGNATURE(argmax_rows, ArgmaxRows);
