// SPDX-License-Identifier: Apache-2.0

// Copies of boxes of a tensor from global to shared memory. `TensorMap` says what the tensor and
// the boxes are; the launcher has the driver encode it. Needs compute capability 9.0.

#pragma once

#include <cstdint>

#include "abi/float_linear.cuh"
#include "async_copy.cuh"

// Starts the copy of the box at (x, y, z), x being the fastest dimension; `barrier` counts the
// bytes of the whole box. Elements outside of the tensor become zeros.
__device__ inline void tensor_copy(void *to, const TensorMap *map, int x, int y, int z, uint64_t *barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
        "%3, %4}], [%5];" ::"r"(shared_address(to)),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
        : "memory");
}
