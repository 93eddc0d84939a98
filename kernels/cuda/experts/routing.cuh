// SPDX-License-Identifier: Apache-2.0

// The two steps of an expert layer's routing.
//
//   choose_experts   a warp per row: softmax of the router's logits over all experts, and the best
//                    of them, one after the other. Without weights: the best by logits, if that is
//                    certainly the same choice
//   sort_pairs       a block: (row, rank) pairs in the order of experts, divided into groups of
//                    pairs of one expert
//   ChosenRows       the same for few rows, which have chosen in this block
//
//   logits    0.1  2.0 -1.0  2.0
//   rank        2    0    3    1       a tie goes to the lower index
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

// One copy each of code that a launch runs once, so that there are fewer instructions to fetch. Two
// to eight rows of qwen3-30b-a3b decode 1 to 2% faster (H200).
static __noinline__ __device__ double exp_of(double x) { return exp(x); }
static __noinline__ __device__ float quotient(double x, double y) { return float(x / y); }

// The calling warp computes the softmax of one row of `count` logits, at most 32 * PER_LANE. Lane l
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
        weights[k] = k * 32 + lane < count ? exp_of(double(probabilities[k] - largest)) : 0.0;
        total += weights[k];
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) total += __shfl_xor_sync(~0u, total, distance);
#pragma unroll
    for (int k = 0; k < PER_LANE; k++)
        probabilities[k] = k * 32 + lane < count ? quotient(weights[k], total) : -1.0f;
}

// A probability as a key to rank it by.
__device__ inline float rank_key(float probability) {
    return probability != probability ? NAN_KEY : probability;
}

// The probability of a key.
__device__ inline float key_probability(float key) { return key == NAN_KEY ? NAN : key; }

// A warp chooses the experts of one row, of at most 32 * PER_LANE. Probabilities are ranked as
// integers: bits of floats that are not negative have their order. An expert that was taken has 0,
// the others one more than their bits. For each rank, one lane calls `chosen_rank(rank, expert)`.
// For at most 32 ranks, `experts` and `expert_weights` may be null.
template <int PER_LANE, class Chosen>
__device__ void choose_by_warp(const float *logits, int count, int used, uint32_t *experts,
                               float *expert_weights, Chosen chosen_rank) {
    const int lane = threadIdx.x % 32;
    float probabilities[PER_LANE];
    softmax(logits, count, probabilities);
    uint32_t keys[PER_LANE];
#pragma unroll
    for (int k = 0; k < PER_LANE; k++)
        keys[k] = k * 32 + lane < count ? __float_as_uint(rank_key(probabilities[k])) + 1 : 0;

    float own = 0.0f, sum = 0.0f;
    uint32_t own_expert = 0;
    for (int rank = 0; rank < used; rank++) {
        uint32_t best = 0, expert = ~0u;
#pragma unroll
        for (int k = 0; k < PER_LANE; k++)
            if (keys[k] > best) best = keys[k], expert = k * 32 + lane;
        uint32_t key = __reduce_max_sync(~0u, best);
        uint32_t chosen = __reduce_min_sync(~0u, best == key ? expert : ~0u);
#pragma unroll
        for (int k = 0; k < PER_LANE; k++)
            if (k * 32 + lane == int(chosen)) keys[k] = 0;
        float probability = key_probability(__uint_as_float(key - 1));
        sum += probability;
        if (lane == rank % 32) own = probability, own_expert = chosen;
        // A lane keeps one rank of every 32; the warp stores them together.
        if (rank % 32 == 31 && rank + 1 < used) {
            const int own_rank = rank - 31 + lane;
            experts[own_rank] = own_expert, expert_weights[own_rank] = own;
            chosen_rank(own_rank, own_expert);
        }
    }
    const float divisor = sum != sum ? sum : fmaxf(sum, PROBABILITY_SUM_MIN);
    const int last_ranks = (used - 1) / 32 * 32, own_rank = last_ranks + lane;
    if (own_rank < used) {
        if (experts != nullptr) experts[own_rank] = own_expert;
        if (expert_weights != nullptr) expert_weights[own_rank] = __fdiv_rn(own, divisor);
        chosen_rank(own_rank, own_expert);
    }
    // Each lane divides what it stored itself.
    for (int rank = lane; rank < last_ranks; rank += 32)
        expert_weights[rank] = __fdiv_rn(expert_weights[rank], divisor);
}

