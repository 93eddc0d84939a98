// SPDX-License-Identifier: Apache-2.0

// Instantiates the kernels of 16-bit float weights: FLOAT_MATMULS(f16, F16). The build writes that
// macro from FloatShape in kernels/src/cuda/abi/float_linear.rs, so launcher and kernels have the
// same shapes.

#pragma once

#include "float_matmul.cuh"

#define FLOAT_MATMUL_KERNEL(NAME, TOKENS, FLOAT, WARPGROUPS, ROWS, UNITS)                             \
    extern "C" __global__ void __launch_bounds__(float_matmul::threads(WARPGROUPS), 1)                \
        matmul_##NAME##_##TOKENS##x##ROWS(const __grid_constant__ LinearParams params,                \
                                          const __grid_constant__ FloatMaps maps, int stages,         \
                                          int token_rows) {                                           \
        float_matmul::Kernel<FLOAT, WARPGROUPS, ROWS, UNITS>(params, maps, stages, token_rows).run(); \
    }                                                                                                 \
    CHECK_SIGNATURE(matmul_##NAME##_##TOKENS##x##ROWS, FloatMatmul);
