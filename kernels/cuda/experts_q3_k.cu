#include "linear/kquants.cuh"

#include "experts/kernels.cuh"

EXPERT_KERNELS(q3_k, Q3_K)
