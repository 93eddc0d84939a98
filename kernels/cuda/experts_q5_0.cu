// SPDX-License-Identifier: Apache-2.0

// Products of experts with Q5_0 weights. linear/legacy.cuh has the arithmetic, experts/matmul.cuh
// the order of sums and the limits. experts/wgmma.cuh computes the same bits for many pairs an
// expert.

#include "linear/legacy.cuh"

#include "experts/kernels.cuh"
#include "experts/wgmma_kernels.cuh"
#include "linear/legacy_wgmma.cuh"

EXPERT_KERNELS(q5_0, Q5_0)
EXPERT_WGMMA_KERNEL(q5_0, LegacyProducts<Q5_0>, EXPERT_WGMMA_LEGACY_TOKENS)
