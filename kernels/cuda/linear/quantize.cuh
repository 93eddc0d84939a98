// SPDX-License-Identifier: Apache-2.0

// Quantizes 256 values of one token into an activation tile (tile.cuh), eight values per lane of a
// warp, by the rules of crates/quant:
//
//   Q8_0, Q8_1  per 32 values: d = largest magnitude / 127, ties away from zero; d and d * sum are
//               rounded to f16
//   Q8_K        per 256 values: the value of largest magnitude becomes -127, ties to even
//   F16, BF16   each value: the nearest, ties to even; F16 saturates at 65,504
//
// Lane l has values 8 l to 8 l + 7; columns beyond the row are zero. The code is not in
// quantize.cu, because kernels that compute activations also quantize them. `Row` says where the
// values go: to an activation tile (ActTileRow), or to a row in shared memory (ActRow).

#pragma once

#include <cuda_bf16.h>

#include "tile.cuh"

struct ActTileRow {
    uint8_t *act_tile;
    // Token of the activation tile.
    int token;
    // Or null.
    uint8_t *f16_sums;

    __device__ uint8_t *vector(int p) const { return act_tile + act_tile_offset(token, p); }
    // Of a block of 32 columns.
    __device__ float *block_scale(int block) const {
        return reinterpret_cast<float *>(act_tile + ACT_TILE_QUANT_BYTES) + block * ACT_TILE_TOKENS + token;
    }
    __device__ float *block_sum(int block) const { return block_scale(8 + block); }
    // Of 256 columns.
    __device__ float *row_scale() const {
        return reinterpret_cast<float *>(act_tile + ACT_TILE_QUANT_BYTES) + token;
    }
    __device__ int16_t *row_sums() const {
        return reinterpret_cast<int16_t *>(act_tile + ACT_TILE_QUANT_BYTES + 32) + token * 16;
    }
};

// An activation row (tile.cuh) in shared memory.
template <ActivationFormat KIND>
struct ActRow {
    uint8_t *row;

    __device__ uint8_t *vector(int p) const { return row + 16 * p; }
    __device__ float *block_scale(int block) const {
        return reinterpret_cast<float *>(row + ACT_ROW_SCALES) + block;
    }
    __device__ float *block_sum(int block) const {
        return reinterpret_cast<float *>(row + act_row_sums(KIND)) + block;
    }
    __device__ float *row_scale() const { return reinterpret_cast<float *>(row + ACT_ROW_SCALES); }
    __device__ int16_t *row_sums() const { return reinterpret_cast<int16_t *>(row + act_row_sums(KIND)); }
};

// Where `token` is in column tile `col`, in activation tiles of `bytes`.
__device__ inline ActTileRow act_tile_row(const QuantizedRows &rows, int bytes, int col_tiles, int token,
                                          int col) {
    size_t group = token / ACT_TILE_TOKENS, groups = rows.f16_groups;
    ActTileRow row = {rows.act_tiles + (group * col_tiles + col) * bytes, token % ACT_TILE_TOKENS};
    if (rows.f16_sums != nullptr) row.f16_sums = rows.f16_sums + (col * groups + group) * F16_SUMS_BYTES;
    return row;
}

// The eight quants of a lane are half of a 16-byte vector.
template <class Row>
__device__ inline void store_quants(const Row &row, const int (&q)[8]) {
    int lane = threadIdx.x % 32;
    auto pack = [](int a, int b, int c, int d) {
        return (a & 255) | (b & 255) << 8 | (c & 255) << 16 | (d & 255) << 24;
    };
    uint2 bytes = {uint32_t(pack(q[0], q[1], q[2], q[3])), uint32_t(pack(q[4], q[5], q[6], q[7]))};
    *reinterpret_cast<uint2 *>(row.vector(lane / 2) + lane % 2 * 8) = bytes;
}

__device__ inline float rounded_to_half(float x) { return __half2float(__float2half_rn(x)); }

template <ActivationFormat KIND>
struct QuantizePer32 {
    static constexpr ActivationFormat ACTIVATION = KIND;

