#include "linear/legacy.cuh"

#include "experts/kernels.cuh"

EXPERT_KERNELS(q8_0, Q8_0)
