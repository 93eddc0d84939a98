// SPDX-License-Identifier: Apache-2.0

#include "linear/kquants.cuh"

#include "experts/kernels.cuh"

EXPERT_KERNELS(q4_k, Q4_K)
