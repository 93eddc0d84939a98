// SPDX-License-Identifier: Apache-2.0

// Instantiates the kernels of wgmma_matrices.cuh for one weight type: WGMMA_K_KERNELS(q4_k,
// Q4KProducts). The macros are in abi/linear.cuh, which the build writes from WgmmaShape in
// kernels/src/cuda/abi/linear.rs.

#pragma once

#include "wgmma_matrices.cuh"

#if HAS_WGMMA
#define MULTIPLY_IN_BLOCKS(FORMAT, ...) \
    wgmma_product::multiply<wgmma_product::FORMAT, wgmma_product::Shape<__VA_ARGS__>>(params, sums)
#else
// The launcher uses these kernels on sm_90a alone.
#define MULTIPLY_IN_BLOCKS(FORMAT, ...) __trap()
#endif

// Four warps per warpgroup, and four that copy.
#define WGMMA_KERNEL(NAME, FORMAT, TOKENS, ROW_GROUPS, COLUMN_GROUPS, BLOCKS, STAGES)            \
    extern "C" __global__ void __launch_bounds__(32 * (4 * ROW_GROUPS * COLUMN_GROUPS + 4), 1)   \
        wgmma_##NAME##_##TOKENS##_##ROW_GROUPS##_##COLUMN_GROUPS##_##BLOCKS(                     \
            const __grid_constant__ LinearParams params, const __grid_constant__ F16Sums sums) { \
        MULTIPLY_IN_BLOCKS(FORMAT, TOKENS, ROW_GROUPS, COLUMN_GROUPS, BLOCKS, STAGES);           \
    }                                                                                            \
    CHECK_SIGNATURE(wgmma_##NAME##_##TOKENS##_##ROW_GROUPS##_##COLUMN_GROUPS##_##BLOCKS, LinearWgmma);
