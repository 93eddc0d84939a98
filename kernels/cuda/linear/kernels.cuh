// The kernels of one weight type: LINEAR_KERNELS(q4_k, Q4_K). linear.rs has the shapes' names and sizes.

#pragma once

#include "matmul.cuh"
#include "matvec.cuh"

#define MATVEC(NAME, FORMAT, M)                                                                                                       \
    extern "C" __global__ void __launch_bounds__(matvec::THREADS) matvec_##NAME##_##M(const __grid_constant__ Work work, int depth) { \
        matvec::run<FORMAT, M>(work, depth);                                                                                          \
    }

#define MATMUL(NAME, SIZE, FORMAT, MT, NT, WM, WN, WK)                                                                              \
    extern "C" __global__ void __launch_bounds__(32 * WM * WN * WK, 1) matmul_##NAME##_##SIZE(const __grid_constant__ Work work, int stages) { \
        matmul::run<FORMAT, MT, NT, WM, WN, WK>(work, stages);                                                                       \
    }

#define LINEAR_KERNELS(NAME, FORMAT)          \
    MATVEC(NAME, FORMAT, 1)                   \
    MATVEC(NAME, FORMAT, 2)                   \
    MATVEC(NAME, FORMAT, 3)                   \
    MATVEC(NAME, FORMAT, 4)                   \
    MATMUL(NAME, 8, FORMAT, 1, 1, 2, 1, 4)    \
    MATMUL(NAME, 16, FORMAT, 1, 2, 2, 1, 4)   \
    MATMUL(NAME, 32, FORMAT, 1, 4, 2, 1, 4)   \
    MATMUL(NAME, 64, FORMAT, 1, 4, 2, 2, 2)   \
    MATMUL(NAME, 128, FORMAT, 2, 8, 4, 2, 1)
