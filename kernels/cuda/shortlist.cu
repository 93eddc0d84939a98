// What a sampler needs of each row of logits: its 256 highest values in order, the sum of its softmax weights, and the token
// that a uniform number draws from the whole of it. ops::shortlist is the specification, to the last bit: the order of ranks
// (falling value, then rising index), the exponential and the order of sums are those of ops::rank and ops::weights.
//
// Three kernels. `groups` finds the highest value of each of 2,048 groups of a row's values. The 256th highest of these is a
// floor that at least 256 values reach, and hardly more than 300, since neighbours are in different groups. `find` collects
// them and adds up the weights. `finish` sorts them and draws. A row of which more than 1,024 values reach the floor, all equal
// ones say, gets no list: the host reads it.
//
// Limit: latency of a chain of f64 additions and of a sort, some 5 us for up to 16 rows of 152,000 values, which are read from
// the second-level cache twice.

#include <cstdint>

#include "numeric.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int LEN = 256;
constexpr int GROUPS = 2048;
constexpr int OWN_GROUPS = GROUPS / THREADS;
constexpr int FOUND_MAX = 1024;
// Of ops::weights: values of a partial sum, and running sums that it is made of.
constexpr int BLOCK = 1024;
constexpr int LANES = 8;
// Partial sums of a thread block: as many as one warp adds at once.
constexpr int SUMS = 4;
// So that the warp's lanes hit different banks.
constexpr int PADDED = BLOCK + LANES;
constexpr int SUMS_MAX = 1024;
// Words of a row's weighing, and of its record: count and drawn token, sum, best values.
constexpr int WEIGHING = 4;
constexpr int RECORD = 2 + LEN;
constexpr uint32_t NOT_DRAWN = 0xFFFFFFFF;
constexpr uint32_t POSITIVE_INFINITY = 0xFF800000;
constexpr uint32_t NEGATIVE_INFINITY = 0x007FFFFF;

// Integers in the order of values; both zeros are one. NaN becomes the highest, and 0 is below all.
__device__ uint32_t key_of(float value) {
    if (value != value) return 0xFFFFFFFF;
    uint32_t bits = __float_as_uint(value + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000;
}

__device__ float value_of(uint32_t key) { return __uint_as_float(key >> 31 ? key & 0x7FFFFFFF : ~key); }

// ops::weights::exp, operation by operation.
__device__ float weight(float value, float max, float temperature) {
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

// The thread's share of the row's groups, and the highest of all. Every thread of the block calls it, once.
__device__ uint32_t highest_group(const uint32_t *groups, uint32_t own[OWN_GROUPS]) {
    __shared__ uint32_t of_warps[THREADS / 32];
    uint32_t highest = 0;
#pragma unroll
    for (int k = 0; k < OWN_GROUPS; k++) {
        own[k] = groups[k * THREADS + threadIdx.x];
        highest = max(highest, own[k]);
    }
    highest = __reduce_max_sync(~0u, highest);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = highest;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; warp++) highest = max(highest, of_warps[warp]);
    return highest;
}

// A row without a highest number: it holds a NaN or infinity, or nothing else than minus infinity.
__device__ bool is_broken(uint32_t highest) { return highest >= POSITIVE_INFINITY || highest <= NEGATIVE_INFINITY; }

// The LEN-th highest of the groups, bit by bit; 0 if there are fewer. Every thread of the block calls it, once.
__device__ uint32_t floor_of(const uint32_t own[OWN_GROUPS]) {
    __shared__ uint32_t reaching[32];
    if (threadIdx.x < 32) reaching[threadIdx.x] = 0;
    __syncthreads();
    uint32_t floor = 0;
    for (int bit = 31; bit >= 0; bit--) {
        uint32_t higher = floor | 1u << bit;
        uint32_t count = 0;
#pragma unroll
        for (int k = 0; k < OWN_GROUPS; k++) count += own[k] >= higher;
        count = __reduce_add_sync(~0u, count);
        if (threadIdx.x % 32 == 0) atomicAdd(&reaching[bit], count);
        __syncthreads();
        if (reaching[bit] >= LEN) floor = higher;
    }
    return floor;
}

}  // namespace

// Group g of a row has its values g, g + GROUPS, g + 2 GROUPS ...
extern "C" __global__ void __launch_bounds__(THREADS)
    shortlist_groups(const float *x, uint32_t cols, uint32_t *groups, uint32_t *counts) {
    wait_for_predecessor();
    let_successor_start();
    const size_t row = blockIdx.y;
    const uint32_t group = blockIdx.x * THREADS + threadIdx.x;
    x += row * cols;
    uint32_t highest = 0;
#pragma unroll 16
    for (uint32_t at = group; at < cols; at += GROUPS) highest = max(highest, key_of(x[at]));
    groups[row * GROUPS + group] = highest;
    if (group == 0) counts[row] = 0;
}

