#include "linear/kquants.cuh"

#include "experts/product.cuh"

EXPERT_KERNEL(q3_k, Q3_K)
