#include "linear/kquants.cuh"

#include "linear/kernels.cuh"

LINEAR_KERNELS(q5_k, Q5_K)
