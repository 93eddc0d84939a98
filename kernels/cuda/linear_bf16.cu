// SPDX-License-Identifier: Apache-2.0

// Products with BF16 weights. linear/float_matmul.cuh has the order of sums and the limits.

#include "linear/float_kernels.cuh"

FLOAT_MATMULS(bf16, BF16)
