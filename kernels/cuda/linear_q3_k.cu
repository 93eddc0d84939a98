// SPDX-License-Identifier: Apache-2.0

// Products with Q3_K weights. linear/kquants.cuh has the arithmetic, linear/matvec.cuh and
// linear/matmul.cuh the order of sums and the limits.

#include "linear/kquants.cuh"

#include "linear/kernels.cuh"

QUANT_KERNELS(q3_k, Q3_K)
