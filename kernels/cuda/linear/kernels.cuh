// SPDX-License-Identifier: Apache-2.0

// The kernels of one weight type: QUANT_KERNELS(q4_k, Q4_K), or FLOAT_KERNELS for 16-bit floats.
// linear.rs has the same shapes by the same numbers.

#pragma once

#include "matmul.cuh"
#include "matvec.cuh"

#define MATVEC_KERNEL(NAME, FORMAT, M)                                                 \
    extern "C" __global__ void __launch_bounds__(matvec::THREADS)                      \
        matvec_##NAME##_##M(const __grid_constant__ LinearParams params, int stages) { \
        matvec::multiply<FORMAT, M>(params, stages);                                   \
    }                                                                                  \
    CHECK_SIGNATURE(matvec_##NAME##_##M, LinearMatvec);

#define MATMUL_KERNEL(NAME, TOKENS, FORMAT, MT, NT, WM, WN, WK)                             \
    extern "C" __global__ void __launch_bounds__(32 * WM * WN * WK, 1)                      \
        matmul_##NAME##_##TOKENS(const __grid_constant__ LinearParams params, int stages) { \
        matmul::multiply<FORMAT, MT, NT, WM, WN, WK>(params, stages);                       \
    }                                                                                       \
    CHECK_SIGNATURE(matmul_##NAME##_##TOKENS, LinearMatmul);

// Shapes of matmul blocks: MatmulShape in kernels/src/cuda/abi/linear.rs, as macros in
// abi/linear.cuh.
#define QUANT_KERNELS(NAME, FORMAT) \
    MATVEC_KERNEL(NAME, FORMAT, 1)  \
    MATVEC_KERNEL(NAME, FORMAT, 2)  \
    MATVEC_KERNEL(NAME, FORMAT, 3)  \
    MATVEC_KERNEL(NAME, FORMAT, 4)  \
    QUANT_MATMULS(NAME, FORMAT)

#define FLOAT_KERNELS(NAME, FORMAT) FLOAT_MATMULS(NAME, FORMAT)
