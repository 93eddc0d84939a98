// Products with BF16 weights: arithmetic in linear/floats.cuh, order of sums and limits in linear/matmul.cuh.

#include "linear/floats.cuh"

#include "linear/kernels.cuh"

FLOAT_KERNELS(bf16, BF16)

// Three blocks of it fit a multiprocessor.
MATMUL_KERNEL(bf16, 8_short, BF16, 1, 1, 2, 1, 1)
