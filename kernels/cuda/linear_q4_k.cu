// SPDX-License-Identifier: Apache-2.0

// Products with Q4_K weights. linear/kquants.cuh has the arithmetic, linear/matvec.cuh and
// linear/matmul.cuh the order of sums and the limits. linear/q4_k_wgmma.cuh computes the same bits
// for many tokens.

#include "linear/kquants.cuh"

#include "linear/kernels.cuh"
#include "linear/q4_k_wgmma.cuh"

QUANT_KERNELS(q4_k, Q4_K)

#if HAS_WGMMA
#define MULTIPLY(TOKENS, SPLIT) q4_k_wgmma::multiply<TOKENS, SPLIT>(params, quants)
#else
// The launcher uses these kernels on sm_90a alone.
#define MULTIPLY(TOKENS, SPLIT) __trap()
#endif

// Blocks of TOKENS tokens. SPLIT of them, a cluster, divide the columns.
#define WGMMA_KERNEL(TOKENS, SPLIT)                                                                  \
    extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(Q4K_WGMMA_THREADS, 1) \
        wgmma_q4_k_##TOKENS##_##SPLIT(const __grid_constant__ LinearParams params,                   \
                                      const __grid_constant__ F16Quants quants) {                    \
        MULTIPLY(TOKENS, SPLIT);                                                                     \
    }                                                                                                \
    CHECK_SIGNATURE(wgmma_q4_k_##TOKENS##_##SPLIT, LinearWgmma);
WGMMA_KERNEL(64, 1)
WGMMA_KERNEL(64, 2)
WGMMA_KERNEL(128, 1)
