// SPDX-License-Identifier: Apache-2.0

// Products with Q4_0 weights. linear/legacy.cuh has the arithmetic, linear/matvec.cuh and
// linear/matmul.cuh the order of sums and the limits. linear/legacy_wgmma.cuh computes
// the same bits for many tokens.

#include "linear/legacy.cuh"

#include "linear/kernels.cuh"
#include "linear/legacy_wgmma.cuh"
#include "linear/wgmma_kernels.cuh"

QUANT_KERNELS(q4_0, Q4_0)
WGMMA_LEGACY_KERNELS(q4_0, LegacyProducts<Q4_0>)
