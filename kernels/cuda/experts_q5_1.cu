#include "linear/legacy.cuh"

#include "experts/kernels.cuh"

EXPERT_KERNELS(q5_1, Q5_1)