    template <class Row>
    static __device__ void store(const float (&v)[8], const Row &row) {
        float largest = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) largest = fmaxf(largest, fabsf(v[i]));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        float d = largest / 127.0f, inverse = d == 0 ? 0.0f : 1.0f / d;
        int q[8], sum = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            q[i] = int(roundf(v[i] * inverse));
            sum += q[i];
        }
        store_quants(row, q);
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        int lane = threadIdx.x % 32;
        if (lane % 4 == 0) {
            *row.block_scale(lane / 4) = rounded_to_half(d);
            if constexpr (ACTIVATION == ActivationFormat::Q8_1)
                *row.block_sum(lane / 4) = rounded_to_half(float(sum) * d);
        }
    }
};

struct QuantizePer256 {
    static constexpr ActivationFormat ACTIVATION = ActivationFormat::Q8_K;

    static __device__ void store_f16(const ActRow<ACTIVATION> &, int, float) {}

    // `sum` is that of the lane's 16 columns.
    static __device__ void store_f16(const ActTileRow &row, int sum, float scale) {
        if (row.f16_sums == nullptr) return;
        int lane = threadIdx.x % 32;
        if (lane % 2 == 0)
            *reinterpret_cast<__half *>(row.f16_sums + lane / 16 * 128 + row.token * 16 + lane / 2 % 8 * 2) =
                __int2half_rn(sum);
        if (lane == 0)
            *reinterpret_cast<float *>(row.f16_sums + F16_SUMS_SCALES + row.token * sizeof(float)) = scale;
    }

    template <class Row>
    static __device__ void store(const float (&v)[8], const Row &row) {
        int lane = threadIdx.x % 32;
        // The first of the values of largest magnitude, with its sign.
        float max = 0;
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (fabsf(v[i]) > fabsf(max)) max = v[i];
        // Magnitudes are in the order of their bits, since none is NaN.
        uint32_t magnitude = __float_as_uint(fabsf(max)), largest = __reduce_max_sync(~0u, magnitude);
        max = __shfl_sync(~0u, max, __ffs(__ballot_sync(~0u, magnitude == largest)) - 1);
        float inverse = max == 0 ? 0.0f : -127.0f / max;
        int q[8], sum = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            q[i] = int(fminf(rintf(inverse * v[i]), 127.0f));
            sum += q[i];
        }
        store_quants(row, q);
        sum += __shfl_xor_sync(~0u, sum, 1);
        if (lane % 2 == 0) row.row_sums()[lane / 2] = int16_t(sum);
        float scale = max == 0 ? 0.0f : 1.0f / inverse;
        if (lane == 0) *row.row_scale() = scale;
        store_f16(row, sum, scale);
    }
};

template <bool IS_BF16>
struct RoundTo16 {
    static constexpr ActivationFormat ACTIVATION = IS_BF16 ? ActivationFormat::BF16 : ActivationFormat::F16;
    static constexpr float F16_MAX = 65504.0f;

    static __device__ uint16_t round(float x) {
        if constexpr (IS_BF16) return __bfloat16_as_ushort(__float2bfloat16_rn(x));
        // NaN stays NaN.
        x = x > F16_MAX ? F16_MAX : x < -F16_MAX ? -F16_MAX : x;
        return __half_as_ushort(__float2half_rn(x));
    }

    static __device__ void store(const float (&v)[8], const ActTileRow &row) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = round(v[2 * i]) | uint32_t(round(v[2 * i + 1])) << 16;
        *reinterpret_cast<uint4 *>(row.vector(threadIdx.x % 32)) = {words[0], words[1], words[2], words[3]};
    }
};

using RoundToF16 = RoundTo16<false>;
using RoundToBF16 = RoundTo16<true>;

// The quantizer of an activation format of quants.
template <ActivationFormat KIND>
struct QuantizerOf {
    using Type = QuantizePer32<KIND>;
};
template <>
struct QuantizerOf<ActivationFormat::Q8_K> {
    using Type = QuantizePer256;
};
