// SPDX-License-Identifier: Apache-2.0

#include "linear/legacy.cuh"

#include "experts/kernels.cuh"

EXPERT_KERNELS(q4_1, Q4_1)
