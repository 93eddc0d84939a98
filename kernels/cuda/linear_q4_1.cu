#include "linear/legacy.cuh"

#include "linear/kernels.cuh"

LINEAR_KERNELS(q4_1, Q4_1)
