#include "linear/kquants.cuh"

#include "experts/product.cuh"

EXPERT_KERNEL(q5_k, Q5_K)
