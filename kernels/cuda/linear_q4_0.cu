#include "linear/legacy.cuh"

#include "linear/kernels.cuh"

QUANT_KERNELS(q4_0, Q4_0)
