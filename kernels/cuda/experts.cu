// SPDX-License-Identifier: Apache-2.0

// Mixture of experts around its products (experts_*.cu): routing, sorting, and the weighted sum.
//
//   expert_topk_softmax   softmax of the router's logits over all experts; the best `used` experts
//                         in falling order, a tie goes to the lower index; their probabilities
//                         divided by their sum
//   expert_sort_pairs     one block: (row, rank) pairs in the order of experts, divided into groups
//                         of pairs of one expert
//   expert_route          one block: both of these, for few rows
//   expert_route_row_*    one block: the best experts of the only row, which is also quantized
//   expert_quantize_*     the rows of the pairs as activation tiles, in that order, as quantize.cu
//   expert_combine        out[r] = sum of probability times contribution, in rank order; clears the
//                         counts of expert_fused_* (experts/fused.cuh) if there are some
//   expert_matvec_f32, _f16, _bf16   products of float experts: a warp per pair and matrix row
//
//   pairs          0     1     2     3     4     5      pair p is rank p % used of row p / used
//   experts        7     2     2     7     0     2
//   sorted_pairs   4 | 1  2  5 | 0  3                   slot = place in the order of experts
//   groups         e0  e2        e7                     matmul: each expert begins a new activation
//                                                       tile of 8 slots
//
// Grouping decides which blocks read an expert's weights; it never changes a result. Limit:
// latency; expert_combine: bytes, 4 (used + 1) per value.

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "abi/experts.cuh"
#include "experts/routing.cuh"
#include "linear/quantize.cuh"
#include "numeric.cuh"
#include "stream_order.cuh"

