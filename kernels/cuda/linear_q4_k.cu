#include "linear/kquants.cuh"

#include "linear/kernels.cuh"

LINEAR_KERNELS(q4_k, Q4_K)
