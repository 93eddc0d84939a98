// Activation rows f32 [tokens][cols] to panels of 8 tokens by 256 values (linear/tile.cuh), by quant's own rules:
// Q8_0 and Q8_1 per 32 values (d = largest magnitude / 127, halves away from zero, d and d * sum rounded to f16), Q8_K per
// 256 (the value of largest magnitude becomes -127, halves to even).
//
// F16 and BF16 are rounded to nearest even. A warp converts 256 values of one token, eight per lane. Columns beyond the row become zero; tokens beyond the last are
// left as they are. Limit: 4 bytes read and about 1.1 written per value; a step's activations are in L2.

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
    *reinterpret_cast<uint4 *>(place.to.panel + half_panel_piece(place.to.token, threadIdx.x % 32)) = {words[0], words[1], words[2], words[3]};
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
QUANTIZE(quantize_f16, Scaling::HALVES, round_to_halves<false>)
QUANTIZE(quantize_bf16, Scaling::HALVES, round_to_halves<true>)
