// SPDX-License-Identifier: Apache-2.0

// The two steps of an expert layer's routing.
//
//   choose_experts   a warp per row: softmax of the router's logits over all experts, as keys in
//                    shared memory; then a thread per row and expert counts the keys that rank
//                    before its own, and stores the expert if it is among the best
//   sort_pairs       a block: (row, rank) pairs in the order of experts, divided into groups of
//                    pairs of one expert
//
//   logits    0.1  2.0 -1.0  2.0
//   rank        2    0    3    1       a tie goes to the lower index
//
// For one row of 128 experts, this is 4 us faster than a warp that finds one maximum after the
// other, as expert_topk_softmax does for many rows.
#pragma once

#include <cstdint>

#include "abi/experts.cuh"

namespace experts {

// Smallest divisor of the renormalisation: the smallest normal f16, as in ops::choose_experts.
constexpr float PROBABILITY_SUM_MIN = 1.0f / 16384.0f;
// Experts per lane of a warp: 16, so a layer has up to 512.
constexpr int EXPERTS_PER_LANE = EXPERTS_MAX / 32;
// The key of a probability that is not a number: above all others, so that the result shows it.
constexpr float NAN_KEY = 2.0f;

// The calling warp computes the softmax of one row of `count` logits, at most 32 PER_LANE. Lane l
// holds the probabilities of experts l, 32 + l, ...; of those from `count` on, it holds -1.
template <int PER_LANE>
__device__ inline void softmax(const float *logits, int count, float (&probabilities)[PER_LANE]) {
    const int lane = threadIdx.x % 32;
    float largest = -INFINITY;
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) {
        int expert = k * 32 + lane;
        probabilities[k] = expert < count ? logits[expert] : -INFINITY;
        largest = fmaxf(largest, probabilities[k]);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
    double weights[PER_LANE], total = 0.0;
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) {
        weights[k] = k * 32 + lane < count ? exp(double(probabilities[k] - largest)) : 0.0;
        total += weights[k];
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) total += __shfl_xor_sync(~0u, total, distance);
#pragma unroll
    for (int k = 0; k < PER_LANE; k++)
        probabilities[k] = k * 32 + lane < count ? float(weights[k] / total) : -1.0f;
}

// A probability as a key to rank it by.
__device__ inline float rank_key(float probability) {
    return probability != probability ? NAN_KEY : probability;
}

// The probability of a key.
__device__ inline float key_probability(float key) { return key == NAN_KEY ? NAN : key; }

// The calling warp computes the keys of the experts of one row.
__device__ inline void softmax_keys(const float *logits, int count, float *keys) {
    const int lane = threadIdx.x % 32;
    float probabilities[EXPERTS_PER_LANE];
    softmax(logits, count, probabilities);
#pragma unroll
    for (int k = 0; k < EXPERTS_PER_LANE; k++)
        if (k * 32 + lane < count) keys[k * 32 + lane] = rank_key(probabilities[k]);
}

// The calling warp divides the probabilities of a row's experts by their sum in rank order.
__device__ inline void normalize_probabilities(float *probabilities, int used) {
    const int lane = threadIdx.x % 32;
    float sum = 0.0f;
    for (int first = 0; first < used; first += 32) {
        float own = first + lane < used ? probabilities[first + lane] : 0.0f;
        int ranks = min(32, used - first);
        for (int rank = 0; rank < ranks; rank++) sum += __shfl_sync(~0u, own, rank);
    }
    float divisor = sum != sum ? sum : fmaxf(sum, PROBABILITY_SUM_MIN);
    for (int rank = lane; rank < used; rank += 32)
        probabilities[rank] = __fdiv_rn(probabilities[rank], divisor);
}

// Chooses the `used` experts of each of `rows` rows of logits, in falling order of probability.
// Writes them and their probabilities divided by their sum, [rows][used]. All threads of the block
// call it; it has a warp for each row. Ends with a barrier.
__device__ inline void choose_experts(const float *logits, int rows, int count, int used,
                                      float (*keys)[EXPERTS_MAX], uint32_t *experts, float *probabilities) {
    const int warp = threadIdx.x / 32;
    if (warp < rows) softmax_keys(logits + size_t(warp) * count, count, keys[warp]);
    __syncthreads();
    // The rank of an expert is the number of those that stand before it.
    for (int at = threadIdx.x; at < rows * count; at += blockDim.x) {
        int row = at / count, expert = at % count, rank = 0;
        const float key = keys[row][expert];
#pragma unroll 8
        for (int other = 0; other < count; other++) {
            float other_key = keys[row][other];
            rank += other_key > key || (other_key == key && other < expert);
        }
        if (rank < used) {
            experts[size_t(row) * used + rank] = expert;
            probabilities[size_t(row) * used + rank] = key_probability(key);
        }
    }
    __syncthreads();
    if (warp < rows) normalize_probabilities(probabilities + size_t(warp) * used, used);
    __syncthreads();
}

