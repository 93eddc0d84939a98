// The kernels of one weight type: EXPERT_KERNELS(q4_k, Q4_K).

#pragma once

#include "product.cuh"
#include "tiles.cuh"

#define EXPERT_KERNELS(NAME, FORMAT)                                            \
    extern "C" __global__ void __launch_bounds__(experts::THREADS)              \
        expert_product_##NAME(const __grid_constant__ ExpertProductWork work) { \
        experts::product<FORMAT>(work);                                         \
    }                                                                           \
    extern "C" __global__ void __launch_bounds__(32 * experts::ROW_TILES, 2)    \
        expert_tiles_##NAME(const __grid_constant__ ExpertTileWork work) {      \
        experts::tiles<FORMAT>(work);                                           \
    }
