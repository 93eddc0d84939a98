// SPDX-License-Identifier: Apache-2.0

// What the attention kernels share: asynchronous copies, products on tensor cores, the online
// softmax of a split, and the merge of splits. The head of attention.cu defines the order of sums.
//
// A kernel is a template over a Cache: how keys and values are stored in memory and in a pipeline
// stage, and how they become fragments (kv_16bit.cuh, kv_q8_0.cuh).

#pragma once

#include <cfloat>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../kv_layer.cuh"
#include "abi/attention.cuh"
#include "../numeric.cuh"
#include "../shared_memory.cuh"
#include "../stream_order.cuh"
#include "../thread_copies.cuh"

namespace {

constexpr int TILE = ATTENTION_TILE;
constexpr int WARPS = ATTENTION_WARPS;
constexpr int THREADS = 32 * WARPS;
// 16-bit values between the rows in shared memory. Vectors of 16 bytes in successive rows then fall
// into different banks. PAD_BYTES is the same for rows of bytes.
constexpr int PAD = ATTENTION_PAD;
constexpr int PAD_BYTES = ATTENTION_PAD_BYTES;
// The score of a hidden key, and where the search for a largest score begins: differences with it
// are never infinity minus infinity.
constexpr float NO_SCORE = -INFINITY, LOWEST_SCORE = -FLT_MAX;

// Column tiles of the output per warp, if four warps divide the dimensions of a head. Heads of 80
// leave the last two without dimensions: their sums are of what is behind a row, and not stored.
constexpr int output_cols(int dim) { return (dim / 8 + WARPS - 1) / WARPS; }

// The number of this thread among those of the four warps that share a tile.
__device__ __forceinline__ int tile_thread() { return threadIdx.x % THREADS; }

__device__ __forceinline__ void load_matrices(uint32_t (&m)[4], const __half *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address(row))
                 : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&m)[4], const __half *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Products of f16: c += a b, 16 x 16 by 16 x 8, sums in f32.
struct MmaF16 {
    static constexpr bool IS_BF16 = false;
    static constexpr uint32_t ONES = 0x3C003C00;

    static __device__ __forceinline__ uint32_t pack(float low, float high) {
        __half2 both = __floats2half2_rn(low, high);
        return *reinterpret_cast<uint32_t *>(&both);
    }

    static __device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                    uint32_t b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

// Products of bf16. Values beyond f16's range stay in range; queries and weights are rounded to 8
// bits.
struct MmaBf16 {
    static constexpr bool IS_BF16 = true;
    static constexpr uint32_t ONES = 0x3F803F80;

    static __device__ __forceinline__ uint32_t pack(float low, float high) {
        __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<uint32_t *>(&both);
    }

    static __device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                    uint32_t b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

// The running softmax of one row over the tiles of one split.
struct OnlineSoftmax {
    float largest = LOWEST_SCORE;

    // Updates the largest score by that of a tile. Returns the factor for the sums of the tiles
    // before.
    __device__ __forceinline__ float update_max(float tile_largest) {
        float before = largest;
        largest = fmaxf(before, tile_largest);
        return exp2_fast(before - largest);
    }

    __device__ __forceinline__ float weight(float score) const { return exp2_fast(score - largest); }
};

// The merge of the splits of one row. A split may have no key that the row sees; it adds nothing.
struct SplitMerge {
    float largest = LOWEST_SCORE;
    float old_factor, new_factor;

    __device__ __forceinline__ void update(float split_largest) {
        float before = largest;
        largest = fmaxf(before, split_largest);
        old_factor = exp2_fast(before - largest);
        new_factor = exp2_fast(split_largest - largest);
    }

    __device__ __forceinline__ float merge(float total, float split) const {
        return fmaf(total, old_factor, split * new_factor);
    }
};

// The position of the first key that a row sees.
__device__ __forceinline__ uint32_t first_key(uint32_t position, uint32_t window) {
    return position + 1 > window ? position + 1 - window : 0;
}

// Whether a row sees no key at `key`: one after the row, whose distance wraps around, or one before
// the window.
__device__ __forceinline__ bool is_hidden(uint32_t position, uint32_t key, uint32_t window) {
    return position - key >= window;
}

// Keys of a tile that are copied. The others are zeros in shared memory.
struct KeyRange {
    // May be before the tile.
    int first;
    uint32_t count;

    __device__ __forceinline__ bool contains(int key) const { return uint32_t(key - first) < count; }
};

// Stores the `pairs` pairs of a query tile, scaled and rounded for products; the rest of `rows`
// rows become zero.
template <class Cache>
__device__ __forceinline__ void load_queries(__half *to, const AttentionQueries &queries,
                                             const QueryTile &query_tile, uint32_t kv_head, int pairs,
                                             int rows) {
    for (int index = threadIdx.x; index < rows * (Cache::DIM / 4); index += blockDim.x) {
        int pair = index / (Cache::DIM / 4), dim = index % (Cache::DIM / 4) * 4;
        float4 q = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (pair < pairs) {
            size_t row = query_tile.row + pair / queries.group;
            size_t head = kv_head * queries.group + pair % queries.group;
            q = *reinterpret_cast<const float4 *>(queries.values + (row * queries.heads + head) * Cache::DIM +
                                                  dim);
        }
        float s = queries.scale;
        using Mma = typename Cache::Mma;
        Cache::store_query(to + pair * Cache::PITCH, dim, Mma::pack(q.x * s, q.y * s),
                           Mma::pack(q.z * s, q.w * s));
    }
}

// Fills the rows from `pairs` to `rows` - 1 with zeros.
template <class Cache>
__device__ __forceinline__ void zero_query_rows(__half *to, int pairs, int rows) {
    for (int index = threadIdx.x; index < (rows - pairs) * (Cache::DIM / 4); index += blockDim.x)
        Cache::store_query(to + (pairs + index / (Cache::DIM / 4)) * Cache::PITCH,
                           index % (Cache::DIM / 4) * 4, 0, 0);
}

// Address of this lane's row for ldmatrix, for an A fragment: matrices 0 and 1 are rows 0-7 and
// 8-15 of the left half, 2 and 3 those of the right half.
__device__ __forceinline__ const __half *fragment_address_a(const __half *corner, int pitch) {
    int lane = threadIdx.x % 32;
    return corner + (lane % 16) * pitch + lane / 16 * 8;
}

// The same for two B fragments: matrices 0 and 1 are the left and right half of rows 0-7, 2 and 3
// those of rows 8-15.
__device__ __forceinline__ const __half *fragment_address_b(const __half *corner, int pitch) {
    int lane = threadIdx.x % 32;
    return corner + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 8;
}

}  // namespace