namespace {

using experts::choose_experts, experts::ChosenRows, experts::sort_pairs;

__device__ float to_float(float x) { return x; }
__device__ float to_float(__half x) { return __half2float(x); }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// A warp computes one row for one pair. A lane adds columns lane, lane + 32, ...; the lanes' sums
// are added by a butterfly.
template <typename T>
__device__ void float_matvec(const T *weights, const float *x, const uint32_t *experts, int pairs_per_token,
                             int rows, int cols, float *out) {
    wait_for_previous_kernel();
    launch_next_kernel();
    int row = blockIdx.x * EXPERT_MATVEC_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    size_t pair = blockIdx.y;
    weights += (size_t(experts[pair]) * rows + row) * cols;
    x += pair / pairs_per_token * cols;
    float sum = 0.0f;
    for (int i = lane; i < cols; i += 32) sum = fmaf(to_float(weights[i]), x[i], sum);
    sum = warp_sum(sum);
    if (lane == 0) out[pair * rows + row] = sum;
}

// The calling warp quantizes 256 columns of a row.
template <class Quantizer>
__device__ void quantize_tile(const float *row, int cols, int tile, const ActTileRow &to) {
    int col = tile * TILE_COLS + threadIdx.x % 32 * 8;
    float4 a = {}, b = {};
    if (col < cols) {
        const float4 *from = reinterpret_cast<const float4 *>(row + col);
        a = from[0], b = from[1];
    }
    float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    Quantizer::store(v, to);
}

// Quantizes the rows of `x` into the activation tiles of slots: a warp per slot and tile of
// columns.
template <class Quantizer>
__device__ void quantize_pairs(const float *x, const uint32_t *sorted_pairs, int slots, int pairs_per_token,
                               int cols, QuantizedRows quantized) {
    wait_for_previous_kernel();
    launch_next_kernel();
    int col_tiles = (cols + TILE_COLS - 1) / TILE_COLS;
    int at = blockIdx.x * EXPERT_QUANTIZE_WARPS + threadIdx.x / 32, slot = at / col_tiles,
        tile = at % col_tiles;
    if (slot >= slots) return;
    uint32_t pair = sorted_pairs[slot];
    if (pair == NO_PAIR) return;
    quantize_tile<Quantizer>(
        x + size_t(pair / pairs_per_token) * cols, cols, tile,
        act_tile_row(quantized, act_tile_bytes(Quantizer::ACTIVATION), col_tiles, slot, tile));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * EXPERT_TOPK_ROWS)
    expert_topk_softmax(const float *logits, int rows, int count, int used, uint32_t *experts,
                        float *expert_weights) {
    wait_for_previous_kernel();
    launch_next_kernel();
    int row = blockIdx.x * EXPERT_TOPK_ROWS + threadIdx.x / 32;
    if (row >= rows) return;
    choose_experts(logits, row, count, used, experts, expert_weights);
}
CHECK_SIGNATURE(expert_topk_softmax, ExpertTopkSoftmax);

extern "C" __global__ void __launch_bounds__(EXPERT_SORT_THREADS)
    expert_sort_pairs(const uint32_t *experts, int pairs, ExpertPairOrder order) {
    constexpr int WARPS = EXPERT_SORT_THREADS / 32;
    __shared__ uint16_t before[WARPS][EXPERTS_MAX];
    __shared__ uint32_t first_slot[EXPERTS_MAX];
    __shared__ uint64_t warp_totals[EXPERTS_MAX / 32];
    wait_for_previous_kernel();
    launch_next_kernel();
    sort_pairs<WARPS>(experts, pairs, order, before, first_slot, warp_totals);
}
CHECK_SIGNATURE(expert_sort_pairs, ExpertSortPairs);

// Both of the above for up to EXPERT_ROUTE_ROWS rows, in one launch.
extern "C" __global__ void __launch_bounds__(EXPERT_ROUTE_THREADS)
    expert_route(const float *logits, int rows, int used, uint32_t *experts, float *expert_weights,
                 ExpertPairOrder order) {
    constexpr int WARPS = EXPERT_ROUTE_THREADS / 32;
    static_assert(EXPERT_ROUTE_ROWS <= WARPS, "a warp per row");
    __shared__ ChosenRows<EXPERT_ROUTE_ROWS> choices;
    choices.clear();
    wait_for_previous_kernel();
    launch_next_kernel();
    int row = threadIdx.x / 32;
    if (row < rows)
        choose_experts(logits, row, order.expert_count, used, experts, expert_weights,
                       [&](int rank, uint32_t expert) { choices.choose(row, rank, expert); });
    choices.sort<WARPS>(used, order);
}
CHECK_SIGNATURE(expert_route, ExpertRoute);

// The first warp chooses, the others quantize.
template <class Quantizer>
__device__ void route_row(const float *logits, int count, int used, uint32_t *experts, float *expert_weights,
                          const float *x, int cols, QuantizedRows quantized) {
    constexpr int QUANTIZING = EXPERT_ROUTE_THREADS / 32 - 1;
    wait_for_previous_kernel();
    launch_next_kernel();
    const int warp = threadIdx.x / 32;
    if (warp == 0) return choose_experts(logits, 0, count, used, experts, expert_weights);
    const int col_tiles = (cols + TILE_COLS - 1) / TILE_COLS;
    for (int tile = warp - 1; tile < col_tiles; tile += QUANTIZING)
        quantize_tile<Quantizer>(
            x, cols, tile,
            act_tile_row(quantized, act_tile_bytes(Quantizer::ACTIVATION), col_tiles, 0, tile));
}

#define ROUTE_ROW_KERNEL(NAME, QUANTIZER)                                                                   \
    extern "C" __global__ void __launch_bounds__(EXPERT_ROUTE_THREADS)                                      \
        expert_route_row_##NAME(const float *logits, int count, int used, uint32_t *experts,                \
                                float *expert_weights, const float *x, int cols, QuantizedRows quantized) { \
        route_row<QUANTIZER>(logits, count, used, experts, expert_weights, x, cols, quantized);             \
    }                                                                                                       \
    CHECK_SIGNATURE(expert_route_row_##NAME, ExpertRouteRow);
ROUTE_ROW_KERNEL(q8_0, QuantizePer32<ActivationFormat::Q8_0>)
ROUTE_ROW_KERNEL(q8_1, QuantizePer32<ActivationFormat::Q8_1>)
ROUTE_ROW_KERNEL(q8_k, QuantizePer256)

extern "C" __global__ void __launch_bounds__(EXPERT_COMBINE_THREADS)
    expert_combine(const float *contributions, const float *expert_weights, int used, int cols, float *out,
                   uint32_t *finished) {
    // The next kernel is mostly a norm, which lets a product start early. So that product may copy
    // weights while this kernel waits.
    launch_next_kernel();
    wait_for_previous_kernel();
    size_t row = blockIdx.x;
    int col = blockIdx.y * EXPERT_COMBINE_THREADS + threadIdx.x;
    static_assert(EXPERT_FUSED_PAIRS_MAX <= EXPERT_COMBINE_THREADS, "the first block clears all");
    if (finished != nullptr && row == 0 && col < EXPERT_FUSED_PAIRS_MAX)
        finished[col * EXPERT_FUSED_COUNT_STRIDE] = 0;
    if (col >= cols) return;
    contributions += row * used * cols + col;
    expert_weights += row * used;
    float sum = 0.0f;
#pragma unroll 8
    for (int rank = 0; rank < used; rank++) sum += expert_weights[rank] * contributions[size_t(rank) * cols];
    out[row * cols + col] = sum;
}
CHECK_SIGNATURE(expert_combine, ExpertCombine);

#define QUANTIZE_PAIRS_KERNEL(NAME, QUANTIZER)                                                               \
    extern "C" __global__ void __launch_bounds__(32 * EXPERT_QUANTIZE_WARPS)                                 \
        expert_quantize_##NAME(const float *x, const uint32_t *sorted_pairs, int slots, int pairs_per_token, \
                               int cols, QuantizedRows quantized) {                                          \
        quantize_pairs<QUANTIZER>(x, sorted_pairs, slots, pairs_per_token, cols, quantized);                 \
    }                                                                                                        \
    CHECK_SIGNATURE(expert_quantize_##NAME, ExpertQuantize);
QUANTIZE_PAIRS_KERNEL(q8_0, QuantizePer32<ActivationFormat::Q8_0>)
QUANTIZE_PAIRS_KERNEL(q8_1, QuantizePer32<ActivationFormat::Q8_1>)
QUANTIZE_PAIRS_KERNEL(q8_k, QuantizePer256)

#define FLOAT_MATVEC_KERNEL(NAME, TYPE, SIGNATURE)                                         \
    extern "C" __global__ void __launch_bounds__(256)                                      \
        expert_matvec_##NAME(const TYPE *weights, const float *x, const uint32_t *experts, \
                             int pairs_per_token, int rows, int cols, float *out) {        \
        float_matvec<TYPE>(weights, x, experts, pairs_per_token, rows, cols, out);         \
    }                                                                                      \
    CHECK_SIGNATURE(expert_matvec_##NAME, SIGNATURE);
FLOAT_MATVEC_KERNEL(f32, float, ExpertMatvecF32)
FLOAT_MATVEC_KERNEL(f16, __half, ExpertMatvecF16)
FLOAT_MATVEC_KERNEL(bf16, __nv_bfloat16, ExpertMatvecBF16)
