// SPDX-License-Identifier: Apache-2.0

// The blocks that have a row and KV head together, in grouped_kv.cuh: one, or those of a cluster.
//
//   GROUPS         groups of four warps of a block
//   arrive, wait   a barrier of all threads of these blocks. `arrive` is called before the first
//                  use of another block's memory, and then `wait` and `arrive` in turn
//   wait_last      the last call: a block must not end while others read its memory
//   load, store    values in the shared memory of block `of`, where `own` is in this block

#pragma once

#include <cstdint>

#include "../cluster.cuh"
#include "abi/attention.cuh"

namespace {

template <int BLOCK_GROUPS>
struct LoneBlock {
    static constexpr int GROUPS = BLOCK_GROUPS, COUNT_MAX = 1, SHARED_BYTES_MAX = ATTENTION_GROUPED_BYTES,
                         count = 1, rank = 0;

    __device__ __forceinline__ void arrive() const {}
    __device__ __forceinline__ void wait() const { __syncthreads(); }
    __device__ __forceinline__ void wait_last() const {}

    // Loads values that are `pitch` values apart.
    template <int N>
    __device__ __forceinline__ void load(int, const float *own, int pitch, float (&to)[N]) const {
#pragma unroll
        for (int i = 0; i < N; i++) to[i] = own[i * pitch];
    }
    __device__ __forceinline__ void store(int, float2 *own, float2 value) const { *own = value; }
};

// `count` is a power of two; this block has number `rank`.
struct BlocksOfCluster {
    static constexpr int GROUPS = ATTENTION_GROUPS, COUNT_MAX = ATTENTION_CLUSTER_MAX,
                         SHARED_BYTES_MAX = ATTENTION_CLUSTERED_BYTES;
    int count = cluster_blocks(), rank = rank_in_cluster();

    __device__ __forceinline__ void arrive() const { arrive_at_cluster(); }
    __device__ __forceinline__ void wait() const { wait_for_cluster(); }
    __device__ __forceinline__ void wait_last() const { wait(); }

    template <int N>
    __device__ __forceinline__ void load(int of, const float *own, int pitch, float (&to)[N]) const {
        if (of == rank) return LoneBlock<GROUPS>().load(of, own, pitch, to);
        const uint32_t from = address_in_block(of, own);
#pragma unroll
        for (int i = 0; i < N; i++)
            asm volatile("ld.shared::cluster.f32 %0, [%1];"
                         : "=f"(to[i])
                         : "r"(from + i * pitch * uint32_t(sizeof(float))));
    }
    __device__ __forceinline__ void store(int of, float2 *own, float2 value) const {
        asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address_in_block(of, own)),
                     "f"(value.x), "f"(value.y)
                     : "memory");
    }
};

}  // namespace
