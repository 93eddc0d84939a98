// SPDX-License-Identifier: Apache-2.0

// Instantiates the kernels of one quantised weight type: QUANT_KERNELS(q4_k, Q4_K).

#pragma once

#include "matmul.cuh"
#include "matvec.cuh"
#include "skinny_matmul.cuh"

#define MATVEC_KERNEL(NAME, FORMAT)                                                               \
    extern "C" __global__ void __launch_bounds__(matvec::THREADS)                                 \
        matvec_##NAME(const __grid_constant__ LinearParams params, float *residual, int stages) { \
        matvec::multiply<FORMAT>(params, residual, stages);                                       \
    }                                                                                             \
    CHECK_SIGNATURE(matvec_##NAME, LinearMatvec);

#define NORM_MATVEC_KERNEL(NAME, FORMAT)                                            \
    extern "C" __global__ void __launch_bounds__(matvec::THREADS)                   \
        norm_matvec_##NAME(const __grid_constant__ LinearParams params,             \
                           const __grid_constant__ NormedInput input, int stages) { \
        matvec::multiply_normed<FORMAT>(params, input, stages, all_blocks());       \
    }                                                                               \
    CHECK_SIGNATURE(norm_matvec_##NAME, LinearNormMatvec);

#define MATMUL_KERNEL(NAME, TOKENS, FORMAT, MT, NT, WM, WN, WK)                             \
    extern "C" __global__ void __launch_bounds__(32 * WM * WN * WK, 1)                      \
        matmul_##NAME##_##TOKENS(const __grid_constant__ LinearParams params, int stages) { \
        matmul::multiply<FORMAT, MT, NT, WM, WN, WK>(params, stages);                       \
    }                                                                                       \
    CHECK_SIGNATURE(matmul_##NAME##_##TOKENS, LinearMatmul);

#define SKINNY_KERNEL(NAME, TOKENS, FORMAT)                                                      \
    extern "C" __global__ void __launch_bounds__(skinny_matmul::THREADS, 1)                      \
        skinny_##NAME##_##TOKENS(const __grid_constant__ LinearParams params, int stages) {      \
        skinny_matmul::multiply<FORMAT, TOKENS / ACT_TILE_TOKENS>(params, stages, all_blocks()); \
    }                                                                                            \
    CHECK_SIGNATURE(skinny_##NAME##_##TOKENS, LinearSkinny);

// QUANT_MATMULS is in abi/linear.cuh, which the build writes from MatmulShape in
// kernels/src/cuda/abi/linear.rs. So launcher and kernels have the same shapes.
#define QUANT_KERNELS(NAME, FORMAT)  \
    MATVEC_KERNEL(NAME, FORMAT)      \
    NORM_MATVEC_KERNEL(NAME, FORMAT) \
    SKINNY_KERNEL(NAME, 8, FORMAT)   \
    SKINNY_KERNEL(NAME, 16, FORMAT)  \
    QUANT_MATMULS(NAME, FORMAT)
