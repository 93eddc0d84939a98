// SPDX-License-Identifier: Apache-2.0

// Arithmetic that several kernels share, so that it rounds alike in all of them. The sources are
// compiled with --fmad=false: a product and a sum are fused only where the source says fmaf.
#pragma once

#include <cstdint>

// 2^x by the hardware's instruction: relative error 2^-22, exact at 0, and 0 at minus infinity.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// e^x with a relative error below 2e-7. The polynomial is the host backend's (Cephes' expf).
// Arguments are clamped to a range in which the result is a normal number.
__device__ __forceinline__ float exp_exact(float x) {
    x = fmaxf(fminf(x, 88.0f), -87.0f);
    float n = rintf(x * 1.44269504f);
    float r = fmaf(n, -0.693359375f, x);
    r = fmaf(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = fmaf(p, r, 1.3981999507e-3f);
    p = fmaf(p, r, 8.3334519073e-3f);
    p = fmaf(p, r, 4.1665795894e-2f);
    p = fmaf(p, r, 1.6666665459e-1f);
    p = fmaf(p, r, 5.0000001201e-1f);
    float value = fmaf(r * r, p, r) + 1.0f;
    return __int_as_float(__float_as_int(value) + (static_cast<int>(n) << 23));
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
    return x;
}
