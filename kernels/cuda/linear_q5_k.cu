#include "linear/kquants.cuh"

#include "linear/kernels.cuh"

QUANT_KERNELS(q5_k, Q5_K)
