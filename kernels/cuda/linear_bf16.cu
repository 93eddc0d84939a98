// SPDX-License-Identifier: Apache-2.0

// Products with BF16 weights: arithmetic in linear/floats.cuh, order of sums and limits in
// linear/matmul.cuh.

#include "linear/floats.cuh"

#include "linear/kernels.cuh"

FLOAT_KERNELS(bf16, BF16)

BF16_SMALL_MATMUL(bf16, BF16)
