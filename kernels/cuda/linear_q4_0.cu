#include "linear/legacy.cuh"

#include "linear/kernels.cuh"

LINEAR_KERNELS(q4_0, Q4_0)
