// SPDX-License-Identifier: Apache-2.0

// Mixture of experts around its products (experts_*.cu): routing, sorting, and the weighted sum.
//
//   expert_topk_softmax   a warp per row: softmax of the router's logits over all experts; the best
//                         `used` experts in falling order, a tie goes to the lower index; their
//                         probabilities divided by their sum
//   expert_sort_pairs     one block: (row, rank) pairs in the order of experts, divided into groups
//                         of pairs of one expert
//   expert_quantize_*     the rows of the pairs as activation tiles, in that order, as quantize.cu
//   expert_combine        out[r] = sum of probability times contribution, in rank order
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
#include "linear/quantize.cuh"
#include "numeric.cuh"
#include "stream_order.cuh"

namespace {

// Smallest divisor of the renormalisation: the smallest normal f16, as in ops::choose_experts.
constexpr float PROBABILITY_SUM_MIN = 1.0f / 16384.0f;
// Experts per lane of a warp: 16, so a layer has up to 512.
constexpr int EXPERTS_PER_LANE = EXPERTS_MAX / 32;
constexpr int GROUP_THREADS = EXPERT_SORT_THREADS;
// Marks a slot without a pair in `sorted_pairs`: a slot behind an expert's last pair, up to the end
// of that pair's activation tile, or behind the last expert.
constexpr uint32_t NO_PAIR = ~0u;

__device__ float to_float(float x) { return x; }
__device__ float to_float(__half x) { return __half2float(x); }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// A warp computes one row for one pair. A lane adds columns lane, lane + 32, ...; the lanes' sums
// are added by a butterfly.
template <typename T>
__device__ void float_matvec(const T *weights, const float *x, const uint32_t *experts, int pairs_per_token,
                             int rows, int cols, float *out) {
    launch_next_kernel();
    wait_for_previous_kernel();
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

// Quantizes the rows of `x` into the activation tiles of slots: a warp per slot and tile of
// columns.
template <class Quantizer>
__device__ void quantize_pairs(const float *x, const uint32_t *sorted_pairs, int slots, int pairs_per_token,
                               int cols, QuantizedRows quantized) {
    launch_next_kernel();
    wait_for_previous_kernel();
    int col_tiles = (cols + TILE_COLS - 1) / TILE_COLS;
    int at = blockIdx.x * EXPERT_QUANTIZE_WARPS + threadIdx.x / 32, slot = at / col_tiles,
        tile = at % col_tiles;
    if (slot >= slots) return;
    uint32_t pair = sorted_pairs[slot];
    if (pair == NO_PAIR) return;
    int col = tile * TILE_COLS + threadIdx.x % 32 * 8;
    float4 a = {}, b = {};
    if (col < cols) {
        const float4 *from =
            reinterpret_cast<const float4 *>(x + size_t(pair / pairs_per_token) * cols + col);
        a = from[0], b = from[1];
    }
    float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    Quantizer::store(v,
                     act_tile_row(quantized, act_tile_bytes(Quantizer::ACTIVATION), col_tiles, slot, tile));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * EXPERT_TOPK_ROWS)
    expert_topk_softmax(const float *logits, int rows, int count, int used, uint32_t *experts,
                        float *expert_weights) {
    launch_next_kernel();
    wait_for_previous_kernel();
    int row = blockIdx.x * EXPERT_TOPK_ROWS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    logits += size_t(row) * count;
    float probability[EXPERTS_PER_LANE];
    float largest = -INFINITY;
#pragma unroll
    for (int k = 0; k < EXPERTS_PER_LANE; k++) {
        int expert = k * 32 + lane;
        probability[k] = expert < count ? logits[expert] : -INFINITY;
        largest = fmaxf(largest, probability[k]);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
    double weights[EXPERTS_PER_LANE], total = 0.0;
#pragma unroll
    for (int k = 0; k < EXPERTS_PER_LANE; k++) {
        weights[k] = k * 32 + lane < count ? exp(double(probability[k] - largest)) : 0.0;
        total += weights[k];
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) total += __shfl_xor_sync(~0u, total, distance);
#pragma unroll
    for (int k = 0; k < EXPERTS_PER_LANE; k++)
        probability[k] = k * 32 + lane < count ? float(weights[k] / total) : -1.0f;

    float own = 0.0f, sum = 0.0f;
    uint32_t own_expert = 0;
    for (int rank = 0; rank < used; rank++) {
        // A NaN ranks first, so that the result shows it.
        float best = -2.0f;
        uint32_t best_expert = 0;
#pragma unroll
        for (int k = 0; k < EXPERTS_PER_LANE; k++) {
            float key = probability[k] != probability[k] ? 2.0f : probability[k];
            if (key > best) best = key, best_expert = k * 32 + lane;
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            float other = __shfl_xor_sync(~0u, best, distance);
            uint32_t other_expert = __shfl_xor_sync(~0u, best_expert, distance);
            if (other > best || (other == best && other_expert < best_expert))
                best = other, best_expert = other_expert;
        }
        float chosen = best == 2.0f ? NAN : best;
#pragma unroll
        for (int k = 0; k < EXPERTS_PER_LANE; k++)
            if (k * 32 + lane == int(best_expert)) probability[k] = -1.5f;
        sum += chosen;
        if (lane == rank % 32) own = chosen, own_expert = best_expert;
        // A lane keeps one rank of every 32; the warp stores them together.
        if (rank % 32 == 31 || rank + 1 == used) {
            int first = rank / 32 * 32;
            if (first + lane <= rank) {
                experts[size_t(row) * used + first + lane] = own_expert;
                expert_weights[size_t(row) * used + first + lane] = own;
            }
        }
    }
    __syncwarp();
    float divisor = sum != sum ? sum : fmaxf(sum, PROBABILITY_SUM_MIN);
    for (int rank = lane; rank < used; rank += 32) {
        float *expert_weight = expert_weights + size_t(row) * used + rank;
        *expert_weight = __fdiv_rn(*expert_weight, divisor);
    }
}

CHECK_SIGNATURE(expert_topk_softmax, ExpertTopkSoftmax);

// Sorts pairs by expert, stably. The slots of an expert begin at a multiple of `align`.
// `sorted_pairs` receives the pair of each of `slots` slots, or NO_PAIR; `groups` receives the
// experts' groups of at most `group_pairs` pairs, and `*group_count` their number.
//
//   each warp counts a run of pairs, by expert
//   thread e: sums expert e's counts over the warps; a scan over experts gives slots and groups
//   each warp walks its run again, and stores each pair in its slot
extern "C" __global__ void __launch_bounds__(GROUP_THREADS)
    expert_sort_pairs(const uint32_t *experts, int pairs, int count, int group_pairs, int align, int slots,
                      uint32_t *sorted_pairs, ExpertGroup *groups, uint32_t *group_count) {
    constexpr int WARPS = GROUP_THREADS / 32;
    // First, how many pairs of an expert a warp's run has. Later, how many pairs of the expert
    // stand before the next one of that run.
    __shared__ uint16_t before[WARPS][EXPERTS_MAX];
    __shared__ uint32_t first_slot[EXPERTS_MAX];
    __shared__ uint64_t warp_totals[EXPERTS_MAX / 32];
    launch_next_kernel();
    wait_for_previous_kernel();
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int run = (pairs + GROUP_THREADS - 1) / GROUP_THREADS * 32, first = warp * run,
        last = min(first + run, pairs);
    // Walks the warp's run and calls `use(pair, expert, place)`, where `place` counts the pairs of
    // the expert that stand before this one.
    auto walk = [&](auto use) {
        for (int at = first; at < last; at += 32) {
            bool there = at + lane < last;
            uint32_t expert = there ? experts[at + lane] : EXPERTS_MAX;
            uint32_t same = __match_any_sync(~0u, expert);
            int place = __popc(same & ((1u << lane) - 1));
            uint32_t earlier = there ? before[warp][expert] : 0;
            if (there) use(at + lane, expert, earlier + place);
            __syncwarp();
            if (there && place == 0) before[warp][expert] = earlier + __popc(same);
            __syncwarp();
        }
    };
    for (int e = lane; e < count; e += 32) before[warp][e] = 0;
    __syncwarp();
    walk([](int, uint32_t, uint32_t) {});
    __syncthreads();

    // Thread e has expert e. A word holds the number of its groups (upper half) and of its slots
    // (lower half), so that one scan adds up both.
    int e = threadIdx.x;
    uint32_t total = 0;
    if (e < count) {
#pragma unroll 8
        for (int w = 0; w < WARPS; w++) {
            uint32_t found = before[w][e];
            before[w][e] = total;
            total += found;
        }
    }
    uint32_t padded = (total + align - 1) / align * align,
             own_groups = (total + group_pairs - 1) / group_pairs;
    uint64_t own = uint64_t(own_groups) << 32 | padded, sum = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        uint64_t lower = __shfl_up_sync(~0u, sum, distance);
        if (lane >= distance) sum += lower;
    }
    if (lane == 31 && e < EXPERTS_MAX) warp_totals[warp] = sum;
    __syncthreads();
    uint64_t all = 0;
    for (int w = 0; w < EXPERTS_MAX / 32; w++) {
        if (w < warp) sum += warp_totals[w];
        all += warp_totals[w];
    }
    uint32_t slot = uint32_t(sum - own), group = uint32_t((sum - own) >> 32);
    if (e < count) {
        first_slot[e] = slot;
        for (uint32_t g = 0; g < own_groups; g++)
            groups[group + g] = {uint32_t(e), slot + g * group_pairs,
                                 min(total - g * group_pairs, uint32_t(group_pairs))};
        for (uint32_t i = total; i < padded; i++) sorted_pairs[slot + i] = NO_PAIR;
    }
    if (threadIdx.x == 0) *group_count = uint32_t(all >> 32);
    for (int i = int(uint32_t(all)) + threadIdx.x; i < slots; i += GROUP_THREADS) sorted_pairs[i] = NO_PAIR;
    __syncthreads();
    walk([&](int pair, uint32_t expert, uint32_t place) { sorted_pairs[first_slot[expert] + place] = pair; });
}
CHECK_SIGNATURE(expert_sort_pairs, ExpertSortPairs);

extern "C" __global__ void __launch_bounds__(EXPERT_COMBINE_THREADS)
    expert_combine(const float *contributions, const float *expert_weights, int used, int cols, float *out) {
    launch_next_kernel();
    wait_for_previous_kernel();
    size_t row = blockIdx.x;
    int col = blockIdx.y * EXPERT_COMBINE_THREADS + threadIdx.x;
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
