// SPDX-License-Identifier: Apache-2.0

// Addresses of shared memory as PTX instructions take them.

#pragma once

#include <cstdint>

__device__ __forceinline__ uint32_t shared_address(const void *p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
