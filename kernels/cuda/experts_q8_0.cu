#include "linear/legacy.cuh"

#include "experts/product.cuh"

EXPERT_KERNEL(q8_0, Q8_0)
