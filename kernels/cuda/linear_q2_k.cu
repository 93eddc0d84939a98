#include "linear/kquants.cuh"

#include "linear/kernels.cuh"

LINEAR_KERNELS(q2_k, Q2_K)
