// SPDX-License-Identifier: Apache-2.0

// Instantiates the kernels of wgmma_product.cuh for one weight type: WGMMA_KERNELS(q4_k,
// Q4KProducts).

#pragma once

#include "wgmma_product.cuh"

#if HAS_WGMMA
#define MULTIPLY(FORMAT, TOKENS, SPLIT) \
    wgmma_product::multiply<wgmma_product::FORMAT, TOKENS, SPLIT>(params, quants)
#else
// The launcher uses these kernels on sm_90a alone.
#define MULTIPLY(FORMAT, TOKENS, SPLIT) __trap()
#endif

// Blocks of TOKENS tokens. SPLIT of them, a cluster, divide the columns.
#define WGMMA_KERNEL(NAME, FORMAT, TOKENS, SPLIT)                                                        \
    extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(WGMMA_PRODUCT_THREADS, 1) \
        wgmma_##NAME##_##TOKENS##_##SPLIT(const __grid_constant__ LinearParams params,                   \
                                          const __grid_constant__ F16Quants quants) {                    \
        MULTIPLY(FORMAT, TOKENS, SPLIT);                                                                 \
    }                                                                                                    \
    CHECK_SIGNATURE(wgmma_##NAME##_##TOKENS##_##SPLIT, LinearWgmma);

#define WGMMA_KERNELS(NAME, FORMAT)   \
    WGMMA_KERNEL(NAME, FORMAT, 64, 1) \
    WGMMA_KERNEL(NAME, FORMAT, 64, 2) \
    WGMMA_KERNEL(NAME, FORMAT, 128, 1)
