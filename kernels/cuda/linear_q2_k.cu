// SPDX-License-Identifier: Apache-2.0

// Products with Q2_K weights: arithmetic in linear/kquants.cuh, order of sums and limits in
// linear/matvec.cuh and matmul.cuh.

#include "linear/kquants.cuh"

#include "linear/kernels.cuh"

QUANT_KERNELS(q2_k, Q2_K)
