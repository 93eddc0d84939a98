// SPDX-License-Identifier: Apache-2.0

// Causal attention over the paged KV cache: out = sum_p softmax_p(scale * query . key_p) * value_p,
// over the positions p up to the row's own, or over the last `window` of them.
//
//   attention_split_kv_*  decode rows and short runs of tokens, a block for each split
//                         (attention/split_kv.cuh); writes partial results
//   attention_merge       merges the partial results of a row and head
//   attention_merge_q8_*  also quantize the row into activation tiles, as quantize.cu does
//   attention_merged_kv_* decode rows and short runs, if they fill the device: a block computes
//                         all splits of its rows, merges them, and quantizes the rows
//   attention_grouped_kv_* few decode rows of few keys without a window: the same, four splits side
//                         by side (attention/grouped_kv.cuh)
//   attention_two_groups_kv_* more rows: two splits side by side
//   attention_clustered_kv_* fewer rows or more keys: four, with a cluster of blocks
//   attention_prefill_*   long runs of tokens (attention/prefill.cuh)
//   attention_prefill_wgmma_*  the same on sm_90a, for caches of two bytes and heads of 64 and 128
//                         (attention/prefill_wgmma.cuh)
//   attention_scalar_*    f32 caches and shapes without a tensor-core kernel (attention/scalar.cuh)
//
// The query heads of a KV head share one tile: pair i is token i / group, head i % group.
//
//   keys of a sequence, in position order
//   +---------+---------+---------+---------+---
//   | tile 0  | tile 1  | tile 2  | tile 3  | ...       a tile is 64 keys
//   +---------+---------+---------+---------+---
//   |<---- split 0 ---->|<---- split 1 ---->|
//
//   one block of attention_split_kv and attention_merged_kv: 4 warps
//   S = Q K^T, 16 pairs x 64 keys               O += P V, 16 pairs x DIM
//   +-------+-------+-------+-------+           +-------+-------+-------+-------+
//   | w0    | w1    | w2    | w3    |     P     | w0    | w1    | w2    | w3    |
//   |16 keys|16 keys|16 keys|16 keys|    --->   | DIM/4 | DIM/4 | DIM/4 | DIM/4 |
//   +-------+-------+-------+-------+           +-------+-------+-------+-------+
//   maxima over warps by shared memory          no sum crosses a warp
//
//   KV pipeline (attention/kv_pipeline.cuh), two stages of one tile of keys and values each. If the
//   blocks of attention_merged_kv would not all be resident with two stages, they have one.
//     cp.async     tile 0 -> stage 0 | tile 1 -> stage 1 | tile 2 -> stage 0 | ...
//     MMA                            | tile 0            | tile 1            | tile 2
//     addresses    of tiles 0 and 1  | of tile 2         | of tile 3         | of tile 4
//     block table  tiles 0, 1 and 2  | tile 3            | tile 4            | tile 5
//
// A prefill block has 64 pairs, and for heads above 128 half of the dimensions. Each warp computes
// 16 pairs against all 64 keys of a tile, keeps O in registers, and merges splits there. The
// fragments of mma.m16n8k16 come from shared memory by ldmatrix; lane 4 g + t holds rows g and
// g + 8.
//
//   a block of attention_prefill_wgmma: two warpgroups of 64 pairs, and four warps that copy
//                   four stages of 64 keys and values, 128-byte swizzle
//                +---------+---------+---------+---------+
//   copies  ---> | tile n  | n + 1   | n + 2   | n + 3   |    cp.async, zeros after the last token
//                +---------+---------+---------+---------+
//                  |  both warpgroups read all stages
//     tensor cores   S n + 1 | O += P V n      | S n + 2 | O += P V n + 1  | ...
//     f32 units              | softmax of n + 1| rescale | softmax of n + 2| ...
//
// A chain of wgmma over k16 steps has the bits of a chain of mma.m16n8k16, and the same fragments
// of a warp's 16 rows (measured on an H200 for f16 and bf16).
//
// The order of a row's sums depends neither on the kernel nor on the other rows of the step
// (invariant I5):
//
// 1. Keys are visited in position order, in tiles of 64.
// 2. Tiles are grouped into splits of S keys, at absolute multiples of S. S depends on the row's
//    own position and the window alone: 64 below 2,048, twice that for every doubling, but no more
//    than a window needs. So a row has at most 32 splits. Splits and tiles before the window are
//    left out.
// 3. Within a split: an online softmax over tiles, sums by m16n8k16 products, queries and weights
//    rounded to f16, sums in f32. The sum of weights is one more column of the product.
// 4. Splits are merged in ascending order by `SplitMerge::update`, in one block or by a merge
//    kernel.
//
// The kernels for caches of bf16 and q8_0 are in images of their own (attention_bf16.cu,
// attention_q8_0.cu), which the worker loads only for such a cache. The merge kernels here merge
// the partial results of all types.
//
// A block of attention_split_kv and attention_merged_kv copies its first tile before the kernel
// that writes the step's keys has ended, unless the step writes keys of that tile. If each row of a
// step is the only one that writes keys which it reads, there is no such kernel: the blocks prepare
// heads and write keys (attention/raw_heads.cuh).
//
// Keys beyond the last token of a tile, and keys before the window of its first row, are not loaded
// but zero: their memory may be unmapped, or hold values that are not finite. A key that is loaded
// for other rows of the query tile has weight 0 in a row that does not see it. A tile without a key
// that a row sees leaves the row's sums as they were.
//
// Limit: decode, bytes of the cache; prefill, tensor cores and the f32 work between two products.
// Measured on an H200 with 32 query heads on 8 KV heads of 128: one row at 16,000 keys 2.9 TB/s, 64
// rows 4.2 (of 4.3), 64 rows at 512 keys 3.7; a chunk of 2,048 at 16,384 240 TFLOP/s, on wgmma 515.

