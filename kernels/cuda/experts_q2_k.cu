#include "linear/kquants.cuh"

#include "experts/product.cuh"

EXPERT_KERNEL(q2_k, Q2_K)
