// SPDX-License-Identifier: Apache-2.0

// Products of experts with Q4_K weights. linear/kquants.cuh has the arithmetic, experts/matmul.cuh
// the order of sums and the limits. experts/wgmma.cuh computes the same bits for many pairs an
// expert.

#include "linear/kquants.cuh"

#include "experts/kernels.cuh"
#include "experts/wgmma_kernels.cuh"
#include "linear/affine_k_wgmma.cuh"

EXPERT_KERNELS(q4_k, Q4_K)
EXPERT_FUSED(q4_k_q6_k, Q4_K, Q6_K)
EXPERT_WGMMA_KERNEL(q4_k, Q4KProducts, EXPERT_WGMMA_K_TOKENS)
