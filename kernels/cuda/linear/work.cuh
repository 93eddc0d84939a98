// What one launch of a linear layer works on: up to four matrices of one type that share their input.

#pragma once

#include <cstdint>

#include "tile.cuh"

constexpr int MATRICES_MAX = 4;

// As `Work` in linear.rs.
struct Work {
    // Tiles (quant's layout 1) or, of floats, rows; 16-byte aligned.
    const uint8_t *weights[MATRICES_MAX];
    // f32 [tokens][rows].
    float *out[MATRICES_MAX];
    // f32 [rows], or null.
    const float *bias[MATRICES_MAX];
    int rows[MATRICES_MAX];
    int matrices;
    int cols;
    // Runs of 256 columns.
    int col_tiles;
    int tokens;
    // Panel of tokens 8 p to 8 p + 7 and columns 256 c to 256 c + 255 is number p * col_tiles + c.
    const uint8_t *panels;
};

__device__ inline int row_tiles(const Work &work, int matrix) { return (work.rows[matrix] + TILE_ROWS - 1) / TILE_ROWS; }

// Groups of `tiles` row tiles over all matrices: `matrix` and `first` row tile of group `group`.
struct Place {
    int matrix, first;
};

template <int TILES>
__device__ inline Place place_of_group(const Work &work, int group) {
    int matrix = 0;
    while (matrix + 1 < work.matrices) {
        int groups = (row_tiles(work, matrix) + TILES - 1) / TILES;
        if (group < groups) break;
        group -= groups;
        matrix++;
    }
    return {matrix, group * TILES};
}

template <int TILES>
__device__ inline int groups_of_all(const Work &work) {
    int groups = 0;
    for (int m = 0; m < work.matrices; m++) groups += (row_tiles(work, m) + TILES - 1) / TILES;
    return groups;
}

__device__ inline void store(const Work &work, int matrix, int row, int token, float value) {
    int rows = work.rows[matrix];
    if (row >= rows || token >= work.tokens) return;
    if (work.bias[matrix] != nullptr) value += work.bias[matrix][row];
    work.out[matrix][static_cast<size_t>(token) * rows + row] = value;
}
