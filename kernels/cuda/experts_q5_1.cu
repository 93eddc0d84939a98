#include "linear/legacy.cuh"

#include "experts/product.cuh"

EXPERT_KERNEL(q5_1, Q5_1)
