#include "linear/kquants.cuh"

#include "experts/product.cuh"

EXPERT_KERNEL(q4_k, Q4_K)
