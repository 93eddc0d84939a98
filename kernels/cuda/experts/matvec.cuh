// SPDX-License-Identifier: Apache-2.0

// out[p] = matrix of pair p's expert times the activations of pair p, for few pairs. The products
// are those of linear/matvec.cuh, bit for bit; the device picks the matrix.
//
//   grid: (row blocks, groups, stacks); block: 8 warps, a group of at most four pairs of an expert
//   1. activation rows of the group's pairs -> shared memory
//   2. a warp: two column tiles of a row tile at a time, a lane per row -> values in shared memory
//   3. epilogue: a thread per row and pair adds its values in ascending order of columns
//
// Limit: weight bytes over memory bandwidth while every expert has few pairs. Above that the
// integer units limit it, since at most four pairs share a read of the weights.
#pragma once

#include "../stream_order.cuh"
#include "../linear/tile.cuh"
#include "abi/experts.cuh"

namespace experts {

constexpr int WARPS = EXPERT_MATVEC_WARPS;
constexpr int THREADS = 32 * WARPS;
constexpr int TILES_PER_STAGE = EXPERT_MATVEC_TILES;

// Loads 16 bytes, at offset 16 p, of the activation row of `token`, as linear/matvec.cuh lays it
// out. `act_tile` is the activation tile that has the row.
template <ActivationFormat ACTIVATION>
__device__ uint4 load_act_row_vector(const uint8_t *act_tile, int token, int p) {
    if (p < 16) return load16(act_tile + act_tile_offset(token, p));
    const uint32_t *scales = reinterpret_cast<const uint32_t *>(act_tile + ACT_TILE_QUANT_BYTES);
    if constexpr (ACTIVATION == ActivationFormat::Q8_K) {
        if (p == 16) return {scales[token], 0, 0, 0};
        return load16(act_tile + ACT_TILE_QUANT_BYTES + 32 + token * 32 + (p - 17) * 16);
    } else {
        // Scales, or sums, of four blocks; successive blocks are eight tokens apart.
        scales += (p - 16) * 32 + token;
        return {scales[0], scales[8], scales[16], scales[24]};
    }
}

template <class Format, int M>
__device__ void multiply_group(const ExpertMatvecParams &params, const ExpertGroup &group) {
    extern __shared__ __align__(16) uint8_t shared[];
    constexpr int ACT_ROW_BYTES = act_row_bytes(Format::ACTIVATION);
    const int col_tiles = params.common.col_tiles;
    uint8_t *const act_rows = shared;
    float *const values = reinterpret_cast<float *>(act_rows + M * col_tiles * ACT_ROW_BYTES);
    const int row_tiles = (params.common.rows + TILE_ROWS - 1) / TILE_ROWS;
    const int first_tile = blockIdx.x * params.row_tiles,
              tiles = min(params.row_tiles, row_tiles - first_tile);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    for (int at = threadIdx.x; at < M * col_tiles * (ACT_ROW_BYTES / 16); at += THREADS) {
        int p = at % (ACT_ROW_BYTES / 16), act_row = at / (ACT_ROW_BYTES / 16), col = act_row % col_tiles,
            m = act_row / col_tiles;
        // If the group has fewer than M pairs, its last pair fills the rest; the epilogue skips it.
        uint32_t pair = params.common.sorted_pairs[group.first + min(m, int(group.pairs) - 1)];
        int token = pair / params.pairs_per_token;
        const uint8_t *act_tile =
            params.common.act_tiles +
            (size_t(token / ACT_TILE_TOKENS) * col_tiles + col) * act_tile_bytes(Format::ACTIVATION);
        *reinterpret_cast<uint4 *>(act_rows + act_row * ACT_ROW_BYTES + p * 16) =
            load_act_row_vector<Format::ACTIVATION>(act_tile, token % ACT_TILE_TOKENS, p);
    }
    __syncthreads();

    const size_t matrix_bytes = size_t(row_tiles) * col_tiles * Format::TILE_BYTES;
    const uint8_t *matrix = params.common.weights[blockIdx.z] + group.expert * matrix_bytes;
    const int row = lane % TILE_ROWS, second = lane / TILE_ROWS;
    const int pairs_per_row_tile = (col_tiles + TILES_PER_STAGE - 1) / TILES_PER_STAGE;
    for (int tile_pair = warp; tile_pair < tiles * pairs_per_row_tile; tile_pair += WARPS) {
        int tile = tile_pair / pairs_per_row_tile,
            col = tile_pair % pairs_per_row_tile * TILES_PER_STAGE + second;
        if (col >= col_tiles) continue;
        float value[M];
        const uint8_t *from = matrix + (size_t(first_tile + tile) * col_tiles + col) * Format::TILE_BYTES;
        Format::template dot<M>(from, row, act_rows + col * ACT_ROW_BYTES, col_tiles * ACT_ROW_BYTES, value);
#pragma unroll
        for (int m = 0; m < M; m++) values[((tile * col_tiles + col) * M + m) * TILE_ROWS + row] = value[m];
    }
    __syncthreads();
    for (int at = threadIdx.x; at < tiles * TILE_ROWS * M; at += THREADS) {
        int r = at % TILE_ROWS, m = at / TILE_ROWS % M, tile = at / TILE_ROWS / M;
        int out_row = (first_tile + tile) * TILE_ROWS + r;
        if (m >= int(group.pairs) || out_row >= params.common.rows) continue;
        const float *from = values + (tile * col_tiles * M + m) * TILE_ROWS + r;
        float sum = 0;
        for (int col = 0; col < col_tiles; col++) sum += from[col * M * TILE_ROWS];
        params.common
            .out[blockIdx.z]
                [size_t(params.common.sorted_pairs[group.first + m]) * params.common.rows + out_row] = sum;
    }
}

template <class Format>
__device__ void matvec(const ExpertMatvecParams &params) {
    wait_for_previous_kernel();
    launch_next_kernel();
    if (blockIdx.y >= *params.common.group_count) return;
    const ExpertGroup group = params.common.groups[blockIdx.y];
    if (group.pairs == 1) {
        multiply_group<Format, 1>(params, group);
    } else if (group.pairs == 2) {
        multiply_group<Format, 2>(params, group);
    } else {
        multiply_group<Format, 4>(params, group);
    }
}

}  // namespace experts
