// SPDX-License-Identifier: Apache-2.0

// Products of experts with Q4_0 weights. linear/legacy.cuh has the arithmetic, experts/matmul.cuh
// the order of sums and the limits. experts/wgmma.cuh computes the same bits for many pairs an
// expert.

#include "linear/legacy.cuh"

#include "experts/kernels.cuh"
#include "experts/wgmma_kernels.cuh"
#include "linear/legacy_wgmma.cuh"

EXPERT_KERNELS(q4_0, Q4_0)
EXPERT_WGMMA_KERNEL(q4_0, LegacyProducts<Q4_0>, EXPERT_WGMMA_LEGACY_TOKENS)
