// SPDX-License-Identifier: Apache-2.0

// Products of experts with Q5_K weights. linear/kquants.cuh has the arithmetic, experts/matmul.cuh
// the order of sums and the limits. experts/wgmma.cuh computes the same bits for many pairs an
// expert.

#include "linear/kquants.cuh"

#include "experts/kernels.cuh"
#include "experts/wgmma_kernels.cuh"
#include "linear/affine_k_wgmma.cuh"

EXPERT_KERNELS(q5_k, Q5_K)
EXPERT_FUSED(q5_k_q6_k, Q5_K, Q6_K)
EXPERT_WGMMA_KERNEL(q5_k, Q5KProducts, EXPERT_WGMMA_K_TOKENS)
