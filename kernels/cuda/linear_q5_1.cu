// SPDX-License-Identifier: Apache-2.0

// Products with Q5_1 weights: arithmetic in linear/legacy.cuh, order of sums and limits in
// linear/matvec.cuh and matmul.cuh.

#include "linear/legacy.cuh"

#include "linear/kernels.cuh"

QUANT_KERNELS(q5_1, Q5_1)
