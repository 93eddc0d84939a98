// SPDX-License-Identifier: Apache-2.0

// What a sampler needs of each row of logits: its 256 highest values in order, the sum of its
// softmax weights, and the token that a uniform number draws from the whole row. ops::shortlist is
// the specification, to the last bit: ops::rank defines the order of values (falling value, then
// rising index), ops::softmax the exponential and the order of sums.
//
//   shortlist_group_max      the highest value of each of 2,048 groups of a row
//   shortlist_threshold      the 256th highest of these: at least 256 values reach it, and hardly
//                            more than 300, since neighbours are in different groups
//   shortlist_collect        the values that reach the threshold (candidates), and partial sums of
//                            the weights
//   shortlist_sort_and_draw  sorts the candidates and draws a token
//
// If more than 1,024 values of a row reach the threshold (all equal, for example), the row gets no
// list. The host then reads the whole row.
//
// Limit: latency, of loads from the second-level cache, which holds logits that were just computed;
// of chains of f64 additions; and of a sort. Rows of 152,000 values on an H200: 24 us for one, 31
// for 16, 59 for 64 (31% of the copy rate; the values are read twice). Drawing tokens adds 4 to 10
// us.

#include <cstdint>

#include "abi/shortlist.cuh"
#include "stream_order.cuh"