// The number of groups of experts that have more pairs than expert e, which has `pairs` and
// `groups`. All threads call it: thread e has expert e. `scratch` has a word per expert.
__device__ inline uint32_t count_groups_before(int e, int count, uint32_t pairs, uint32_t groups,
                                               uint32_t *scratch) {
    // Equal numbers of pairs: the lower expert comes first.
    uint32_t own = pairs << 16 | groups;
    if (e < count) scratch[e] = own;
    __syncthreads();
    uint32_t before = 0;
    if (e < count)
#pragma unroll 8
        for (int other = 0; other < count; other++) {
            uint32_t word = scratch[other];
            bool is_before = other < e ? word >= own : word > own;
            before += is_before ? word & 0xFFFF : 0;
        }
    __syncthreads();
    return before;
}

// Walks a warp's run of pairs, `first` to `last` - 1, and calls `use(pair, expert, place)`, where
// `place` counts the pairs of the expert that stand before this one. `before` counts those of each
// expert, so far.
template <class Use>
__device__ void walk_run(const uint32_t *experts, int first, int last, uint16_t *before, Use use) {
    // Loads of a round come before its counts, which depend on each other.
    constexpr int ROUND = 8;
    const int lane = threadIdx.x % 32;
    for (int start = first; start < last; start += 32 * ROUND) {
        uint32_t loaded[ROUND];
#pragma unroll
        for (int i = 0; i < ROUND; i++) {
            int at = start + 32 * i + lane;
            loaded[i] = at < last ? experts[at] : EXPERTS_MAX;
        }
#pragma unroll
        for (int i = 0; i < ROUND; i++) {
            int at = start + 32 * i + lane;
            if (at - lane >= last) break;
            bool there = at < last;
            uint32_t expert = loaded[i], same = __match_any_sync(~0u, expert);
            int place = __popc(same & ((1u << lane) - 1));
            uint32_t earlier = there ? before[expert] : 0;
            if (there) use(at, expert, earlier + place);
            __syncwarp();
            if (there && place == 0) before[expert] = earlier + __popc(same);
            __syncwarp();
        }
    }
}

// Sorts pairs by expert, stably, with a block of 32 * WARPS threads, at least EXPERTS_MAX. `before`
// and `first_slot` are shared memory.
//
//   each warp counts a run of pairs, by expert
//   thread e: sums expert e's counts over the warps; a scan over experts gives slots and groups
//   each warp walks its run again, and stores each pair in its slot
template <int WARPS>
__device__ void sort_pairs(const uint32_t *experts, int pairs, const ExpertPairOrder &order,
                           uint16_t (*before)[EXPERTS_MAX], uint32_t *first_slot, uint64_t *warp_totals) {
    constexpr int THREADS = 32 * WARPS;
    static_assert(THREADS >= EXPERTS_MAX, "a thread per expert");
    const int count = order.expert_count, group_pairs = order.group_pairs, align = order.align;
    uint32_t *const sorted_pairs = order.sorted_pairs;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int run = (pairs + THREADS - 1) / THREADS * 32, first = warp * run, last = min(first + run, pairs);
    auto walk = [&](auto use) { walk_run(experts, first, last, before[warp], use); };
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
    if (order.largest_first) group = count_groups_before(e, count, total, own_groups, first_slot);
    if (e < count) {
        first_slot[e] = slot;
        for (uint32_t g = 0; g < own_groups; g++)
            order.groups[group + g] = {uint32_t(e), slot + g * group_pairs,
                                       min(total - g * group_pairs, uint32_t(group_pairs))};
        for (uint32_t i = total; i < padded; i++) sorted_pairs[slot + i] = NO_PAIR;
    }
    if (threadIdx.x == 0) *order.group_count = uint32_t(all >> 32);
    for (int i = int(uint32_t(all)) + threadIdx.x; i < order.slots; i += THREADS) sorted_pairs[i] = NO_PAIR;
    __syncthreads();
    walk([&](int pair, uint32_t expert, uint32_t place) { sorted_pairs[first_slot[expert] + place] = pair; });
}

}  // namespace experts
