// Activation rows f32 [tokens][cols] to panels of 8 tokens by 256 values (linear/tile.cuh), by quant's own rules:
// Q8_0 and Q8_1 per 32 values (d = largest magnitude / 127, halves away from zero, d and d * sum rounded to f16), Q8_K per
// 256 (the value of largest magnitude becomes -127, halves to even).
//
// F16 and BF16 are rounded to nearest even. A warp converts 256 values of one token, eight per lane. Columns beyond the row become zero; tokens beyond the last are
// left as they are. Limit: 4 bytes read and about 1.1 written per value; a step's activations are in L2.

#include <cuda_bf16.h>

#include "linear/async_copy.cuh"
#include "linear/tile.cuh"

namespace {

constexpr int WARPS = 8;

struct Place {
    const float *x;
    uint8_t *panel;
    // Of the panel; of the row's 256 columns.
    int token, valid;
};

__device__ bool find(Place &place, const float *x, int tokens, int cols, uint8_t *panels, int panel) {
    int col_tiles = (cols + TILE_COLS - 1) / TILE_COLS;
    int at = blockIdx.x * WARPS + threadIdx.x / 32, token = at / col_tiles, col = at % col_tiles;
    if (token >= tokens) return false;
    place.x = x + static_cast<size_t>(token) * cols + col * TILE_COLS;
    place.panel = panels + (static_cast<size_t>(token / PANEL_TOKENS) * col_tiles + col) * panel;
    place.token = token % PANEL_TOKENS;
    place.valid = min(TILE_COLS, cols - col * TILE_COLS);
    return true;
}

// Values 8 lane to 8 lane + 7; rows are multiples of 16 long, so eight values are inside or outside together.
__device__ void load(float (&v)[8], const Place &place) {
    int first = threadIdx.x % 32 * 8;
    float4 a = {}, b = {};
    if (first < place.valid) {
        a = *reinterpret_cast<const float4 *>(place.x + first);
        b = *reinterpret_cast<const float4 *>(place.x + first + 4);
    }
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

// Eight quants of a lane are half a piece.
__device__ void put_quants(const Place &place, const int (&q)[8]) {
    int lane = threadIdx.x % 32;
    auto pack = [](int a, int b, int c, int d) { return (a & 255) | (b & 255) << 8 | (c & 255) << 16 | (d & 255) << 24; };
    uint2 bytes = {uint32_t(pack(q[0], q[1], q[2], q[3])), uint32_t(pack(q[4], q[5], q[6], q[7]))};
    *reinterpret_cast<uint2 *>(place.panel + panel_piece(place.token, lane / 2) + lane % 2 * 8) = bytes;
}

__device__ float rounded_to_half(float x) { return __half2float(__float2half_rn(x)); }

template <Scaling SCALING>
__device__ void quantize_per_32(const Place &place) {
    float v[8];
    load(v, place);
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
    put_quants(place, q);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    int lane = threadIdx.x % 32;
    if (lane % 4 == 0) {
        float *scales = reinterpret_cast<float *>(place.panel + PANEL_QUANTS);
        int at = lane / 4 * PANEL_TOKENS + place.token;
        scales[at] = rounded_to_half(d);
        if constexpr (SCALING == Scaling::PER_32_SUMS) scales[64 + at] = rounded_to_half(float(sum) * d);
    }
}

__device__ void quantize_per_256(const Place &place) {
    float v[8];
    load(v, place);
    int lane = threadIdx.x % 32;
    // The first of the values of largest magnitude, with its sign.
    float max = 0;
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (fabsf(v[i]) > fabsf(max)) max = v[i];
    int from = lane;
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) {
        float other = __shfl_xor_sync(~0u, max, mask);
        int other_from = __shfl_xor_sync(~0u, from, mask);
        if (fabsf(other) > fabsf(max) || (fabsf(other) == fabsf(max) && other_from < from)) max = other, from = other_from;
    }
    float inverse = max == 0 ? 0.0f : -127.0f / max;
    int q[8], sum = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        q[i] = int(fminf(rintf(inverse * v[i]), 127.0f));
        sum += q[i];
    }
    put_quants(place, q);
    sum += __shfl_xor_sync(~0u, sum, 1);
    if (lane % 2 == 0) reinterpret_cast<int16_t *>(place.panel + PANEL_QUANTS + 32)[place.token * 16 + lane / 2] = int16_t(sum);
    if (lane == 0) reinterpret_cast<float *>(place.panel + PANEL_QUANTS)[place.token] = max == 0 ? 0.0f : 1.0f / inverse;
}

template <bool BRAIN>
__device__ void round_to_halves(const Place &place) {
    float v[8];
    load(v, place);
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (BRAIN) {
            words[i] = __bfloat16_as_ushort(__float2bfloat16_rn(v[2 * i])) | __bfloat16_as_ushort(__float2bfloat16_rn(v[2 * i + 1])) << 16;
        } else {
            words[i] = __half_as_ushort(__float2half_rn(v[2 * i])) | __half_as_ushort(__float2half_rn(v[2 * i + 1])) << 16;
        }
    }
    *reinterpret_cast<uint4 *>(place.panel + half_panel_piece(place.token, threadIdx.x % 32)) = {words[0], words[1], words[2], words[3]};
}

}  // namespace

#define QUANTIZE(NAME, SCALING, BODY)                                                                                          \
    extern "C" __global__ void __launch_bounds__(32 * WARPS) NAME(const float *x, int tokens, int cols, uint8_t *panels) {     \
        let_successor_start();                                                                                                \
        wait_for_predecessor();                                                                                               \
        Place place;                                                                                                          \
        if (find(place, x, tokens, cols, panels, panel_bytes(SCALING))) BODY(place);                                          \
    }

QUANTIZE(quantize_q8_0, Scaling::PER_32, quantize_per_32<Scaling::PER_32>)
QUANTIZE(quantize_q8_1, Scaling::PER_32_SUMS, quantize_per_32<Scaling::PER_32_SUMS>)
QUANTIZE(quantize_q8_k, Scaling::PER_256, quantize_per_256)
QUANTIZE(quantize_f16, Scaling::HALVES, round_to_halves<false>)
QUANTIZE(quantize_bf16, Scaling::HALVES, round_to_halves<true>)
