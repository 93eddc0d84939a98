// SPDX-License-Identifier: Apache-2.0

// Products with F16 weights. linear/floats.cuh has the arithmetic, linear/matmul.cuh the order of
// sums and the limits.

#include "linear/floats.cuh"

#include "linear/kernels.cuh"

FLOAT_KERNELS(f16, F16)
