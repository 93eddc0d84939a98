// SPDX-License-Identifier: Apache-2.0

// Helpers over the parameters of one launch of a linear layer: up to four matrices of one type that
// have the same input.

#pragma once

#include <cstdint>

#include "../stream_order.cuh"
#include "abi/linear.cuh"
#include "tile.cuh"

__device__ inline int row_tiles(const LinearParams &params, int matrix) {
    return (params.rows[matrix] + TILE_ROWS - 1) / TILE_ROWS;
}

// Row tiles are dealt in groups of TILES, which never cross matrices. `first` is the first row tile
// of a group.
struct RowTile {
    int matrix, first;
};

template <int TILES>
__device__ inline RowTile find_row_tile(const LinearParams &params, int group) {
    int matrix = 0;
    while (matrix + 1 < params.matrices) {
        int groups = (row_tiles(params, matrix) + TILES - 1) / TILES;
        if (group < groups) break;
        group -= groups;
        matrix++;
    }
    return {matrix, group * TILES};
}

template <int TILES>
__device__ inline int count_row_tile_groups(const LinearParams &params) {
    int groups = 0;
    for (int m = 0; m < params.matrices; m++) groups += (row_tiles(params, m) + TILES - 1) / TILES;
    return groups;
}

// The blocks of a launch that compute the matrices of one type, and this one's place among them.
struct BlockRange {
    int block, blocks;
};

__device__ inline BlockRange all_blocks() { return {int(blockIdx.x), int(gridDim.x)}; }

// Products with the same input run side by side: the second one takes the multiprocessors that the
// first one leaves free. The first one lets it start when the input is complete, so it need not
// wait before it reads. It waits for the first one before it ends, because the kernels behind it
// wait for it alone.
//
//   norm        |=====|
//   first       ..wait|launch_next_kernel ======|
//   second              |========               wait|
//
// In kernels that may be either one:
//   1. A block calls `wait_for_input` before it reads the input and before `launch_next_kernel`.
//   2. Its last call is `wait_for_products_beside`, by at least one thread.
//   3. It reads the input by bulk copies. They do not pass through the first-level cache, which may
//      have lines from before the input was written.
__device__ __forceinline__ void wait_for_input(const LinearParams &params) {
    if (!params.runs_beside_previous) wait_for_previous_kernel();
}
__device__ __forceinline__ void wait_for_products_beside(const LinearParams &params) {
    if (params.runs_beside_previous) wait_for_previous_kernel();
}

// Returns what it stored.
__device__ inline float store_output(const LinearParams &params, int matrix, int row, int token,
                                     float value) {
    int rows = params.rows[matrix];
    if (row >= rows || token >= params.tokens) return value;
    if (params.bias[matrix] != nullptr) value += params.bias[matrix][row];
    params.out[matrix][static_cast<size_t>(token) * rows + row] = value;
    return value;
}
