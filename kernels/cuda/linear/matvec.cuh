// SPDX-License-Identifier: Apache-2.0

// out[t][r] = sum_k weights[r][k] * x[t][k] + bias[r] for one to four tokens; linear.rs launches it
// for up to three. `out` is f32 [tokens][rows]; weights and `x` are tiles (tile.cuh). A lane
// computes one row's value of 256 columns.
//
//      weight tiles of a row tile                  a warp and a stage: two column tiles
//   +---------+---------+---------+---------+      +---------------+---------------+
//   | 16 rows | x 256   | ...     |         |      | lanes 0 - 15  | lanes 16 - 31 |
//   | columns |         |         |         |      | row 0 ... 15  | row 0 ... 15  |
//   +---------+---------+---------+---------+      +---------------+---------------+
//   |<-- tile pair 0 -->|<-- tile pair 1 -->|      a lane: one row of its tile times M
//   tile pairs go to the 8 warps in turn           activation rows (dp4a)
//
//   Each warp has a pipeline of its own. Lane 0 starts the first copies before the previous kernel
//   has ended:
//     bulk copies   pair 0 -> stage 0 | pair 8 -> stage 1 | ...
//     dot products                    | pair 0            | pair 8
//                   values of 256 columns go to shared memory
//     epilogue      a thread per row and token adds its values in ascending order of columns, and
//                   adds the sum to the residual stream if there is one
//
// Shared memory holds the activation rows of all tokens for the whole block. They come from
// activation tiles, or the block computes them (normed_input.cuh). The order of sums is that of
// matmul.cuh.
//
// Limit: weight bytes over memory bandwidth (an H200 copies at 4.3 TB/s). Arithmetic takes about
// 0.8 instructions (Q4_K) per weight and token, where the bandwidth leaves time for 3.9. Measured
// for one token, weights not in the L2 cache, in a graph:
//
//   4096 x 151936   93%: Q4_K 4.1, Q8_0 4.4, Q6_K 4.2 TB/s
//   4096 x 12288    71% (Q4_K, 9.2 us) to 85% (Q8_0, 14.6 us)
//   4096 x 4096     44% (5.0 us) to 68% (6.1 us)
//
// About 2.5 us of each launch are its start, the activations and the last sums.

#pragma once

#include "async_copy.cuh"
#include "normed_input.cuh"
#include "params.cuh"

