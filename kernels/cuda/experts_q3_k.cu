// SPDX-License-Identifier: Apache-2.0

#include "linear/kquants.cuh"

#include "experts/kernels.cuh"

EXPERT_KERNELS(q3_k, Q3_K)
