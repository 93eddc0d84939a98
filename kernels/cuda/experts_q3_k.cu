// SPDX-License-Identifier: Apache-2.0

// Products of experts with Q3_K weights. linear/kquants.cuh has the arithmetic, experts/matmul.cuh
// the order of sums and the limits.

#include "linear/kquants.cuh"

#include "experts/kernels.cuh"

EXPERT_KERNELS(q3_k, Q3_K)
