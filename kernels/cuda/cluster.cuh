// SPDX-License-Identifier: Apache-2.0

// What blocks of a cluster share: a barrier, and addresses in each other's shared memory. All lanes
// of a warp call the functions of the barrier.

#pragma once

#include <cstdint>

#include "shared_memory.cuh"

__device__ __forceinline__ int cluster_blocks() {
    int count;
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(count));
    return count;
}

__device__ __forceinline__ int rank_in_cluster() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The barrier completes when all threads of the cluster have arrived or ended.
__device__ __forceinline__ void arrive_at_cluster() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// The same without an order of other memory operations, which would wait for stores to global
// memory. Enough if other blocks only need mbarriers that were initialised before
// barrier_init_done().
__device__ __forceinline__ void arrive_at_cluster_relaxed() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() {
    __syncwarp();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The place in the shared memory of block `rank` that `own` is in this block's.
__device__ __forceinline__ uint32_t address_in_block(int rank, const void *own) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(rank));
    return address;
}
