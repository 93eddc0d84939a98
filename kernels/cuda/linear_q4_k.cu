// SPDX-License-Identifier: Apache-2.0

// Products with Q4_K weights. linear/kquants.cuh has the arithmetic, linear/matvec.cuh and
// linear/matmul.cuh the order of sums and the limits. linear/affine_k_wgmma.cuh computes the same
// bits for many tokens.

#include "linear/kquants.cuh"

#include "linear/kernels.cuh"
#include "linear/affine_k_wgmma.cuh"
#include "linear/wgmma_kernels.cuh"

QUANT_KERNELS(q4_k, Q4_K)
WGMMA_K_KERNELS(q4_k, Q4KProducts)