// Block (b, row) looks at SUMS partial sums of the row, from b * SUMS on.
extern "C" __global__ void __launch_bounds__(THREADS)
    shortlist_find(const float *x, uint32_t cols, const uint32_t *weighings, const uint32_t *groups, uint32_t *counts,
                   uint64_t *found, double *sums) {
    __shared__ float weights[SUMS * PADDED];
    wait_for_predecessor();
    let_successor_start();
    const size_t row = blockIdx.y;
    const uint32_t first = blockIdx.x * SUMS * BLOCK;
    x += row * cols;
    uint32_t own[OWN_GROUPS];
    const uint32_t highest = highest_group(groups + row * GROUPS, own);
    if (is_broken(highest)) return;
    const uint32_t floor = floor_of(own);
    const float max = value_of(highest), temperature = __uint_as_float(weighings[row * WEIGHING]);
#pragma unroll 4
    for (int k = 0; k < SUMS * BLOCK / THREADS; k++) {
        const int at = k * THREADS + threadIdx.x;
        const uint32_t id = first + at;
        float value = id < cols ? x[id] : -INFINITY;
        if (id < cols && key_of(value) >= floor) {
            uint32_t place = atomicAdd(&counts[row], 1);
            if (place < FOUND_MAX) found[row * FOUND_MAX + place] = uint64_t(~key_of(value)) << 32 | id;
        }
        // What is beyond the row's end adds nothing.
        weights[at / BLOCK * PADDED + at % BLOCK] = weight(value, max, temperature);
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
    const uint32_t count = (cols + BLOCK - 1) / BLOCK, at = blockIdx.x * SUMS + threadIdx.x / LANES;
    if (threadIdx.x % LANES == 0 && at < count) sums[row * count + at] = sum;
}

namespace {

// ops::weights::Weights::pick: where the running sum of the weights exceeds `target`. One thread of the block.
__device__ uint32_t pick(const float *weights, uint32_t len, double target) {
    constexpr int ROUND = 16;
    uint32_t index = 0;
    double sum = 0.0;
    for (uint32_t start = 0; start < len; start += ROUND) {
        float w[ROUND];
#pragma unroll
        for (int k = 0; k < ROUND; k++) w[k] = weights[start + k];
#pragma unroll
        for (int k = 0; k < ROUND; k++) {
            if (w[k] > 0.0f) {
                index = start + k;
                sum += double(w[k]);
                if (target < sum) return index;
            }
        }
    }
    return index;
}

}  // namespace

// One block per row.
extern "C" __global__ void __launch_bounds__(THREADS)
    shortlist_finish(const float *x, uint32_t cols, const uint32_t *weighings, const uint32_t *groups, const uint32_t *counts,
                     const uint64_t *found, const double *sums, uint64_t *records) {
    __shared__ uint64_t keys[FOUND_MAX];
    __shared__ double partial[SUMS_MAX];
    __shared__ float weights[BLOCK];
    __shared__ uint32_t drawn_block;
    __shared__ double target;
    wait_for_predecessor();
    let_successor_start();
    const size_t row = blockIdx.x;
    uint64_t *record = records + row * RECORD;
    uint32_t own[OWN_GROUPS];
    const uint32_t highest = highest_group(groups + row * GROUPS, own);
    if (is_broken(highest)) {
        if (threadIdx.x == 0) {
            record[0] = uint64_t(NOT_DRAWN) << 32;
            record[1] = 0;
        }
        return;
    }
    const uint32_t count = counts[row], blocks = (cols + BLOCK - 1) / BLOCK;
    const uint32_t listed = count > FOUND_MAX ? 0 : min(count, LEN);
    uint32_t len = 2;
    while (listed > 0 && len < count) len *= 2;
    for (uint32_t i = threadIdx.x; i < len; i += THREADS) keys[i] = i < count ? found[row * FOUND_MAX + i] : ~uint64_t(0);
    for (uint32_t i = threadIdx.x; i < blocks; i += THREADS) partial[i] = sums[row * blocks + i];
    __syncthreads();
    // Bitonic: every run of `size` becomes sorted, up and down in turns.
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
    for (uint32_t i = threadIdx.x; i < listed; i += THREADS) record[2 + i] = keys[i];
    const bool wanted = weighings[row * WEIGHING + 1] != 0;
    double total = 0.0;
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < blocks; i++) total += partial[i];
        const uint64_t uniform =
            uint64_t(weighings[row * WEIGHING + 3]) << 32 | weighings[row * WEIGHING + 2];
        double left = __longlong_as_double(uniform) * total;
        uint32_t chosen = 0;
        for (uint32_t i = 0; wanted && i < blocks; i++) {
            if (partial[i] > 0.0) {
                chosen = i;
                if (left < partial[i]) break;
                left -= partial[i];
            }
        }
        drawn_block = chosen;
        target = left;
    }
    uint32_t drawn = NOT_DRAWN;
    if (wanted) {
        __syncthreads();
        const uint32_t start = drawn_block * BLOCK;
        const float temperature = __uint_as_float(weighings[row * WEIGHING]);
        for (uint32_t i = threadIdx.x; i < BLOCK; i += THREADS) {
            float value = start + i < cols ? x[row * cols + start + i] : -INFINITY;
            weights[i] = weight(value, value_of(highest), temperature);
        }
        __syncthreads();
        if (threadIdx.x == 0) drawn = start + pick(weights, BLOCK, target);
    }
    if (threadIdx.x == 0) {
        record[0] = uint64_t(drawn) << 32 | listed;
        record[1] = __double_as_longlong(total);
    }
}
