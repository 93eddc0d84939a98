#include "linear/legacy.cuh"

#include "experts/product.cuh"

EXPERT_KERNEL(q5_0, Q5_0)
