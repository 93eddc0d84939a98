#include "linear/kquants.cuh"

#include "linear/kernels.cuh"

QUANT_KERNELS(q4_k, Q4_K)
