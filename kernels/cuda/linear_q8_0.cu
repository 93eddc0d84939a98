#include "linear/legacy.cuh"

#include "linear/kernels.cuh"

QUANT_KERNELS(q8_0, Q8_0)
