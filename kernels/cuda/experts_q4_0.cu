#include "linear/legacy.cuh"

#include "experts/product.cuh"

EXPERT_KERNEL(q4_0, Q4_0)
