// SPDX-License-Identifier: Apache-2.0

// Asynchronous copies from global to shared memory, each by one thread (PTX cp.async). A thread
// waits for its own copies only; a barrier then shows them to the others.

#pragma once

#include "shared_memory.cuh"

// Starts a copy of 16 bytes. If not `valid`, it writes zeros and does not read `from`.
__device__ __forceinline__ void copy_async_16(void *to, const void *from, bool valid = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

// The same for 4, 8 or 16 bytes.
template <int BYTES>
__device__ __forceinline__ void copy_async(void *to, const void *from, bool valid = true) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from),
                 "n"(BYTES), "r"(valid ? BYTES : 0)
                 : "memory");
}

// Ends a group of copies.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most LEFT groups of this thread's copies are under way.
template <int LEFT>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
