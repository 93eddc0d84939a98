#include "linear/legacy.cuh"

#include "experts/kernels.cuh"

EXPERT_KERNELS(q5_0, Q5_0)
