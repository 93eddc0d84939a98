// SPDX-License-Identifier: Apache-2.0

// Instantiates the kernels of one weight type: EXPERT_KERNELS(q4_k, Q4_K).

#pragma once

#include "fused.cuh"
#include "matmul.cuh"
#include "row_matvec.cuh"
#include "skinny_matmul.cuh"

#define EXPERT_MATMUL(NAME, FORMAT)                                               \
    extern "C" __global__ void __launch_bounds__(32 * EXPERT_MATMUL_WARPS, 2)     \
        expert_matmul_##NAME(const __grid_constant__ ExpertMatmulParams params) { \
        experts::matmul<FORMAT, EXPERT_MATMUL_ACT_TILES>(params);                 \
    }                                                                             \
    CHECK_SIGNATURE(expert_matmul_##NAME, ExpertMatmul);

#define EXPERT_SKINNY(NAME, FORMAT)                                               \
    extern "C" __global__ void __launch_bounds__(expert_skinny::THREADS, 1)       \
        expert_skinny_##NAME(const __grid_constant__ ExpertSkinnyParams params) { \
        expert_skinny::multiply<FORMAT>(params);                                  \
    }                                                                             \
    CHECK_SIGNATURE(expert_skinny_##NAME, ExpertSkinny);

// Gate and up have the first format, down the second.
#define EXPERT_FUSED(NAME, IN, DOWN)                                            \
    extern "C" __global__ void __launch_bounds__(expert_fused::THREADS, 1)      \
        expert_fused_##NAME(const __grid_constant__ ExpertFusedParams params) { \
        expert_fused::compute<IN, DOWN>(params);                                \
    }                                                                           \
    CHECK_SIGNATURE(expert_fused_##NAME, ExpertFused);

#define EXPERT_ROW(NAME, PART, FORMAT, WORK, READS_EARLY)                            \
    extern "C" __global__ void __launch_bounds__(matvec::THREADS)                    \
        expert_row_##PART##_##NAME(const __grid_constant__ ExpertRowParams params) { \
        expert_row::multiply<FORMAT, expert_row::WORK<FORMAT>, READS_EARLY>(params); \
    }                                                                                \
    CHECK_SIGNATURE(expert_row_##PART##_##NAME, ExpertRow);

// Between the choice of experts and the down product are two kernels, gate and up and their
// activation. The second one waits for the first before it lets the down product start.
#define EXPERT_KERNELS(NAME, FORMAT)                    \
    EXPERT_ROW(NAME, gate_up, FORMAT, GateAndUp, false) \
    EXPERT_ROW(NAME, down, FORMAT, Down, true)          \
    EXPERT_SKINNY(NAME, FORMAT)                         \
    EXPERT_FUSED(NAME, FORMAT, FORMAT)                  \
    EXPERT_MATMUL(NAME, FORMAT)
