// SPDX-License-Identifier: Apache-2.0

// Products with Q2_K weights. linear/kquants.cuh has the arithmetic, linear/matvec.cuh and
// linear/matmul.cuh the order of sums and the limits.

#include "linear/kquants.cuh"

#include "linear/kernels.cuh"

QUANT_KERNELS(q2_k, Q2_K)
NORM_MATVEC_KERNEL(q2_k_q3_k, Q2_K, Q3_K)
NORM_MATVEC_KERNEL(q2_k_q4_k, Q2_K, Q4_K)
