// SPDX-License-Identifier: Apache-2.0

// Bulk copies from global to shared memory, which an mbarrier counts. They need compute capability
// 9.0.

#pragma once

#include <cstdint>

#include "../shared_memory.cuh"
#include "../stream_order.cuh"

// A phase of the barrier completes after `arrivals` arrivals and the copies they expect.
__device__ inline void barrier_init(uint64_t *barrier, int arrivals = 1) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}

__device__ inline void barrier_arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Makes the initialised barriers visible to the copy engine.
__device__ inline void barrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and makes the phase wait for `bytes` of copies as well.
__device__ inline void barrier_expect(uint64_t *barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

__device__ inline void barrier_wait(uint64_t *barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "wait:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra wait;\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// Arrives at a barrier in any block of the cluster (cluster.cuh). Loads that the arrival tells of
// must have ended, since it is no release (value_exchange.cuh says why).
__device__ inline void arrive_in_block(uint32_t barrier) {
    asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Stores to shared memory of a block of the cluster; `barrier` in that block counts the 16 bytes.
// value_exchange.cuh says why barrier_wait() is enough in that block.
__device__ inline void store_async(uint32_t to, float4 value, uint32_t barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::
            "r"(to),
        "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
        : "memory");
}

// Completes this thread's loads from shared memory before a bulk copy may overwrite that memory.
// Call it before the barrier that tells the copying thread that the memory was read. An arrival at
// a barrier does not complete loads: bulk copies belong to another proxy of PTX, and loads that
// waited for busy memory returned bytes of the copy. A thread needs no call if it has stored values
// that it computed from the loads.
__device__ inline void end_loads_before_copy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Starts a copy; `barrier` counts its bytes. `to`, `from` and `bytes` are multiples of 16.
__device__ inline void bulk_copy(void *to, const void *from, uint32_t bytes, uint64_t *barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}
