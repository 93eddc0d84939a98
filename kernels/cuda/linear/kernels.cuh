// The kernels of one weight type: QUANT_KERNELS(q4_k, Q4_K), and of a float type. linear.rs has the shapes' names and sizes.

#pragma once

#include "matmul.cuh"
#include "matvec.cuh"

#define MATVEC(NAME, FORMAT, M)                                                                                                       \
    extern "C" __global__ void __launch_bounds__(matvec::THREADS) matvec_##NAME##_##M(const __grid_constant__ Work work, int depth) { \
        matvec::run<FORMAT, M>(work, depth);                                                                                          \
    }

#define MATMUL(NAME, SIZE, FORMAT, MT, NT, WM, WN, WK, BLOCKS)                                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * WM * WN * WK, BLOCKS) matmul_##NAME##_##SIZE(const __grid_constant__ Work work, int stages) { \
        matmul::run<FORMAT, MT, NT, WM, WN, WK>(work, stages);                                                                                  \
    }

#define QUANT_KERNELS(NAME, FORMAT)              \
    MATVEC(NAME, FORMAT, 1)                      \
    MATVEC(NAME, FORMAT, 2)                      \
    MATVEC(NAME, FORMAT, 3)                      \
    MATVEC(NAME, FORMAT, 4)                      \
    MATMUL(NAME, 8, FORMAT, 1, 1, 2, 1, 8, 1)    \
    MATMUL(NAME, 16, FORMAT, 1, 1, 2, 2, 4, 1)   \
    MATMUL(NAME, 32, FORMAT, 1, 2, 2, 2, 4, 1)   \
    MATMUL(NAME, 64, FORMAT, 1, 2, 2, 4, 2, 1)   \
    MATMUL(NAME, 65, FORMAT, 2, 4, 4, 2, 1, 2)   \
    MATMUL(NAME, 128, FORMAT, 2, 4, 4, 4, 1, 1)

// Floats take the tensor cores from one token on: one order. Their tiles are larger, so blocks are smaller.
#define FLOAT_KERNELS(NAME, FORMAT)           \
    MATMUL(NAME, 8, FORMAT, 1, 1, 2, 1, 4, 1)    \
    MATMUL(NAME, 16, FORMAT, 1, 2, 2, 1, 4, 1)   \
    MATMUL(NAME, 32, FORMAT, 1, 4, 2, 1, 4, 1)   \
    MATMUL(NAME, 64, FORMAT, 1, 4, 2, 2, 2, 1)   \
    MATMUL(NAME, 128, FORMAT, 2, 4, 2, 4, 1, 1)