namespace {

constexpr int THREADS = SHORTLIST_THREADS;
constexpr int LEN = SHORTLIST_LEN;
constexpr int GROUPS = SHORTLIST_GROUPS;
constexpr int OWN_GROUPS = GROUPS / THREADS;
constexpr int CANDIDATES_MAX = SHORTLIST_CANDIDATES_MAX;
// As in ops::softmax: BLOCK values have one partial sum, which is the sum of LANES running sums.
constexpr int BLOCK = SHORTLIST_BLOCK;
constexpr int LANES = 8;
// Partial sums of a thread block: as many as one warp adds at once.
constexpr int SUMS = SHORTLIST_SUMS;
// Distance of blocks in shared memory: the lanes of the warp that adds them hit different banks.
constexpr int PADDED = BLOCK + LANES;
constexpr int SUMS_MAX = SHORTLIST_SUMS_MAX;
constexpr int RESULT_WORDS = SHORTLIST_RESULT_WORDS;
constexpr uint32_t NOT_DRAWN = 0xFFFFFFFF;
constexpr uint32_t POSITIVE_INFINITY = 0xFF800000;
constexpr uint32_t NEGATIVE_INFINITY = 0x007FFFFF;

// Maps values to integers of the same order. Both zeros have one key, a NaN has the highest, and
// key 0 is below all values.
__device__ uint32_t sort_key(float value) {
    if (value != value) return 0xFFFFFFFF;
    uint32_t bits = __float_as_uint(value + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000;
}

__device__ float sort_key_value(uint32_t key) { return __uint_as_float(key >> 31 ? key & 0x7FFFFFFF : ~key); }

// e^((value - max) / temperature): ops::softmax::exp, operation by operation.
__device__ float softmax_weight(float value, float max, float temperature) {
    constexpr float LOWEST = -87.0f, ROUND = 12582912.0f;
    float x = (value - max) / temperature;
    float clamped = fmaxf(x, LOWEST);
    float shifted = clamped * 1.44269504088896340736f + ROUND;
    float n = shifted - ROUND;
    float r = clamped - n * 0.6933594f - n * -2.1219444e-4f;
    float p = 1.9875691e-4f;
    p = p * r + 1.3982e-3f;
    p = p * r + 8.333452e-3f;
    p = p * r + 4.1665796e-2f;
    p = p * r + 1.6666666e-1f;
    p = p * r + 5e-1f;
    float fraction = p * (r * r) + r + 1.0f;
    uint32_t exponent = (__float_as_uint(shifted) - __float_as_uint(ROUND) + 127) << 23;
    return x < LOWEST ? 0.0f : fraction * __uint_as_float(exponent);
}

// Whether the row has no finite maximum: it holds a NaN or infinity, or nothing but minus infinity.
// `highest` is a sort key.
__device__ bool has_no_finite_max(uint32_t highest) {
    return highest >= POSITIVE_INFINITY || highest <= NEGATIVE_INFINITY;
}

}  // namespace

// Group g of a row has the values g, g + GROUPS, g + 2 GROUPS, ...
extern "C" __global__ void __launch_bounds__(THREADS)
    shortlist_group_max(const float *x, uint32_t cols, uint32_t *groups) {
    wait_for_previous_kernel();
    launch_next_kernel();
    const size_t row = blockIdx.y;
    const uint32_t group = blockIdx.x * THREADS + threadIdx.x;
    x += row * cols;
    // Independent loads that a thread has in flight.
    constexpr int ROUND = 16;
    uint32_t highest = 0;
    for (uint32_t first = group; first < cols; first += ROUND * GROUPS) {
        float v[ROUND];
#pragma unroll
        for (int k = 0; k < ROUND; k++) v[k] = first + k * GROUPS < cols ? x[first + k * GROUPS] : -INFINITY;
#pragma unroll
        for (int k = 0; k < ROUND; k++) {
            if (first + k * GROUPS < cols) highest = max(highest, sort_key(v[k]));
        }
    }
    groups[row * GROUPS + group] = highest;
}
CHECK_SIGNATURE(shortlist_group_max, ShortlistGroupMax);

// One block per row. It finds the threshold bit by bit: the LEN-th highest key of the groups,
// without its last bits. If fewer than LEN groups have values, the threshold is 0.
extern "C" __global__ void __launch_bounds__(THREADS)
    shortlist_threshold(const uint32_t *groups, RowThreshold *thresholds, uint32_t *counts) {
    // Bits below this one are left out: the threshold is as precise as an f32 with a mantissa of 11
    // bits.
    constexpr int LAST_BIT = 12;
    __shared__ uint32_t reaching[32];
    __shared__ uint32_t highest;
    wait_for_previous_kernel();
    launch_next_kernel();
    const size_t row = blockIdx.x;
    uint32_t own[OWN_GROUPS], own_highest = 0;
    if (threadIdx.x < 32) reaching[threadIdx.x] = 0;
    if (threadIdx.x == 0) highest = 0;
#pragma unroll
    for (int k = 0; k < OWN_GROUPS; k++) {
        own[k] = groups[row * GROUPS + k * THREADS + threadIdx.x];
        own_highest = max(own_highest, own[k]);
    }
    own_highest = __reduce_max_sync(~0u, own_highest);
    __syncthreads();
    if (threadIdx.x % 32 == 0) atomicMax(&highest, own_highest);
    uint32_t threshold_key = 0;
    for (int bit = 31; bit >= LAST_BIT; bit--) {
        const uint32_t higher = threshold_key | 1u << bit;
        uint32_t count = 0;
#pragma unroll
        for (int k = 0; k < OWN_GROUPS; k++) count += own[k] >= higher;
        count = __reduce_add_sync(~0u, count);
        if (threadIdx.x % 32 == 0) atomicAdd(&reaching[bit], count);
        __syncthreads();
        if (reaching[bit] >= LEN) threshold_key = higher;
    }
    if (threadIdx.x == 0) {
        thresholds[row] = {highest, threshold_key};
        counts[row] = 0;
    }
}
CHECK_SIGNATURE(shortlist_threshold, ShortlistThreshold);

// Block (b, row) computes SUMS partial sums of the row, from b * SUMS on, and collects candidates
// among their values.
extern "C" __global__ void __launch_bounds__(THREADS)
    shortlist_collect(const float *x, uint32_t cols, const uint32_t *draw_params,
                      const RowThreshold *thresholds, uint32_t *counts, uint64_t *candidates, double *sums) {
    constexpr int OWN = SUMS * BLOCK / THREADS;
    __shared__ float weights[SUMS * PADDED];
    wait_for_previous_kernel();
    launch_next_kernel();
    const size_t row = blockIdx.y;
    const uint32_t first = blockIdx.x * SUMS * BLOCK;
    x += row * cols;
    float v[OWN];
#pragma unroll
    for (int k = 0; k < OWN; k++) {
        const uint32_t id = first + k * THREADS + threadIdx.x;
        v[k] = id < cols ? x[id] : -INFINITY;
    }
    const RowThreshold threshold = thresholds[row];
    if (has_no_finite_max(threshold.highest)) return;
    const float max = sort_key_value(threshold.highest),
                temperature = __uint_as_float(draw_params[row * DRAW_PARAM_WORDS]);
#pragma unroll
    for (int k = 0; k < OWN; k++) {
        const int at = k * THREADS + threadIdx.x;
        const uint32_t id = first + at, key = sort_key(v[k]);
        if (id < cols && key >= threshold.threshold) {
            const uint32_t place = atomicAdd(&counts[row], 1);
            if (place < CANDIDATES_MAX) candidates[row * CANDIDATES_MAX + place] = uint64_t(~key) << 32 | id;
        }
        // Values beyond the row's end are minus infinity, so their weight is 0.
        weights[at / BLOCK * PADDED + at % BLOCK] = softmax_weight(v[k], max, temperature);
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    const float *own_weights = weights + threadIdx.x / LANES * PADDED + threadIdx.x % LANES;
    double lane = 0.0;
#pragma unroll 16
    for (int i = 0; i < BLOCK; i += LANES) lane += double(own_weights[i]);
    double sum = 0.0;
#pragma unroll
    for (int k = 0; k < LANES; k++) sum += __shfl_sync(~0u, lane, k, LANES);
    const uint32_t blocks = (cols + BLOCK - 1) / BLOCK, at = blockIdx.x * SUMS + threadIdx.x / LANES;
    if (threadIdx.x % LANES == 0 && at < blocks) sums[row * blocks + at] = sum;
}
CHECK_SIGNATURE(shortlist_collect, ShortlistCollect);

namespace {

// Additions of a chain of f64 between two checks of its result.
constexpr int ROUND = 16;

// Sorts the candidates and stores the best LEN of them.
__device__ void sort_candidates(const uint64_t *candidates, uint32_t count, uint64_t *result) {
    __shared__ uint64_t keys[CANDIDATES_MAX];
    const uint32_t listed = count > CANDIDATES_MAX ? 0 : min(count, LEN);
    if (threadIdx.x == 0) result[0] = listed;
    if (listed == 0) return;
    uint32_t len = 2;
    while (len < count) len *= 2;
    for (uint32_t i = threadIdx.x; i < len; i += THREADS) keys[i] = i < count ? candidates[i] : ~uint64_t(0);
    __syncthreads();
    // Bitonic sort: each pass sorts the runs of `size`, in rising and falling order in turn.
    for (uint32_t size = 2; size <= len; size *= 2) {
        for (uint32_t stride = size / 2; stride > 0; stride /= 2) {
            for (uint32_t i = threadIdx.x; i < len / 2; i += THREADS) {
                const uint32_t a = 2 * i - (i & (stride - 1)), b = a + stride;
                const uint64_t low = keys[a], high = keys[b];
                if ((low > high) == ((a & size) == 0)) {
                    keys[a] = high;
                    keys[b] = low;
                }
            }
            __syncthreads();
        }
    }
    for (uint32_t i = threadIdx.x; i < listed; i += THREADS) result[3 + i] = keys[i];
}

// A block of values, and what is left of the target for the weights in it.
struct ChosenBlock {
    uint32_t block;
    double remainder;
};

// The first loop of ops::softmax::SoftmaxWeights::pick: finds the block. `partial` has zeros up to
// a multiple of ROUND. One thread of the block calls it.
__device__ ChosenBlock choose_block(const double *partial, uint32_t blocks, double remainder) {
    ChosenBlock chosen_block = {0, remainder};
    for (uint32_t start = 0; start < blocks; start += ROUND) {
        double remainders[ROUND + 1];
        remainders[0] = remainder;
#pragma unroll
        for (int k = 0; k < ROUND; k++) remainders[k + 1] = remainders[k] - partial[start + k];
#pragma unroll
        for (int k = 0; k < ROUND; k++) {
            const double sum = partial[start + k];
            if (sum > 0.0) {
                if (remainders[k] < sum) return {start + k, remainders[k]};
                chosen_block = {start + k, remainders[k + 1]};
            }
        }
        remainder = remainders[ROUND];
    }
    return chosen_block;
}

// The second loop: the first index at which the running sum of the weights exceeds `target`, which
// is not negative; otherwise the last index with a positive weight. One thread of the block calls
// it.
__device__ uint32_t choose_in_block(const float *weights, double target) {
    double sum = 0.0;
    for (uint32_t start = 0; start < BLOCK; start += ROUND) {
        double sums[ROUND];
#pragma unroll
        for (int k = 0; k < ROUND; k++) sums[k] = sum += double(weights[start + k]);
        // Running sums never fall. Where one exceeds the target for the first time, its weight is
        // positive.
        if (target < sum) {
#pragma unroll
            for (int k = 0; k < ROUND; k++) {
                if (target < sums[k]) return start + k;
            }
        }
    }
    for (uint32_t last = BLOCK - 1; last > 0; last--) {
        if (weights[last] > 0.0f) return last;
    }
    return 0;
}

// `token` is null, or where a token that is wanted goes as well.
__device__ void draw_token(const float *x, uint32_t cols, const uint32_t *draw_param, float max,
                           const double *sums, uint64_t *result, uint32_t *token) {
    __shared__ double partial[SUMS_MAX];
    __shared__ float weights[BLOCK];
    __shared__ ChosenBlock chosen_block;
    const uint32_t blocks = (cols + BLOCK - 1) / BLOCK;
    for (uint32_t i = threadIdx.x; i < SUMS_MAX; i += THREADS) partial[i] = i < blocks ? sums[i] : 0.0;
    __syncthreads();
    const bool wanted = draw_param[1] != 0;
    if (threadIdx.x == 0) {
        double total = 0.0;
        for (uint32_t start = 0; start < blocks; start += ROUND) {
#pragma unroll
            for (int k = 0; k < ROUND; k++) total += partial[start + k];
        }
        result[1] = __double_as_longlong(total);
        const double uniform = __longlong_as_double(uint64_t(draw_param[3]) << 32 | draw_param[2]);
        if (wanted) chosen_block = choose_block(partial, blocks, uniform * total);
    }
    uint32_t drawn = NOT_DRAWN;
    if (wanted) {
        __syncthreads();
        const uint32_t start = chosen_block.block * BLOCK;
        const float temperature = __uint_as_float(draw_param[0]);
        for (uint32_t i = threadIdx.x; i < BLOCK; i += THREADS) {
            const float value = start + i < cols ? x[start + i] : -INFINITY;
            weights[i] = softmax_weight(value, max, temperature);
        }
        __syncthreads();
        if (threadIdx.x == 0) drawn = start + choose_in_block(weights, chosen_block.remainder);
    }
    if (threadIdx.x == 0) {
        result[2] = drawn;
        if (wanted && token != nullptr) *token = drawn;
    }
}

}  // namespace

// Two blocks per row: block 0 makes the list, block 1 draws a token. With `tokens`, nothing but the
// tokens is wanted, and tokens[r] is set in rows that draw one.
extern "C" __global__ void __launch_bounds__(THREADS)
    shortlist_sort_and_draw(const float *x, uint32_t cols, const uint32_t *draw_params,
                            const RowThreshold *thresholds, const uint32_t *counts,
                            const uint64_t *candidates, const double *sums, uint64_t *results,
                            uint32_t *tokens) {
    wait_for_previous_kernel();
    launch_next_kernel();
    const size_t row = blockIdx.x, blocks = (cols + BLOCK - 1) / BLOCK;
    const bool lists = blockIdx.y == 0;
    uint64_t *result = results + row * RESULT_WORDS;
    const RowThreshold threshold = thresholds[row];
    if (has_no_finite_max(threshold.highest)) {
        if (threadIdx.x == 0) {
            result[lists ? 0 : 1] = 0;
            if (!lists) result[2] = NOT_DRAWN;
            if (!lists && tokens != nullptr) tokens[row] = NOT_DRAWN;
        }
    } else if (lists) {
        if (tokens == nullptr) sort_candidates(candidates + row * CANDIDATES_MAX, counts[row], result);
    } else {
        draw_token(x + row * cols, cols, draw_params + row * DRAW_PARAM_WORDS,
                   sort_key_value(threshold.highest), sums + row * blocks, result,
                   tokens == nullptr ? nullptr : tokens + row);
    }
}
CHECK_SIGNATURE(shortlist_sort_and_draw, ShortlistSortAndDraw);