#include "attention/grouped_kv.cuh"
#include "attention/prefill.cuh"
#include "attention/kv_16bit.cuh"
#include "attention/prefill_wgmma.cuh"
#include "attention/scalar.cuh"
#include "attention/split_kv.cuh"
#include "linear/quantize.cuh"

namespace {

template <int DIM>
using F16Cache = Kv16Bit<MmaF16, DIM>;

}  // namespace

SPLIT_KV_KERNEL(64, F16Cache<64>)
SPLIT_KV_KERNEL(80, F16Cache<80>)
SPLIT_KV_KERNEL(96, F16Cache<96>)
SPLIT_KV_KERNEL(128, F16Cache<128>)
SPLIT_KV_KERNEL(192, F16Cache<192>)
SPLIT_KV_KERNEL(256, F16Cache<256>)
GROUPED_KV_KERNELS(64, F16Cache<64>)
GROUPED_KV_KERNELS(80, F16Cache<80>)
GROUPED_KV_KERNELS(96, F16Cache<96>)
GROUPED_KV_KERNELS(128, F16Cache<128>)
PREFILL_KERNEL(64, F16Cache<64>)
PREFILL_KERNEL(80, F16Cache<80>)
PREFILL_KERNEL(96, F16Cache<96>)
PREFILL_KERNEL(128, F16Cache<128>)
PREFILL_KERNEL(192, F16Cache<192>)
PREFILL_KERNEL(256, F16Cache<256>)
PREFILL_WGMMA_KERNEL(64, MmaF16)
PREFILL_WGMMA_KERNEL(128, MmaF16)
SCALAR_KERNEL(f16, KvReaderFloat<__half>)
SCALAR_KERNEL(f32, KvReaderFloat<float>)

namespace {

// The merged value of dimension `i` of a row and head. The lanes of a warp compute the factors of
// all splits together: there are at most 32 splits, one per lane.
__device__ __forceinline__ float merge_dimension(const float *partial_sums, const float2 *partial_weights,
                                                 const PartialMerge &merge, size_t head, int heads, int dim,
                                                 int i) {
    // A thread loads the partial sums of this many splits before it uses the first.
    constexpr int ROUND = 16;
    const int lane = threadIdx.x % 32, splits = merge.splits;
    const size_t step = size_t(merge.stride) * heads * dim;
    const float *sums = partial_sums + (size_t(merge.partial) * heads + head) * dim + i;
    float part[ROUND];
    auto load_round = [&](int round) {
#pragma unroll
        for (int k = 0; k < ROUND; k++)
            part[k] = round + k < splits && i < dim ? sums[(round + k) * step] : 0.0f;
    };
    load_round(0);
    float2 own = make_float2(LOWEST_SCORE, 0.0f);
    if (lane < splits) own = partial_weights[(merge.partial + lane * merge.stride) * heads + head];
    // The largest score up to and including this lane's split; then the factors of
    // `SplitMerge::update`.
    float largest = own.x;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        float below = __shfl_up_sync(~0u, largest, distance);
        if (lane >= distance) largest = fmaxf(largest, below);
    }
    float before = __shfl_up_sync(~0u, largest, 1);
    if (lane == 0) before = LOWEST_SCORE;
    float old_factor = exp2_fast(before - largest), new_factor = exp2_fast(own.x - largest);

