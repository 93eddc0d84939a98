// SPDX-License-Identifier: Apache-2.0

// Products with F16 weights. linear/float_matmul.cuh has the order of sums and the limits.

#include "linear/float_kernels.cuh"

FLOAT_MATMULS(f16, F16)
