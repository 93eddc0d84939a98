// SPDX-License-Identifier: Apache-2.0

// The types of the KV cache: conversion of values for storing, and reading them one by one.
//
// Stored values saturate at the largest finite operand of a product. A masked key has weight 0, and
// 0 * infinity is NaN: an infinite key or value would spoil earlier rows that share a tile of
// attention with it. A NaN stays a NaN.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kv_layer.cuh"

__device__ inline float clamped(float value, float bound) {
    return value > bound ? bound : value < -bound ? -bound : value;
}

__device__ inline void store(float value, float *to) { *to = value; }

__device__ inline void store(float value, __half *to) { *to = __float2half_rn(clamped(value, 65504.0f)); }

__device__ inline void store(float value, __nv_bfloat16 *to) {
    *to = __float2bfloat16_rn(clamped(value, 0x1.fep127f));
}

// The largest magnitude in q8_0: its scale is 515.5, the largest one of which scale times 127 is
// finite in f16.
constexpr float Q8_LARGEST = 127.0f * 515.5f;

// Stores part `part` of a token's head: up to 32 values that share a scale, one per lane of a warp.
// `value` is 0 in the lanes from `count` on. The rule is `quantize_q8` in
// crates/quant/src/legacy.rs, bit for bit.
__device__ inline void store_q8(float value, int count, uint8_t *head, uint32_t block_tokens, uint32_t token,
                                int dim, int part) {
    const int lane = threadIdx.x % 32;
    value = clamped(value, Q8_LARGEST);
    // Magnitudes compare as integers. The integer of a NaN is above all others, so the scale
    // becomes NaN.
    uint32_t largest = __reduce_max_sync(~0u, __float_as_uint(value) & 0x7FFFFFFF);
    float d = __uint_as_float(largest) / 127.0f, inverse = d == 0.0f ? 0.0f : 1.0f / d;
    // The conversion makes 0 of a NaN.
    int q = __float2int_rz(roundf(value * inverse));
    if (lane < count)
        head[size_t(token) * dim + 32 * part + lane] = static_cast<uint8_t>(min(max(q, -128), 127));
    if (lane == 0)
        reinterpret_cast<__half *>(head +
                                   q8_scales_at(block_tokens, dim))[size_t(token) * q8_scales(dim) + part] =
            __float2half_rn(d);
}

// Reads a token's values of one head. `head` points to the head's keys or values in the token's
// block.
template <typename T>
struct KvReaderFloat {
    const T *values;

    __device__ __forceinline__ KvReaderFloat(const KvLayerAddress &, const uint8_t *head, uint32_t token,
                                             int dim)
        : values(reinterpret_cast<const T *>(head) + size_t(token) * dim) {}

    __device__ __forceinline__ float operator[](int i) const { return float(values[i]); }
};

struct KvReaderQ8_0 {
    const int8_t *quants;
    const __half *scales;

    __device__ __forceinline__ KvReaderQ8_0(const KvLayerAddress &kv, const uint8_t *head, uint32_t token,
                                            int dim)
        : quants(reinterpret_cast<const int8_t *>(head) + size_t(token) * dim),
          scales(reinterpret_cast<const __half *>(head + q8_scales_at(kv.block_tokens, dim)) +
                 size_t(token) * q8_scales(dim)) {}

    __device__ __forceinline__ float operator[](int i) const {
        return float(quants[i]) * __half2float(scales[i / 32]);
    }
};
