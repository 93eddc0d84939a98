#include "linear/legacy.cuh"

#include "linear/kernels.cuh"

QUANT_KERNELS(q5_0, Q5_0)