// Softmax takes exponentials of differences, each a logit less the largest one. If two differences
// are at least LOGIT_GAP_MIN apart, their probabilities differ by at least one in 500,000, and also
// as f32, if the larger probability is a normal f32 (from 1.18e-38 on). It is if its difference is
// at least LOGIT_DIFFERENCE_MIN: exp(-80) / EXPERTS_MAX = 3.5e-38.
constexpr float LOGIT_GAP_MIN = 1.0f / (1 << 19), LOGIT_DIFFERENCE_MIN = -80.0f;

// A key to order logits by, above 0. NaN has the highest.
__device__ inline uint32_t logit_key(float logit) {
    const uint32_t bits = __float_as_uint(logit);
    return logit != logit ? ~0u : bits >> 31 ? ~bits : bits | 1u << 31;
}

// The logit of a key.
__device__ inline float key_logit(uint32_t key) { return __uint_as_float(key >> 31 ? key ^ 1u << 31 : ~key); }

// Ranks the best experts of a row, at most 32, by logits. Lane r gets the expert of rank r in
// `own_expert`. If the result is false, some probabilities may be equal, subnormal or NaN, and
// `choose_by_warp` may choose other experts. NaN makes both comparisons false.
template <int PER_LANE>
__device__ bool rank_by_logits(const float *logits, int count, int used, uint32_t &own_expert) {
    const int lane = threadIdx.x % 32;
    uint32_t keys[PER_LANE];
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) keys[k] = k * 32 + lane < count ? logit_key(logits[k * 32 + lane]) : 0;
    float largest = 0.0f, before = 0.0f;
    bool is_certain = true;
    // The last rank is the best expert that is not chosen: it must differ, too.
    const int ranks = min(used + 1, count);
#pragma unroll 1
    for (int rank = 0; rank < ranks; rank++) {
        uint32_t best = 0, expert = ~0u;
#pragma unroll
        for (int k = 0; k < PER_LANE; k++)
            if (keys[k] > best) best = keys[k], expert = k * 32 + lane;
        const uint32_t key = __reduce_max_sync(~0u, best);
        const uint32_t chosen = __reduce_min_sync(~0u, best == key ? expert : ~0u);
#pragma unroll
        for (int k = 0; k < PER_LANE; k++)
            if (k * 32 + lane == int(chosen)) keys[k] = 0;
        const float logit = key_logit(key);
        if (rank == 0) largest = logit;
        // In f32, as softmax subtracts.
        const float difference = logit - largest;
        if (rank > 0) is_certain = is_certain && before - difference >= LOGIT_GAP_MIN;
        if (rank < used) is_certain = is_certain && difference >= LOGIT_DIFFERENCE_MIN;
        before = difference;
        if (lane == rank) own_expert = chosen;
    }
    return is_certain;
}

// Chooses as `choose_by_warp` does, at most 32 experts, without their weights.
template <int PER_LANE, class Chosen>
__device__ void choose_without_weights(const float *logits, int count, int used, Chosen chosen_rank) {
    const int lane = threadIdx.x % 32;
    uint32_t own_expert;
    if (!rank_by_logits<PER_LANE>(logits, count, used, own_expert))
        choose_by_warp<PER_LANE>(logits, count, used, nullptr, nullptr, chosen_rank);
    else if (lane < used)
        chosen_rank(lane, own_expert);
}

// The calling warp chooses the `used` experts of row `row`, in falling order of probability. Writes
// them and their probabilities divided by their sum, [rows][used], if these are not null.
template <class Chosen>
__device__ inline void choose_experts(const float *logits, int row, int count, int used, uint32_t *experts,
                                      float *expert_weights, Chosen chosen_rank) {
    logits += size_t(row) * count;
    if (experts != nullptr) experts += size_t(row) * used;
    if (expert_weights != nullptr) expert_weights += size_t(row) * used;
    if (count <= 128)
        choose_by_warp<4>(logits, count, used, experts, expert_weights, chosen_rank);
    else
        choose_by_warp<EXPERTS_PER_LANE>(logits, count, used, experts, expert_weights, chosen_rank);
}

// The same without weights, for at most 32 experts of a row. It takes exponentials only where the
// order of logits is not certainly that of probabilities.
template <class Chosen>
__device__ inline void choose_experts(const float *logits, int row, int count, int used, Chosen chosen_rank) {
    logits += size_t(row) * count;
    if (count <= 128)
        choose_without_weights<4>(logits, count, used, chosen_rank);
    else
        choose_without_weights<EXPERTS_PER_LANE>(logits, count, used, chosen_rank);
}

