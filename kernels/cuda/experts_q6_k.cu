#include "linear/kquants.cuh"

#include "experts/kernels.cuh"

EXPERT_KERNELS(q6_k, Q6_K)
