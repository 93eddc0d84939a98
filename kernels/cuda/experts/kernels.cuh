// SPDX-License-Identifier: Apache-2.0

// Instantiates the kernels of one weight type: EXPERT_KERNELS(q4_k, Q4_K).

#pragma once

#include "matmul.cuh"
#include "row_matvec.cuh"

// Named by the slots of a group.
#define EXPERT_MATMUL(NAME, FORMAT, SLOTS, ACT_TILES)                                       \
    extern "C" __global__ void __launch_bounds__(32 * EXPERT_MATMUL_WARPS, 2)               \
        expert_matmul_##NAME##_##SLOTS(const __grid_constant__ ExpertMatmulParams params) { \
        static_assert(SLOTS == ACT_TILES * ACT_TILE_TOKENS);                                \
        experts::matmul<FORMAT, ACT_TILES>(params);                                         \
    }                                                                                       \
    CHECK_SIGNATURE(expert_matmul_##NAME##_##SLOTS, ExpertMatmul);

#define EXPERT_ROW(NAME, PART, FORMAT, WORK, READS_EARLY)                            \
    extern "C" __global__ void __launch_bounds__(matvec::THREADS)                    \
        expert_row_##PART##_##NAME(const __grid_constant__ ExpertRowParams params) { \
        expert_row::multiply<FORMAT, expert_row::WORK<FORMAT>, READS_EARLY>(params); \
    }                                                                                \
    CHECK_SIGNATURE(expert_row_##PART##_##NAME, ExpertRow);

// Between the choice of experts and the down product are two kernels, gate and up and their
// activation. The second one waits for the first before it lets the down product start.
#define EXPERT_KERNELS(NAME, FORMAT)                            \
    EXPERT_ROW(NAME, gate_up, FORMAT, GateAndUp, false)         \
    EXPERT_ROW(NAME, down, FORMAT, Down, true)                  \
    EXPERT_MATMUL(NAME, FORMAT, 8, EXPERT_MATMUL_FEW_ACT_TILES) \
    EXPERT_MATMUL(NAME, FORMAT, 32, EXPERT_MATMUL_ACT_TILES)
