// The kernels of one weight type: QUANT_KERNELS(q4_k, Q4_K), or FLOAT_KERNELS for 16-bit floats. linear.rs has the same
// shapes by the same numbers.

#pragma once

#include "matmul.cuh"
#include "matvec.cuh"

#define MATVEC_KERNEL(NAME, FORMAT, M)                                               \
    extern "C" __global__ void __launch_bounds__(matvec::THREADS)             \
        matvec_##NAME##_##M(const __grid_constant__ LinearParams params, int stages) {   \
        matvec::multiply<FORMAT, M>(params, stages);                                  \
    }

#define MATMUL_KERNEL(NAME, TOKENS, FORMAT, MT, NT, WM, WN, WK)                          \
    extern "C" __global__ void __launch_bounds__(32 * WM * WN * WK, 1)            \
        matmul_##NAME##_##TOKENS(const __grid_constant__ LinearParams params, int stages) { \
        matmul::multiply<FORMAT, MT, NT, WM, WN, WK>(params, stages);                    \
    }

// 16 warps: fewer do not hide the latencies of the steps between the tensor cores.
#define QUANT_KERNELS(NAME, FORMAT)           \
    MATVEC_KERNEL(NAME, FORMAT, 1)                   \
    MATVEC_KERNEL(NAME, FORMAT, 2)                   \
    MATVEC_KERNEL(NAME, FORMAT, 3)                   \
    MATVEC_KERNEL(NAME, FORMAT, 4)                   \
    MATMUL_KERNEL(NAME, 8, FORMAT, 1, 1, 2, 1, 8)    \
    MATMUL_KERNEL(NAME, 16, FORMAT, 1, 1, 2, 2, 4)   \
    MATMUL_KERNEL(NAME, 32, FORMAT, 1, 2, 2, 2, 4)   \
    MATMUL_KERNEL(NAME, 128, FORMAT, 2, 4, 4, 4, 1)

// Floats accumulate the tensor cores from one token on: one order. Their stages are larger, so blocks are smaller.
#define FLOAT_KERNELS(NAME, FORMAT)           \
    MATMUL_KERNEL(NAME, 8, FORMAT, 1, 1, 2, 1, 2)    \
    MATMUL_KERNEL(NAME, 16, FORMAT, 1, 2, 2, 1, 2)   \
    MATMUL_KERNEL(NAME, 32, FORMAT, 1, 4, 4, 1, 1)   \
    MATMUL_KERNEL(NAME, 64, FORMAT, 1, 4, 4, 2, 1)
