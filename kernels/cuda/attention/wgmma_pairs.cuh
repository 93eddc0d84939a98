// SPDX-License-Identifier: Apache-2.0

// The products and the softmax of 64 (row, head) pairs, which a warpgroup of
// attention/prefill_wgmma.cuh computes.
//
//   S = Q K^T   Q and K in shared memory: m64n64k16, DIM / 16 steps over the dimensions
//   O += P V    P in registers: m64n(DIM + 8)k16, four steps over the keys; the last column tile
//               sums the weights

#pragma once

#include "wgmma_stages.cuh"

#if HAS_WGMMA

#include "abi/attention_wgmma.cuh"

namespace {

namespace prefill_wgmma {

__device__ __forceinline__ void commit_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// The 64 pairs of a warpgroup. Fragments are those of prefill.cuh: scores[4 n + i], sums[4 n + i]
// and total_sums[4 n + i] are element i of column tile n. The last column tile of `sums` holds the
// sums of weights.
template <class Mma, int DIM>
struct Pairs {
    static constexpr int COLS = DIM / 8, WEIGHT_SUM = 4 * COLS;
    float scores[TILE / 2], sums[DIM / 2 + 4], total_sums[DIM / 2];
    uint32_t weights[TILE / 16][4];
    uint32_t position[2];
    OnlineSoftmax softmax[2];
    // The factors of the sums before a tile, and the largest scores of the split before it.
    float factor[2], ended_largest[2];
    SplitMerge total[2];
    float total_weights[2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < DIM / 2; i++) sums[i] = total_sums[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) sums[WEIGHT_SUM + i] = 0.0f;
        total_weights[0] = total_weights[1] = 0.0f;
    }

    // Starts S = Q K^T.
    __device__ __forceinline__ void start_scores(uint64_t queries, const Stage<DIM> &stage) {
        const uint64_t keys = operand_descriptor(stage.keys[0], ATOM_BYTES);
#pragma unroll
        for (int k = 0; k < DIM / 16; k++) {
            const int step = k / 4 * (UNIT_BYTES >> 4) + k % 4 * 2;
            if (k == 0)
                ScoresWgmma<Mma::IS_BF16>::template run<0>(scores, queries, keys);
            else
                ScoresWgmma<Mma::IS_BF16>::template run<1>(scores, queries + step, keys + step);
        }
    }

    // Starts O += P V. Columns are contiguous, in units that are UNIT_BYTES apart.
    __device__ __forceinline__ void start_values(const Stage<DIM> &stage) {
        const uint64_t unit_stride = uint64_t((UNIT_BYTES >> 4) - 1) << 16;
        const uint64_t values = operand_descriptor(stage.values[0], ATOM_BYTES) + unit_stride;
#pragma unroll
        for (int k = 0; k < TILE / 16; k++)
            ValuesWgmma<DIM + 8, Mma::IS_BF16>::run(sums, weights[k], values + k * (2 * ATOM_BYTES >> 4));
    }

    // Begins a split. `merge` then takes the one that has ended.
    __device__ __forceinline__ void begin_split() {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            ended_largest[half] = softmax[half].largest;
            softmax[half] = OnlineSoftmax();
        }
    }

    // Replaces the scores of a tile by weights. `is_masked` is false if every row sees every key.
    __device__ __forceinline__ void compute_weights(int tile, bool is_masked, uint32_t window) {
        if (is_masked) {
#pragma unroll
            for (int i = 0; i < TILE / 2; i++) {
                uint32_t key = tile * TILE + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
                if (is_hidden(position[i / 2 % 2], key, window)) scores[i] = NO_SCORE;
            }
        }
        // Four chains of maxima for each row. One chain of 16 would wait for its latency.
        float maxima[16];
#pragma unroll
        for (int i = 0; i < 16; i++) maxima[i] = fmaxf(scores[i], scores[i + 16]);
#pragma unroll
        for (int i = 0; i < 8; i++) maxima[i] = fmaxf(maxima[i], maxima[i + 8]);
        float largest[2];
#pragma unroll
        for (int half = 0; half < 2; half++)
            largest[half] = fmaxf(fmaxf(maxima[2 * half], maxima[2 * half + 1]),
                                  fmaxf(maxima[2 * half + 4], maxima[2 * half + 5]));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 1));
            largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 2));
            factor[half] = softmax[half].update_max(largest[half]);
        }
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) {
            scores[i] = softmax[i / 2 % 2].weight(scores[i]);
            // Otherwise, the compiler computes weights after the wait for P V.
            asm volatile("" : "+f"(scores[i])::"memory");
        }
    }

    // Rounds the weights. C fragments of scores are A fragments of weights.
    __device__ __forceinline__ void round_weights() {
#pragma unroll
        for (int k = 0; k < TILE / 16; k++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                weights[k][i] = Mma::pack(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]);
    }

    // Waits for P V. `weights` may be overwritten afterwards.
    __device__ __forceinline__ void wait_for_values() {
        wait_for_products(sums);
#pragma unroll
        for (int k = 0; k < TILE / 16; k++)
#pragma unroll
            for (int i = 0; i < 4; i++) asm volatile("" : "+r"(weights[k][i])::"memory");
    }

    __device__ __forceinline__ void rescale() {
#pragma unroll
        for (int i = 0; i < DIM / 2 + 4; i++) sums[i] *= factor[i / 2 % 2];
    }

    // Merges the split that has ended.
    __device__ __forceinline__ void merge() {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            total[half].update(ended_largest[half]);
            total_weights[half] = total[half].merge(total_weights[half], sums[WEIGHT_SUM + 2 * half]);
        }
#pragma unroll
        for (int i = 0; i < DIM / 2; i++) {
            total_sums[i] = total[i / 2 % 2].merge(total_sums[i], sums[i]);
            sums[i] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) sums[WEIGHT_SUM + i] = 0.0f;
    }
};

}  // namespace prefill_wgmma

}  // namespace

#endif
