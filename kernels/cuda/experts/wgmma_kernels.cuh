// SPDX-License-Identifier: Apache-2.0

// Instantiates the kernel of wgmma.cuh for one weight type and the slots of a group at most:
// EXPERT_WGMMA_KERNEL(q4_k, Q4KProducts, EXPERT_WGMMA_K_TOKENS).

#pragma once

#include "wgmma.cuh"

#if HAS_WGMMA
#define MULTIPLY_EXPERTS(FORMAT, TOKENS) \
    experts::multiply_on_wgmma<wgmma_product::FORMAT, TOKENS>(params, stacks, sums)
#else
// The launcher uses these kernels on sm_90a alone.
#define MULTIPLY_EXPERTS(FORMAT, TOKENS) __trap()
#endif

#define EXPERT_WGMMA_KERNEL(NAME, FORMAT, TOKENS)                                                        \
    extern "C" __global__ void __launch_bounds__(32 * EXPERT_WGMMA_WARPS, 1) expert_wgmma_##NAME(        \
        const __grid_constant__ ExpertParams params, int stacks, const __grid_constant__ F16Sums sums) { \
        MULTIPLY_EXPERTS(FORMAT, TOKENS);                                                                \
    }                                                                                                    \
    CHECK_SIGNATURE(expert_wgmma_##NAME, ExpertWgmma);
