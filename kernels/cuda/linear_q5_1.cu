#include "linear/legacy.cuh"

#include "linear/kernels.cuh"

QUANT_KERNELS(q5_1, Q5_1)
