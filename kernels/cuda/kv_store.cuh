// One value into the cache.
#pragma once

#include <cuda_fp16.h>

__device__ inline void store(float value, float *to) { *to = value; }

// Saturates: an infinite value would spoil, as 0 * infinity, rows before it that share a tile of attention.
__device__ inline void store(float value, __half *to) {
    *to = __float2half_rn(value > 65504.0f ? 65504.0f : value < -65504.0f ? -65504.0f : value);
}
