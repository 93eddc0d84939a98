// SPDX-License-Identifier: Apache-2.0

// Instantiates the kernels of one weight type: EXPERT_KERNELS(q4_k, Q4_K).

#pragma once

#include "matmul.cuh"

// Named by the slots of a group.
#define EXPERT_MATMUL(NAME, FORMAT, SLOTS, ACT_TILES)                                       \
    extern "C" __global__ void __launch_bounds__(32 * EXPERT_MATMUL_WARPS, 2)               \
        expert_matmul_##NAME##_##SLOTS(const __grid_constant__ ExpertMatmulParams params) { \
        static_assert(SLOTS == ACT_TILES * ACT_TILE_TOKENS);                                \
        experts::matmul<FORMAT, ACT_TILES>(params);                                         \
    }                                                                                       \
    CHECK_SIGNATURE(expert_matmul_##NAME##_##SLOTS, ExpertMatmul);

#define EXPERT_KERNELS(NAME, FORMAT)                            \
    EXPERT_MATMUL(NAME, FORMAT, 8, EXPERT_MATMUL_FEW_ACT_TILES) \
    EXPERT_MATMUL(NAME, FORMAT, 32, EXPERT_MATMUL_ACT_TILES)
