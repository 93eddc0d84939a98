// What one launch of a linear layer works on: up to four matrices of one type that share their input.

#pragma once

#include <cstdint>

#include "tile.cuh"

constexpr int MATRICES_MAX = 4;

// As `LinearParams` in linear.rs.
struct LinearParams {
    // Tiles (quant's layout 1) or, of floats, rows; 16-byte aligned.
    const uint8_t *weights[MATRICES_MAX];
    // f32 [tokens][rows].
    float *out[MATRICES_MAX];
    // f32 [rows], or null.
    const float *bias[MATRICES_MAX];
    int rows[MATRICES_MAX];
    int matrices;
    int cols;
    // SubBlock16KQuant of 256 columns.
    int col_tiles;
    int tokens;
    // Panel of tokens 8 p to 8 p + 7 and columns 256 c to 256 c + 255 is number p * col_tiles + c.
    const uint8_t *act_tiles;
};

__device__ inline int row_tiles(const LinearParams &params, int matrix) { return (params.rows[matrix] + TILE_ROWS - 1) / TILE_ROWS; }

// Groups of `tiles` row tiles over all matrices: `matrix` and `first` row tile of group `group`.
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

__device__ inline void store_output(const LinearParams &params, int matrix, int row, int token, float value) {
    int rows = params.rows[matrix];
    if (row >= rows || token >= params.tokens) return;
    if (params.bias[matrix] != nullptr) value += params.bias[matrix][row];
    params.out[matrix][static_cast<size_t>(token) * rows + row] = value;
}
