// SPDX-License-Identifier: Apache-2.0

// Programmatic dependent launch: lets kernels of a stream overlap (PTX griddepcontrol).

#pragma once

// Waits for the end of the previous kernel in the stream. The device may start this kernel earlier,
// so code before this call must not touch memory that the previous kernel reads or writes.
__device__ __forceinline__ void wait_for_previous_kernel() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the device start the next kernel in the stream. That kernel still waits for the end of this
// one before it reads.
__device__ __forceinline__ void launch_next_kernel() { asm volatile("griddepcontrol.launch_dependents;"); }