    float sum = 0.0f, weight = 0.0f;
    for (int round = 0; round < splits; round += ROUND) {
#pragma unroll
        for (int k = 0; k < ROUND; k++) {
            if (round + k < splits) {
                SplitMerge total;
                total.old_factor = __shfl_sync(~0u, old_factor, round + k);
                total.new_factor = __shfl_sync(~0u, new_factor, round + k);
                weight = total.merge(weight, __shfl_sync(~0u, own.y, round + k));
                sum = total.merge(sum, part[k]);
            }
        }
        if (round + ROUND < splits) load_round(round + ROUND);
    }
    return __fdiv_rn(sum, weight);
}

// A block merges one row and 256 columns of the output, which are whole heads, and quantizes them.
// It is launched for steps whose rows are all merged.
template <class Quantizer>
__device__ void merge_and_quantize(const float *partial_sums, const float2 *partial_weights,
                                   const PartialMerge *merges, const uint32_t *count, int heads, int dim,
                                   float *out, QuantizedRows quantized) {
    __shared__ float merged_values[TILE_COLS];
    const uint32_t rows = *count;
    const PartialMerge merge = merges[blockIdx.x];
    if (blockIdx.x >= rows) return;
    wait_for_previous_kernel();
    launch_next_kernel();
    const int col = blockIdx.y * TILE_COLS + threadIdx.x;
    float value = merge_dimension(partial_sums, partial_weights, merge, col / dim, heads, dim, col % dim);
    out[size_t(merge.row) * heads * dim + col] = value;
    merged_values[threadIdx.x] = value;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = merged_values[threadIdx.x * 8 + i];
    Quantizer::store(v, act_tile_row(quantized, act_tile_bytes(Quantizer::ACTIVATION),
                                     heads * dim / TILE_COLS, merge.row, blockIdx.y));
}

}  // namespace

// One block per row and head, a thread per dimension.
extern "C" __global__ void __launch_bounds__(ATTENTION_HEAD_DIM_MAX)
    attention_merge(const float *partial_sums, const float2 *partial_weights, const PartialMerge *merges,
                    const uint32_t *count, int heads, int dim, float *out) {
    const uint32_t rows = *count;
    const PartialMerge merge = merges[blockIdx.x];
    if (blockIdx.x >= rows) return;
    wait_for_previous_kernel();
    launch_next_kernel();
    const size_t head = blockIdx.y;
    const int i = threadIdx.x;
    float value = merge_dimension(partial_sums, partial_weights, merge, head, heads, dim, i);
    if (i < dim) out[(size_t(merge.row) * heads + head) * dim + i] = value;
}
CHECK_SIGNATURE(attention_merge, AttentionMerge);

#define MERGE_KERNEL(SUFFIX, QUANTIZER)                                                              \
    extern "C" __global__ void __launch_bounds__(TILE_COLS) attention_merge##SUFFIX(                 \
        const float *partial_sums, const float2 *partial_weights, const PartialMerge *merges,        \
        const uint32_t *count, int heads, int dim, float *out, QuantizedRows quantized) {            \
        merge_and_quantize<QUANTIZER>(partial_sums, partial_weights, merges, count, heads, dim, out, \
                                      quantized);                                                    \
    }                                                                                                \
    CHECK_SIGNATURE(attention_merge##SUFFIX, AttentionMergeQuantized);
MERGE_KERNEL(_q8_0, QuantizePer32<ActivationFormat::Q8_0>)
MERGE_KERNEL(_q8_1, QuantizePer32<ActivationFormat::Q8_1>)
MERGE_KERNEL(_q8_k, QuantizePer256)
MERGE_KERNEL(_f16, RoundToF16)
MERGE_KERNEL(_bf16, RoundToBF16)