namespace matvec {

constexpr int WARPS = MATVEC_WARPS;
constexpr int THREADS = 32 * WARPS;
constexpr int TILES_PER_STAGE = MATVEC_TILES_PER_STAGE;

// Row tiles whose values the block collects before it adds them: enough that every warp has a tile
// pair.
__device__ inline int tiles_per_batch(int pairs_per_row_tile) {
    return pairs_per_row_tile >= WARPS ? 1 : (WARPS + pairs_per_row_tile - 1) / pairs_per_row_tile;
}

// Waits for the previous kernel, then copies the tokens' activation rows from the activation tiles
// to shared memory.
template <class Format, int M>
__device__ void fill_act_rows(const LinearParams &params, uint8_t *act_rows) {
    constexpr int ACT_ROW_BYTES = act_row_bytes(Format::ACTIVATION);
    const int col_tiles = params.col_tiles;
    wait_for_previous_kernel();
    for (int at = threadIdx.x; at < M * col_tiles * (ACT_ROW_BYTES / 16); at += THREADS) {
        int p = at % (ACT_ROW_BYTES / 16), act_row = at / (ACT_ROW_BYTES / 16), col = act_row % col_tiles,
            m = act_row / col_tiles;
        const uint8_t *act_tile =
            params.act_tiles + static_cast<size_t>(col) * act_tile_bytes(Format::ACTIVATION);
        uint4 v;
        if (p < 16) {
            v = load16(act_tile + act_tile_offset(m, p));
        } else if constexpr (Format::ACTIVATION == ActivationFormat::Q8_K) {
            if (p == 16) {
                v = {reinterpret_cast<const uint32_t *>(act_tile + ACT_TILE_QUANT_BYTES)[m], 0, 0, 0};
            } else {
                v = load16(act_tile + ACT_TILE_QUANT_BYTES + 32 + m * 32 + (p - 17) * 16);
            }
        } else {
            // Scales, or sums, of four blocks; successive blocks are eight tokens apart.
            const uint32_t *scales =
                reinterpret_cast<const uint32_t *>(act_tile + ACT_TILE_QUANT_BYTES) + (p - 16) * 32 + m;
            v = {scales[0], scales[8], scales[16], scales[24]};
        }
        *reinterpret_cast<uint4 *>(act_rows + act_row * ACT_ROW_BYTES + p * 16) = v;
    }
}

// `fill` waits for the previous kernel and fills the activation rows.
template <class Format, int M, class Fill>
__device__ void multiply_with(const LinearParams &params, float *residual, int stages, Fill fill) {
    extern __shared__ __align__(128) uint8_t shared[];
    constexpr int ACT_ROW_BYTES = act_row_bytes(Format::ACTIVATION);
    constexpr int STAGE_BYTES = TILES_PER_STAGE * Format::TILE_BYTES;
    int col_tiles = params.col_tiles;
    int pairs_per_row_tile = (col_tiles + TILES_PER_STAGE - 1) / TILES_PER_STAGE;
    int batch_tiles = tiles_per_batch(pairs_per_row_tile);
    uint8_t *pipeline = shared;
    uint8_t *act_rows = pipeline + WARPS * stages * STAGE_BYTES;
    float *values = reinterpret_cast<float *>(act_rows + M * col_tiles * ACT_ROW_BYTES);
    int values_per_batch = batch_tiles * col_tiles * TILE_ROWS * M;
    uint64_t *barriers = reinterpret_cast<uint64_t *>(values + 2 * values_per_batch);

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    pipeline += warp * stages * STAGE_BYTES, barriers += warp * stages;
    int total = count_row_tile_groups<1>(params);
    int first_tile = static_cast<int64_t>(blockIdx.x) * total / gridDim.x;
    int tiles = static_cast<int64_t>(blockIdx.x + 1) * total / gridDim.x - first_tile;
    int tile_pairs = tiles * pairs_per_row_tile;

    auto load_stage = [&](int tile_pair, int stage) {
        RowTile row_tile = find_row_tile<1>(params, first_tile + tile_pair / pairs_per_row_tile);
        int col = tile_pair % pairs_per_row_tile * TILES_PER_STAGE;
        uint32_t bytes = min(TILES_PER_STAGE, col_tiles - col) * Format::TILE_BYTES;
        const uint8_t *from = params.weights[row_tile.matrix] +
                              (static_cast<size_t>(row_tile.first) * col_tiles + col) * Format::TILE_BYTES;
        barrier_expect(barriers + stage, bytes);
        bulk_copy(pipeline + stage * STAGE_BYTES, from, bytes, barriers + stage);
    };
    if (lane == 0) {
        for (int stage = 0; stage < stages; stage++) barrier_init(barriers + stage);
        barrier_init_done();
        for (int stage = 0; stage < stages && warp + stage * WARPS < tile_pairs; stage++)
            load_stage(warp + stage * WARPS, stage);
    }
    launch_next_kernel();
    fill(act_rows);
    __syncthreads();

    int row = lane % TILE_ROWS, second = lane / TILE_ROWS;
    int tile_pair = warp, stage = 0, phase = 0;
    for (int batch = 0, parity = 0; batch < tiles; batch += batch_tiles, parity ^= 1) {
        int batch_end = min(batch + batch_tiles, tiles);
        float *batch_values = values + parity * values_per_batch;
        for (; tile_pair < batch_end * pairs_per_row_tile; tile_pair += WARPS) {
            int tile = tile_pair / pairs_per_row_tile - batch,
                col = tile_pair % pairs_per_row_tile * TILES_PER_STAGE + second;
            barrier_wait(barriers + stage, phase);
            if (col < col_tiles) {
                float value[M];
                Format::template dot<M>(pipeline + stage * STAGE_BYTES + second * Format::TILE_BYTES, row,
                                        act_rows + col * ACT_ROW_BYTES, col_tiles * ACT_ROW_BYTES, value);
#pragma unroll
                for (int m = 0; m < M; m++)
                    batch_values[((tile * col_tiles + col) * M + m) * TILE_ROWS + row] = value[m];
            }
            __syncwarp();
            if (lane == 0 && tile_pair + stages * WARPS < tile_pairs)
                load_stage(tile_pair + stages * WARPS, stage);
            if (++stage == stages) stage = 0, phase ^= 1;
        }
        // One barrier per batch is enough for the two buffers. A warp writes to this buffer again
        // only after the next batch's barrier, which every thread reaches after its sums below.
        __syncthreads();
        for (int at = threadIdx.x; at < (batch_end - batch) * TILE_ROWS * M; at += THREADS) {
            int r = at % TILE_ROWS, m = at / TILE_ROWS % M, tile = at / TILE_ROWS / M;
            RowTile row_tile = find_row_tile<1>(params, first_tile + batch + tile);
            int out_row = row_tile.first * TILE_ROWS + r, rows = params.rows[row_tile.matrix];
            // There is one matrix if there is a residual stream.
            float *add_to = residual == nullptr || out_row >= rows ? nullptr : residual + m * rows + out_row;
            float before = add_to == nullptr ? 0.0f : *add_to;
            const float *from = batch_values + (tile * col_tiles * M + m) * TILE_ROWS + r;
            float sum = 0;
#pragma unroll 8
            for (int col = 0; col < col_tiles; col++) sum += from[col * M * TILE_ROWS];
            float stored = store_output(params, row_tile.matrix, out_row, m, sum);
            if (add_to != nullptr) *add_to = before + stored;
        }
    }
}

template <class Format, int M>
__device__ void multiply(const LinearParams &params, float *residual, int stages) {
    multiply_with<Format, M>(params, residual, stages,
                             [&](uint8_t *act_rows) { fill_act_rows<Format, M>(params, act_rows); });
}

// The input is the norm of one row, which the block computes.
template <class Format>
__device__ void multiply_normed(const LinearParams &params, const NormedInput &in, int stages) {
    multiply_with<Format, 1>(params, nullptr, stages, [&](uint8_t *act_rows) {
        normed_input::fill_act_rows<Format::ACTIVATION>(in, params, act_rows);
    });
}

}  // namespace matvec
