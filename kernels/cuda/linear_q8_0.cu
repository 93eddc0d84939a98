// SPDX-License-Identifier: Apache-2.0

// Products with Q8_0 weights. linear/legacy.cuh has the arithmetic, linear/matvec.cuh and
// linear/matmul.cuh the order of sums and the limits. linear/legacy_wgmma.cuh computes
// the same bits for many tokens.

#include "linear/legacy.cuh"

#include "linear/kernels.cuh"
#include "linear/legacy_wgmma.cuh"
#include "linear/wgmma_kernels.cuh"

QUANT_KERNELS(q8_0, Q8_0)
WGMMA_LEGACY_KERNELS(q8_0, LegacyProducts<Q8_0>)
