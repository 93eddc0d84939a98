#include "linear/kquants.cuh"

#include "linear/kernels.cuh"

QUANT_KERNELS(q2_k, Q2_K)