__device__ inline void choose_experts(const float *logits, int row, int count, int used, uint32_t *experts,
                                      float *expert_weights) {
    choose_experts(logits, row, count, used, experts, expert_weights, [](int, uint32_t) {});
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

// Gives each expert its slots, and writes the groups and the slots without a pair, with a block of
// 32 * WARPS threads, at least EXPERTS_MAX. Thread e has expert e, which has `total` pairs, and
// gets its first slot. `scratch` and `warp_totals` are shared memory.
template <int WARPS>
__device__ uint32_t assign_slots(uint32_t total, const ExpertPairOrder &order, uint32_t *scratch,
                                 uint64_t *warp_totals) {
    constexpr int THREADS = 32 * WARPS;
    static_assert(THREADS >= EXPERTS_MAX, "a thread per expert");
    const int count = order.expert_count, group_pairs = order.group_pairs, align = order.align;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, e = threadIdx.x;
    uint32_t *const sorted_pairs = order.sorted_pairs;
    // A word holds the number of groups (upper half) and of slots (lower half), so that one scan
    // adds up both.
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
    if (order.largest_first) group = count_groups_before(e, count, total, own_groups, scratch);
    if (e < count) {
        for (uint32_t g = 0; g < own_groups; g++)
            order.groups[group + g] = {uint32_t(e), slot + g * group_pairs,
                                       min(total - g * group_pairs, uint32_t(group_pairs))};
        for (uint32_t i = total; i < padded; i++) sorted_pairs[slot + i] = NO_PAIR;
    }
    if (threadIdx.x == 0) *order.group_count = uint32_t(all >> 32);
    for (int i = int(uint32_t(all)) + threadIdx.x; i < order.slots; i += THREADS) sorted_pairs[i] = NO_PAIR;
    return slot;
}

// Sorts pairs by expert, stably, with a block of 32 * WARPS threads. `before`, `first_slot` and
// `warp_totals` are shared memory.
//
//   each warp counts a run of pairs, by expert
//   thread e: sums expert e's counts over the warps; a scan over experts gives slots and groups
//   each warp walks its run again, and stores each pair in its slot
template <int WARPS>
__device__ void sort_pairs(const uint32_t *experts, int pairs, const ExpertPairOrder &order,
                           uint16_t (*before)[EXPERTS_MAX], uint32_t *first_slot, uint64_t *warp_totals) {
    constexpr int THREADS = 32 * WARPS;
    const int count = order.expert_count, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int run = (pairs + THREADS - 1) / THREADS * 32, first = warp * run, last = min(first + run, pairs);
    auto walk = [&](auto use) { walk_run(experts, first, last, before[warp], use); };
    for (int e = lane; e < count; e += 32) before[warp][e] = 0;
    __syncwarp();
    walk([](int, uint32_t, uint32_t) {});
    __syncthreads();

    const int e = threadIdx.x;
    uint32_t total = 0;
    if (e < count) {
#pragma unroll 8
        for (int w = 0; w < WARPS; w++) {
            uint32_t found = before[w][e];
            before[w][e] = total;
            total += found;
        }
    }
    uint32_t slot = assign_slots<WARPS>(total, order, first_slot, warp_totals);
    if (e < count) first_slot[e] = slot;
    __syncthreads();
    walk([&](int pair, uint32_t expert, uint32_t place) {
        order.sorted_pairs[first_slot[expert] + place] = pair;
    });
}

// The choices of at most ROWS rows, in shared memory.
template <int ROWS>
struct ChosenRows {
    static_assert(ROWS <= 32, "a bit for each row");
    // The rows that have chosen an expert, a bit each, and their ranks of it.
    uint32_t rows_of[EXPERTS_MAX];
    uint16_t ranks[ROWS][EXPERTS_MAX];
    uint32_t scratch[EXPERTS_MAX];
    uint64_t warp_totals[EXPERTS_MAX / 32];

    // All threads of the block, before the first row chooses.
    __device__ void clear() {
        for (int e = threadIdx.x; e < EXPERTS_MAX; e += blockDim.x) rows_of[e] = 0;
        __syncthreads();
    }

    __device__ void choose(int row, int rank, uint32_t expert) {
        ranks[row][expert] = rank;
        atomicOr(rows_of + expert, 1u << row);
    }

    // Sorts the pairs as `sort_pairs` does. Thread e stores those of expert e.
    template <int WARPS>
    __device__ void sort(int used, const ExpertPairOrder &order) {
        __syncthreads();
        const int e = threadIdx.x;
        uint32_t rows = e < order.expert_count ? rows_of[e] : 0;
        uint32_t *to = order.sorted_pairs + assign_slots<WARPS>(__popc(rows), order, scratch, warp_totals);
        for (; rows != 0; rows &= rows - 1) {
            const int row = __ffs(rows) - 1;
            *to++ = row * used + ranks[row][e];
        }
    }
};

}  // namespace experts
