// out[p] = matrix of pair p's expert times the activations of pair p: the products of linear/matvec.cuh, bit for bit, with the
// matrix picked on the device.
//
// A block is one group of at most four pairs of an expert, some tiles of 16 rows, and one of up to two stacks of matrices. A
// warp computes the values of 256 columns of two tiles at a time, a lane per row; they are added in ascending order of columns
// once all stand in shared memory.
// Limit: weight bytes over memory bandwidth while every expert has few pairs; above that the integer units, since four pairs
// share a read at most.
#pragma once

#include "../linear/async_copy.cuh"
#include "../linear/tile.cuh"
#include "work.cuh"

// As `ProductWork` in experts.rs.
struct ExpertProductWork : ExpertWork {
    // The activations of pair p are token p / pairs_per_token of the panels.
    int pairs_per_token;
    // Tiles of 16 rows of a block.
    int row_tiles;
};

namespace experts {

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int TILES_PER_UNIT = 2;

// The part of token `token` in the panels of column tile `col`, as linear/matvec.cuh lays it out: 16 bytes at 16 `p`.
template <Scaling SCALING>
__device__ uint4 record_piece(const uint8_t *panel, int token, int p) {
    if (p < 16) return load16(panel + panel_piece(token, p));
    const uint32_t *scales = reinterpret_cast<const uint32_t *>(panel + PANEL_QUANTS);
    if constexpr (SCALING == Scaling::PER_256) {
        if (p == 16) return {scales[token], 0, 0, 0};
        return load16(panel + PANEL_QUANTS + 32 + token * 32 + (p - 17) * 16);
    } else {
        // Four blocks' scales or sums, eight tokens apart.
        scales += (p - 16) * 32 + token;
        return {scales[0], scales[8], scales[16], scales[24]};
    }
}

template <class Format, int M>
__device__ void run(const ExpertProductWork &work, const Group &group) {
    extern __shared__ __align__(16) uint8_t shared[];
    constexpr int RECORD = record_bytes(Format::SCALING);
    const int col_tiles = work.col_tiles;
    uint8_t *const records = shared;
    float *const values = reinterpret_cast<float *>(records + M * col_tiles * RECORD);
    const int row_tiles = (work.rows + TILE_ROWS - 1) / TILE_ROWS;
    const int first_tile = blockIdx.x * work.row_tiles, tiles = min(work.row_tiles, row_tiles - first_tile);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    for (int at = threadIdx.x; at < M * col_tiles * (RECORD / 16); at += THREADS) {
        int p = at % (RECORD / 16), record = at / (RECORD / 16), col = record % col_tiles, m = record / col_tiles;
        // A group with fewer pairs repeats its last one.
        uint32_t pair = work.order[group.first + min(m, int(group.pairs) - 1)];
        int token = pair / work.pairs_per_token;
        const uint8_t *panel = work.panels + (size_t(token / PANEL_TOKENS) * col_tiles + col) * panel_bytes(Format::SCALING);
        *reinterpret_cast<uint4 *>(records + record * RECORD + p * 16) = record_piece<Format::SCALING>(panel, token % PANEL_TOKENS, p);
    }
    __syncthreads();

    const size_t matrix_bytes = size_t(row_tiles) * col_tiles * Format::TILE_BYTES;
    const uint8_t *matrix = work.weights[blockIdx.z] + group.expert * matrix_bytes;
    const int row = lane % TILE_ROWS, second = lane / TILE_ROWS;
    const int units_per_tile = (col_tiles + TILES_PER_UNIT - 1) / TILES_PER_UNIT;
    for (int unit = warp; unit < tiles * units_per_tile; unit += WARPS) {
        int tile = unit / units_per_tile, col = unit % units_per_tile * TILES_PER_UNIT + second;
        if (col >= col_tiles) continue;
        float value[M];
        const uint8_t *from = matrix + (size_t(first_tile + tile) * col_tiles + col) * Format::TILE_BYTES;
        Format::template dot<M>(from, row, records + col * RECORD, col_tiles * RECORD, value);
#pragma unroll
        for (int m = 0; m < M; m++) values[((tile * col_tiles + col) * M + m) * TILE_ROWS + row] = value[m];
    }
    __syncthreads();
    for (int at = threadIdx.x; at < tiles * TILE_ROWS * M; at += THREADS) {
        int r = at % TILE_ROWS, m = at / TILE_ROWS % M, tile = at / TILE_ROWS / M;
        int out_row = (first_tile + tile) * TILE_ROWS + r;
        if (m >= int(group.pairs) || out_row >= work.rows) continue;
        const float *from = values + (tile * col_tiles * M + m) * TILE_ROWS + r;
        float sum = 0;
        for (int col = 0; col < col_tiles; col++) sum += from[col * M * TILE_ROWS];
        work.out[blockIdx.z][size_t(work.order[group.first + m]) * work.rows + out_row] = sum;
    }
}

template <class Format>
__device__ void product(const ExpertProductWork &work) {
    wait_for_predecessor();
    let_successor_start();
    if (blockIdx.y >= *work.group_count) return;
    const Group group = work.groups[blockIdx.y];
    if (group.pairs == 1) {
        run<Format, 1>(work, group);
    } else if (group.pairs == 2) {
        run<Format, 2>(work, group);
    } else {
        run<Format, 4>(work, group);
    }
}

}  // namespace experts
