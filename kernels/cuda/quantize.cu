// Activation rows f32 [tokens][cols] to panels of 8 tokens by 256 values (linear/tile.cuh), by quant's own rules:
// Q8_0 and Q8_1 per 32 values (d = largest magnitude / 127, halves away from zero, d and d * sum rounded to f16), Q8_K per
// 256 (the value of largest magnitude becomes -127, halves to even).
//
// For F16 and BF16 weights a value becomes the sum of two f16 or three bf16, each the nearest to what is left (even at ties).
// A warp converts 256 values of one token, eight per lane. Columns beyond the row become zero; tokens beyond the last are
// left as they are. Limit: 4 bytes read and about 1.1 written per value (4 and 6 for floats); a step's activations are in L2.

#include <cuda_bf16.h>

#include "linear/async_copy.cuh"
#include "linear/quantize.cuh"

namespace {

constexpr int WARPS = 8;

// What a warp converts: 256 columns of a token.
struct Place {
    const float *x;
    PanelPlace to;
    // Of the row's 256 columns.
    int valid;
};

__device__ bool find(Place &place, const float *x, int tokens, int cols, uint8_t *panels, int panel) {
    int col_tiles = (cols + TILE_COLS - 1) / TILE_COLS;
    int at = blockIdx.x * WARPS + threadIdx.x / 32, token = at / col_tiles, col = at % col_tiles;
    if (token >= tokens) return false;
    place.x = x + static_cast<size_t>(token) * cols + col * TILE_COLS;
    place.to = panel_place(panels, panel, col_tiles, token, col);
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

template <class Rounding>
__device__ void round_values(const Place &place) {
    float v[8];
    load(v, place);
    Rounding::put(v, place.to);
}

// Writes part `part` of the lane's eight values.
__device__ void put_part(const PanelPlace &to, int part, const uint16_t (&h)[8]) {
    uint4 words = {h[0] | uint32_t(h[1]) << 16, h[2] | uint32_t(h[3]) << 16, h[4] | uint32_t(h[5]) << 16, h[6] | uint32_t(h[7]) << 16};
    *reinterpret_cast<uint4 *>(to.panel + part * PANEL_PART + half_panel_piece(to.token, threadIdx.x % 32)) = words;
}

// What the rounding of a part leaves over is exact in f32, and is the next part's matter.
__device__ void round_to_bf16_parts(const Place &place) {
    float v[8];
    load(v, place);
#pragma unroll
    for (int part = 0; part < parts_of(Scaling::BF16_PARTS); part++) {
        uint16_t h[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            __nv_bfloat16 rounded = __float2bfloat16_rn(v[i]);
            h[i] = __bfloat16_as_ushort(rounded);
            v[i] -= __bfloat162float(rounded);
        }
        put_part(place.to, part, h);
    }
}

// Values are scaled so that the largest lies between 2^13 and 2^14: nothing overflows, and what is small enough to lose bits
// has none that count beside the largest.
__device__ void round_to_f16_parts(const Place &place) {
    float v[8];
    load(v, place);
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) largest = fmaxf(largest, fabsf(v[i]));
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
    int shift = min(13 + 127 - (__float_as_int(largest) >> 23), 126);
    float factor = __int_as_float((127 + shift) << 23);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] *= factor;
#pragma unroll
    for (int part = 0; part < parts_of(Scaling::F16_PARTS); part++) {
        uint16_t h[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            __half rounded = __float2half_rn(v[i]);
            h[i] = __half_as_ushort(rounded);
            v[i] -= __half2float(rounded);
        }
        put_part(place.to, part, h);
    }
    float *scales = reinterpret_cast<float *>(place.to.panel + parts_of(Scaling::F16_PARTS) * PANEL_PART);
    if (threadIdx.x % 32 == 0) scales[place.to.token] = __int_as_float((127 - shift) << 23);
}

}  // namespace

#define QUANTIZE(NAME, SCALING, BODY)                                                                                          \
    extern "C" __global__ void __launch_bounds__(32 * WARPS) NAME(const float *x, int tokens, int cols, uint8_t *panels) {     \
        let_successor_start();                                                                                                \
        wait_for_predecessor();                                                                                               \
        Place place;                                                                                                          \
        if (find(place, x, tokens, cols, panels, panel_bytes(SCALING))) BODY(place);                                          \
    }

QUANTIZE(quantize_q8_0, Scaling::PER_32, round_values<RoundPer32<Scaling::PER_32>>)
QUANTIZE(quantize_q8_1, Scaling::PER_32_SUMS, round_values<RoundPer32<Scaling::PER_32_SUMS>>)
QUANTIZE(quantize_q8_k, Scaling::PER_256, round_values<RoundPer256>)
QUANTIZE(quantize_f16, Scaling::F16_PARTS, round_to_f16_parts)
QUANTIZE(quantize_bf16, Scaling::BF16_PARTS, round_to_bf16_parts)
