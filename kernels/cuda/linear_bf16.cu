// SPDX-License-Identifier: Apache-2.0

// Products with BF16 weights. linear/floats.cuh has the arithmetic, linear/matmul.cuh the order of
// sums and the limits. BF16_SMALL_MATMUL adds a kernel for at most 8 tokens, of which three blocks
// fit a multiprocessor.

#include "linear/floats.cuh"

#include "linear/kernels.cuh"

FLOAT_KERNELS(bf16, BF16)

BF16_SMALL_MATMUL(bf16, BF16)
