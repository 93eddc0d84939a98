#include "linear/kquants.cuh"

#include "experts/product.cuh"

EXPERT_KERNEL(q6_k, Q6_K)
