// SPDX-License-Identifier: Apache-2.0

// Products with F16 weights: arithmetic in linear/floats.cuh, order of sums and limits in
// linear/matmul.cuh.

#include "linear/floats.cuh"

#include "linear/kernels.cuh"

FLOAT_KERNELS(f16, F16)
