#include "linear/legacy.cuh"

#include "linear/kernels.cuh"

QUANT_KERNELS(q4_1, Q4_1)
