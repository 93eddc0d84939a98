// SPDX-License-Identifier: Apache-2.0

// Products of experts with Q8_0 weights. linear/legacy.cuh has the arithmetic, experts/matvec.cuh
// and experts/matmul.cuh the order of sums and the limits.

#include "linear/legacy.cuh"

#include "experts/kernels.cuh"

EXPERT_KERNELS(q8_0, Q8_0)
