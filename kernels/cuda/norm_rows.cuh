// SPDX-License-Identifier: Apache-2.0

// What all kernels that normalise rows share, so that their bits are equal.
//
// Order of a row's sum of squares: thread t of NORM_THREADS takes vectors t, t + NORM_THREADS, ...
// of eight values; the lanes of a warp add their sums by a butterfly; the warps' sums are added in
// order. A kernel with fewer threads computes the sums of several such threads in each of its own.

#pragma once

#include "abi/elementwise.cuh"
#include "numeric.cuh"

namespace norm_rows {

constexpr int WARPS = NORM_THREADS / 32;
constexpr int VECTOR = 8;

__device__ inline float add_in_order(const float *sums) {
    float total = sums[0];
#pragma unroll
    for (int warp = 1; warp < WARPS; warp++) total += sums[warp];
    return total;
}

__device__ inline float norm_factor(float squares, int cols, float eps) {
    return __frcp_rn(__fsqrt_rn(__fdiv_rn(squares, static_cast<float>(cols)) + eps));
}

__device__ inline void load(float (&v)[VECTOR], const float *from) {
    float4 a = reinterpret_cast<const float4 *>(from)[0], b = reinterpret_cast<const float4 *>(from)[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

__device__ inline void store(float *to, const float (&v)[VECTOR]) {
    reinterpret_cast<float4 *>(to)[0] = make_float4(v[0], v[1], v[2], v[3]);
    reinterpret_cast<float4 *>(to)[1] = make_float4(v[4], v[5], v[6], v[7]);
}

}  // namespace norm_rows
