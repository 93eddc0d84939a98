// SPDX-License-Identifier: Apache-2.0

// Instantiates the kernels of one weight type: EXPERT_KERNELS(q4_k, Q4_K).

#pragma once

#include "matvec.cuh"
#include "matmul.cuh"

#define EXPERT_KERNELS(NAME, FORMAT)                                              \
    extern "C" __global__ void __launch_bounds__(experts::THREADS)                \
        expert_matvec_##NAME(const __grid_constant__ ExpertMatvecParams params) { \
        experts::matvec<FORMAT>(params);                                          \
    }                                                                             \
    CHECK_SIGNATURE(expert_matvec_##NAME, ExpertMatvec);                          \
    extern "C" __global__ void __launch_bounds__(32 * experts::ROW_TILES, 2)      \
        expert_matmul_##NAME(const __grid_constant__ ExpertMatmulParams params) { \
        experts::matmul<FORMAT>(params);                                          \
    }                                                                             \
    CHECK_SIGNATURE(expert_matmul_##NAME, ExpertMatmul);
