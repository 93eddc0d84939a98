#include "linear/kquants.cuh"

#include "linear/kernels.cuh"

LINEAR_KERNELS(q6_k, Q6_K)
