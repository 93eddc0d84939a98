// SPDX-License-Identifier: Apache-2.0

// Programmatic dependent launch: lets kernels of a stream overlap (PTX griddepcontrol).

#pragma once

#include <cstdint>

// In builds with BALLAST_DELAYS, a quarter of the warps wait for up to 16 us: before they let the
// next kernel start, after that, and before they wait for the previous one. So a kernel that reads
// too early, or lets the next one read too early, gives wrong bits.
__device__ __forceinline__ void delay_at_random() {
#ifdef BALLAST_DELAYS
    uint64_t time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    uint32_t warp = (threadIdx.x / 32) + 64 * (blockIdx.x + 4099 * blockIdx.y);
    uint32_t random = (uint32_t(time) ^ warp * 0x9E3779B9u) * 0x85EBCA6Bu;
    random ^= random >> 15;
    // The lanes of a warp read other times; the first lane decides.
    random = __shfl_sync(__activemask(), random, __ffs(__activemask()) - 1);
    if (random % 4 == 0) __nanosleep(random / 4 % 8192);
#endif
}

// Waits for the end of the previous kernel in the stream. The device may start this kernel earlier,
// so code before this call must not touch memory that the previous kernel reads or writes.
__device__ __forceinline__ void wait_for_previous_kernel() {
    delay_at_random();
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the device start the next kernel in the stream. That kernel still waits for the end of this
// one before it reads.
__device__ __forceinline__ void launch_next_kernel() {
    delay_at_random();
    asm volatile("griddepcontrol.launch_dependents;");
    delay_at_random();
}

// Both of the above, for a kernel that reads weights alone before it has waited. With
// `launches_early`, the next kernel starts at once: a product, which copies weights while this
// kernel waits. Other kernels would only wait beside this one, and take its room.
__device__ __forceinline__ void wait_around_launch(bool launches_early) {
    if (launches_early) launch_next_kernel();
    wait_for_previous_kernel();
    if (!launches_early) launch_next_kernel();
}
