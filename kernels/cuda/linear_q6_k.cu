#include "linear/kquants.cuh"

#include "linear/kernels.cuh"

QUANT_KERNELS(q6_k, Q6_K)
