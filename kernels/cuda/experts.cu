// Mixture of experts around its products (experts_*.cu): which experts a row goes through, which rows an expert works on,
// and the sum of what they made.
//
//   expert_choose   a warp per row: softmax of the router's logits over all experts, the best `used` of them in falling
//                   order (a tie goes to the lower index), their probabilities divided by their sum
//   expert_group    one block: (row, rank) pairs in order of experts, cut into groups of at most GROUP pairs of one expert
//   expert_combine  out[r] = sum of probability times contribution, in rank order
//   expert_product_f32, _f16, _bf16  products of float experts: a warp per pair and matrix row
//
// Pair p is rank p % used of row p / used. Grouping decides who reads an expert's weights together, never a result.
// Limit: latency; expert_combine: bytes, 4 (used + 1) per value.

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "experts/group.cuh"
#include "numeric.cuh"

namespace {

// Smallest divisor when probabilities are renormalised (the smallest normal f16, as ops::choose_experts has it).
constexpr float PROBABILITY_SUM_MIN = 1.0f / 16384.0f;
// Of a lane: up to 512 experts.
constexpr int PER_LANE = 16;
constexpr int GROUP_THREADS = 1024;
constexpr int EXPERTS_MAX = 32 * PER_LANE;

__device__ float to_float(float x) { return x; }
__device__ float to_float(__half x) { return __half2float(x); }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// A lane takes columns lane, lane + 32, ...; lanes are added by a butterfly.
template <typename T>
__device__ void float_product(const T *weights, const float *x, const uint32_t *experts, int pairs_per_token, int rows, int cols, float *out) {
    wait_for_predecessor();
    let_successor_start();
    int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    size_t pair = blockIdx.y;
    weights += (size_t(experts[pair]) * rows + row) * cols;
    x += pair / pairs_per_token * cols;
    float sum = 0.0f;
    for (int i = lane; i < cols; i += 32) sum = fmaf(to_float(weights[i]), x[i], sum);
    sum = warp_sum(sum);
    if (lane == 0) out[pair * rows + row] = sum;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128)
    expert_choose(const float *logits, int rows, int count, int used, uint32_t *experts, float *shares) {
    wait_for_predecessor();
    let_successor_start();
    int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    logits += size_t(row) * count;
    float probability[PER_LANE];
    float largest = -INFINITY;
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) {
        int expert = k * 32 + lane;
        probability[k] = expert < count ? logits[expert] : -INFINITY;
        largest = fmaxf(largest, probability[k]);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
    double weights[PER_LANE], total = 0.0;
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) {
        weights[k] = k * 32 + lane < count ? exp(double(probability[k] - largest)) : 0.0;
        total += weights[k];
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) total += __shfl_xor_sync(~0u, total, distance);
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) probability[k] = k * 32 + lane < count ? float(weights[k] / total) : -1.0f;

    float own = 0.0f, sum = 0.0f;
    uint32_t own_expert = 0;
    for (int rank = 0; rank < used; rank++) {
        // What is not a number comes first, so that it shows.
        float best = -2.0f;
        uint32_t best_expert = 0;
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) {
            float key = probability[k] != probability[k] ? 2.0f : probability[k];
            if (key > best) best = key, best_expert = k * 32 + lane;
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            float other = __shfl_xor_sync(~0u, best, distance);
            uint32_t other_expert = __shfl_xor_sync(~0u, best_expert, distance);
            if (other > best || (other == best && other_expert < best_expert)) best = other, best_expert = other_expert;
        }
        float chosen = best == 2.0f ? NAN : best;
#pragma unroll
        for (int k = 0; k < PER_LANE; k++)
            if (k * 32 + lane == int(best_expert)) probability[k] = -1.5f;
        sum += chosen;
        if (lane == rank % 32) own = chosen, own_expert = best_expert;
        // A lane keeps one rank of every 32.
        if (rank % 32 == 31 || rank + 1 == used) {
            int first = rank / 32 * 32;
            if (first + lane <= rank) {
                experts[size_t(row) * used + first + lane] = own_expert;
                shares[size_t(row) * used + first + lane] = own;
            }
        }
    }
    __syncwarp();
    float divisor = sum != sum ? sum : fmaxf(sum, PROBABILITY_SUM_MIN);
    for (int rank = lane; rank < used; rank += 32) {
        float *share = shares + size_t(row) * used + rank;
        *share = __fdiv_rn(*share, divisor);
    }
}

// `order` gets all pairs by ascending expert, and in ascending order of one expert; `groups` their groups, `*group_count` how
// many there are.
extern "C" __global__ void __launch_bounds__(GROUP_THREADS)
    expert_group(const uint32_t *experts, int pairs, int count, int group_pairs, uint32_t *order, Group *groups, uint32_t *group_count) {
    __shared__ uint32_t counts[EXPERTS_MAX];
    __shared__ uint32_t first_pair[EXPERTS_MAX], first_group[EXPERTS_MAX];
    wait_for_predecessor();
    let_successor_start();
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int e = threadIdx.x; e < count; e += GROUP_THREADS) counts[e] = 0;
    __syncthreads();
    for (int p = threadIdx.x; p < pairs; p += GROUP_THREADS) atomicAdd(&counts[experts[p]], 1u);
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32_t pair = 0, group = 0;
        for (int e = 0; e < count; e++) {
            first_pair[e] = pair, first_group[e] = group;
            pair += counts[e];
            group += (counts[e] + group_pairs - 1) / group_pairs;
        }
        *group_count = group;
    }
    __syncthreads();
    for (int e = warp; e < count; e += GROUP_THREADS / 32) {
        uint32_t total = counts[e];
        if (total == 0) continue;
        uint32_t found = 0;
        for (int first = 0; first < pairs && found < total; first += 32) {
            bool is_its = first + lane < pairs && experts[first + lane] == uint32_t(e);
            uint32_t which = __ballot_sync(~0u, is_its);
            if (is_its) order[first_pair[e] + found + __popc(which & ((1u << lane) - 1))] = first + lane;
            found += __popc(which);
        }
        for (uint32_t g = lane; g * group_pairs < total; g += 32) {
            uint32_t pairs_left = total - g * group_pairs;
            groups[first_group[e] + g] = {uint32_t(e), first_pair[e] + g * group_pairs, min(pairs_left, uint32_t(group_pairs))};
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    expert_combine(const float *contributions, const float *shares, int used, int cols, float *out) {
    wait_for_predecessor();
    let_successor_start();
    size_t row = blockIdx.x;
    for (int i = threadIdx.x; i < cols; i += 256) {
        float sum = 0.0f;
        for (int rank = 0; rank < used; rank++) {
            size_t pair = row * used + rank;
            sum += shares[pair] * contributions[pair * cols + i];
        }
        out[row * cols + i] = sum;
    }
}

#define FLOAT_PRODUCT(NAME, TYPE)                                                                                               \
    extern "C" __global__ void __launch_bounds__(256) expert_product_##NAME(const TYPE *weights, const float *x, const uint32_t *experts, \
                                                                            int pairs_per_token, int rows, int cols, float *out) { \
        float_product<TYPE>(weights, x, experts, pairs_per_token, rows, cols, out);                                             \
    }
FLOAT_PRODUCT(f32, float)
FLOAT_PRODUCT(f16, __half)
FLOAT_PRODUCT(bf16, __nv_bfloat16)
