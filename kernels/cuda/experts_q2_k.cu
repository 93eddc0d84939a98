#include "linear/kquants.cuh"

#include "experts/kernels.cuh"

EXPERT_KERNELS(q2_k, Q2_K)
