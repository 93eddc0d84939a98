// SPDX-License-Identifier: Apache-2.0

#include "linear/kquants.cuh"

#include "experts/kernels.cuh"

EXPERT_KERNELS(q5_k, Q5_K)
