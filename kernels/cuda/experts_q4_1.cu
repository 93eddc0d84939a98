// SPDX-License-Identifier: Apache-2.0

// Products of experts with Q4_1 weights. linear/legacy.cuh has the arithmetic, experts/matmul.cuh
// the order of sums and the limits.

#include "linear/legacy.cuh"

#include "experts/kernels.cuh"

EXPERT_KERNELS(q4_1, Q4_1)
