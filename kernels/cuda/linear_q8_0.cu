#include "linear/legacy.cuh"

#include "linear/kernels.cuh"

LINEAR_KERNELS(q8_0, Q8_0)
