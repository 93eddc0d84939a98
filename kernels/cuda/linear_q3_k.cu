#include "linear/kquants.cuh"

#include "linear/kernels.cuh"

QUANT_KERNELS(q3_k, Q3_K)
