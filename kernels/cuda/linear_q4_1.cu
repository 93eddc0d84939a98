// SPDX-License-Identifier: Apache-2.0

// Products with Q4_1 weights. linear/legacy.cuh has the arithmetic, linear/matvec.cuh and
// linear/matmul.cuh the order of sums and the limits.

#include "linear/legacy.cuh"

#include "linear/kernels.cuh"

QUANT_KERNELS(q4_1, Q4_1)
