#include "linear/kquants.cuh"

#include "linear/kernels.cuh"

LINEAR_KERNELS(q3_k, Q3_K)
