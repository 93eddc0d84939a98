#include "linear/floats.cuh"

#include "linear/kernels.cuh"

FLOAT_KERNELS(bf16, BF16)
