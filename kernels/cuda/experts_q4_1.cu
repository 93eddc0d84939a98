#include "linear/legacy.cuh"

#include "experts/product.cuh"

EXPERT_KERNEL(q4_1, Q4_1)
