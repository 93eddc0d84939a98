// SPDX-License-Identifier: Apache-2.0

#include "linear/legacy.cuh"

#include "experts/kernels.cuh"

EXPERT_KERNELS(q8_0, Q8_0)
