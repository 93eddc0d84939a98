#include "linear/floats.cuh"

#include "linear/kernels.cuh"

FLOAT_KERNELS(f16, F16)
