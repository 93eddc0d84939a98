// The kernels of one weight type: QUANT_KERNELS(q4_k, Q4_K), or FLOAT_KERNELS for 16-bit floats. linear.rs has the same
// shapes by the same numbers.

#pragma once

#include "matmul.cuh"
#include "matvec.cuh"

#define MATVEC(NAME, FORMAT, M)                                               \
    extern "C" __global__ void __launch_bounds__(matvec::THREADS)             \
        matvec_##NAME##_##M(const __grid_constant__ Work work, int depth) {   \
        matvec::run<FORMAT, M>(work, depth);                                  \
    }

#define MATMUL(NAME, TOKENS, FORMAT, MT, NT, WM, WN, WK)                          \
    extern "C" __global__ void __launch_bounds__(32 * WM * WN * WK, 1)            \
        matmul_##NAME##_##TOKENS(const __grid_constant__ Work work, int stages) { \
        matmul::run<FORMAT, MT, NT, WM, WN, WK>(work, stages);                    \
    }

// 16 warps: fewer do not hide the latencies of the steps between the tensor cores.
#define QUANT_KERNELS(NAME, FORMAT)           \
    MATVEC(NAME, FORMAT, 1)                   \
    MATVEC(NAME, FORMAT, 2)                   \
    MATVEC(NAME, FORMAT, 3)                   \
    MATVEC(NAME, FORMAT, 4)                   \
    MATMUL(NAME, 8, FORMAT, 1, 1, 2, 1, 8)    \
    MATMUL(NAME, 16, FORMAT, 1, 1, 2, 2, 4)   \
    MATMUL(NAME, 32, FORMAT, 1, 2, 2, 2, 4)   \
    MATMUL(NAME, 128, FORMAT, 2, 4, 4, 4, 1)

// Floats take the tensor cores from one token on: one order. Their stages are larger, so blocks are smaller.
#define FLOAT_KERNELS(NAME, FORMAT)           \
    MATMUL(NAME, 8, FORMAT, 1, 1, 2, 1, 2)    \
    MATMUL(NAME, 16, FORMAT, 1, 2, 2, 1, 2)   \
    MATMUL(NAME, 32, FORMAT, 1, 4, 4, 1, 1)   \
    MATMUL(NAME, 64, FORMAT, 1, 4, 4, 2, 1)
