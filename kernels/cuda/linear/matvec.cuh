// SPDX-License-Identifier: Apache-2.0

// out[r] = sum_k weights[r][k] * x[k] + bias[r] for one token. `out` is f32 [rows]; weights and `x`
// are tiles (tile.cuh). A lane computes one row's value of 256 columns.
//
//      weight tiles of a row tile                  a warp and a stage: two column tiles
//   +---------+---------+---------+---------+      +---------------+---------------+
//   | 16 rows | x 256   | ...     |         |      | lanes 0 - 15  | lanes 16 - 31 |
//   | columns |         |         |         |      | row 0 ... 15  | row 0 ... 15  |
//   +---------+---------+---------+---------+      +---------------+---------------+
//   |<-- tile pair 0 -->|<-- tile pair 1 -->|      a lane: one row of its tile times the
//   tile pairs go to the 8 warps in turn           activation row (dp4a)
//
//   Each warp has a pipeline of its own. Lane 0 starts the first copy before the previous kernel
//   has ended. The others come behind the loads of activations, unless they are few:
//     bulk copies   pair 0 -> stage 0 | pair 8 -> stage 1 | ...
//     dot products                    | pair 0            | pair 8
//                   values of 256 columns go to shared memory
//     epilogue      a thread per row adds its values in ascending order of columns, and
//                   adds the sum to the residual stream if there is one
//
// Shared memory holds the activation row for the whole block. It comes from activation tiles, or
// the block computes it (normed_input.cuh). The order of sums is that of matmul.cuh.
//
// Limit: weight bytes over memory bandwidth (an H200 copies at 4.3 TB/s). Arithmetic takes about
// 0.8 instructions (Q4_K) per weight, where the bandwidth leaves time for 3.9. Measured
// for one token, weights not in the L2 cache, in a graph, when all copies of weights came before
// the loads of the input:
//
//   4096 x 151936   93%: Q4_K 4.1, Q8_0 4.4, Q6_K 4.2 TB/s
//   4096 x 12288    71% (Q4_K, 9.2 us) to 85% (Q8_0, 14.6 us)
//   4096 x 4096     44% (5.0 us) to 68% (6.1 us)
//
// About 2.5 us of each launch are its start, the activations and the last sums.

#pragma once

#include "../thread_copies.cuh"
#include "async_copy.cuh"
#include "normed_input.cuh"
#include "params.cuh"

namespace matvec {

constexpr int WARPS = MATVEC_WARPS;
constexpr int THREADS = 32 * WARPS;
constexpr int TILES_PER_STAGE = MATVEC_TILES_PER_STAGE;
// Weights of a block up to which their copies need not come behind the loads of the input: these
// bytes of two blocks arrive in 2.5 us.
constexpr int EARLY_BYTES_MAX = 40 << 10;

// Row tiles whose values the block collects before it adds them: enough that every warp has a tile
// pair.
__device__ inline int tiles_per_batch(int pairs_per_row_tile) {
    return pairs_per_row_tile >= WARPS ? 1 : (WARPS + pairs_per_row_tile - 1) / pairs_per_row_tile;
}

// Starts copies of the activation rows of `tokens` tokens, [tokens][col_tiles], from the activation
// tiles to shared memory. All are under way at once: loads by way of registers wait for each other,
// 0.9 us each beside the copies of weights.
template <ActivationFormat KIND>
__device__ void copy_act_rows(const uint8_t *act_tiles, int col_tiles, int tokens, uint8_t *act_rows) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = lane - 16;
    for (int m = 0; m < tokens; m++) {
        const int group = m / ACT_TILE_TOKENS, token = m % ACT_TILE_TOKENS;
        for (int col = warp; col < col_tiles; col += WARPS) {
            const uint8_t *act_tile = act_tiles + (size_t(group) * col_tiles + col) * act_tile_bytes(KIND);
            const uint8_t *scales = act_tile + ACT_TILE_QUANT_BYTES;
            uint8_t *row = act_rows + (m * col_tiles + col) * act_row_bytes(KIND);
            if (part < 0) {
                copy_async_16(row + lane * 16, act_tile + act_tile_offset(token, lane));
            } else if constexpr (KIND == ActivationFormat::Q8_K) {
                if (part == 0) copy_async<4>(row + ACT_ROW_SCALES, scales + token * 4);
                if (part == 1 || part == 2)
                    copy_async_16(row + act_row_sums(KIND) + (part - 1) * 16,
                                  scales + 32 + token * 32 + (part - 1) * 16);
            } else if (part < (act_row_bytes(KIND) - ACT_ROW_SCALES) / 4) {
                // Scales, then sums, of blocks of 32 columns; successive blocks are eight tokens
                // apart.
                copy_async<4>(row + ACT_ROW_SCALES + part * 4, scales + part * 32 + token * 4);
            }
        }
    }
    commit_copies();
}

// A tile pair of the block: its row tile, counted from the block's first one, and its place in that
// row tile.
struct TilePair {
    int tile, pair;

    // The next one of the same warp.
    __device__ void advance(int pairs_per_row_tile) { skip(WARPS, pairs_per_row_tile); }
    __device__ void skip(int pairs, int pairs_per_row_tile) {
        for (pair += pairs; pair >= pairs_per_row_tile; pair -= pairs_per_row_tile) tile++;
    }
};

// Adds the values of `tiles` row tiles from `first_tile` on, behind a barrier of the block, and
// stores the sums.
__device__ inline void add_values(const LinearParams &params, float *residual, int first_tile, int tiles,
                                  const float *values) {
    const int col_tiles = params.col_tiles, elements = tiles * TILE_ROWS;
    // With a residual stream, there is one matrix. So a thread adds to one value at
    // most, which arrives while the other warps end.
    static_assert(WARPS * TILE_ROWS <= THREADS);
    const int residual_at = first_tile * TILE_ROWS + threadIdx.x;
    const bool adds = residual != nullptr && threadIdx.x < elements && residual_at < params.rows[0];
    const float before = adds ? residual[residual_at] : 0.0f;
    __syncthreads();
    for (int at = threadIdx.x; at < elements; at += THREADS) {
        int r = at % TILE_ROWS, tile = at / TILE_ROWS;
        RowTile row_tile = find_row_tile<1>(params, first_tile + tile);
        const float *from = values + tile * col_tiles * TILE_ROWS + r;
        float sum = 0;
#pragma unroll 16
        for (int col = 0; col < col_tiles; col++) sum += from[col * TILE_ROWS];
        float stored = store_output(params, row_tile.matrix, row_tile.first * TILE_ROWS + r, 0, sum);
        if (adds) residual[residual_at] = before + stored;
    }
}

// `fill` waits for the previous kernel, starts loads of activations, calls the function that it is
// given, and fills the activation rows. That function starts more copies of weights. If these came
// first, the loads would wait for them: 107 to 147 KiB a multiprocessor take 3 to 4 us.
template <class Format, class Fill>
__device__ void multiply_with(const LinearParams &params, float *residual, int stages, BlockRange range,
                              Fill fill) {
    extern __shared__ __align__(128) uint8_t shared[];
    constexpr int ACT_ROW_BYTES = act_row_bytes(Format::ACTIVATION);
    constexpr int STAGE_BYTES = TILES_PER_STAGE * Format::TILE_BYTES;
    int col_tiles = params.col_tiles;
    int pairs_per_row_tile = (col_tiles + TILES_PER_STAGE - 1) / TILES_PER_STAGE;
    int batch_tiles = tiles_per_batch(pairs_per_row_tile);
    uint8_t *pipeline = shared;
    uint8_t *act_rows = pipeline + WARPS * stages * STAGE_BYTES;
    float *values = reinterpret_cast<float *>(act_rows + col_tiles * ACT_ROW_BYTES);
    int values_per_batch = batch_tiles * col_tiles * TILE_ROWS;
    uint64_t *barriers = reinterpret_cast<uint64_t *>(values + 2 * values_per_batch);

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    pipeline += warp * stages * STAGE_BYTES, barriers += warp * stages;
    int total = count_row_tile_groups<1>(params);
    int first_tile = static_cast<int64_t>(range.block) * total / range.blocks;
    int tiles = static_cast<int64_t>(range.block + 1) * total / range.blocks - first_tile;

    const int early_stages = tiles * col_tiles * Format::TILE_BYTES <= EARLY_BYTES_MAX ? stages : 1;
    TilePair own = {}, next = {};
    own.skip(warp, pairs_per_row_tile);
    next = own;
    auto load_next = [&](int stage) {
        RowTile row_tile = find_row_tile<1>(params, first_tile + next.tile);
        int col = next.pair * TILES_PER_STAGE;
        uint32_t bytes = min(TILES_PER_STAGE, col_tiles - col) * Format::TILE_BYTES;
        const uint8_t *from = params.weights[row_tile.matrix] +
                              (static_cast<size_t>(row_tile.first) * col_tiles + col) * Format::TILE_BYTES;
        barrier_expect(barriers + stage, bytes);
        bulk_copy(pipeline + stage * STAGE_BYTES, from, bytes, barriers + stage);
        next.advance(pairs_per_row_tile);
    };
    if (lane == 0) {
        for (int stage = 0; stage < stages; stage++) barrier_init(barriers + stage);
        barrier_init_done();
        for (int stage = 0; stage < early_stages && next.tile < tiles; stage++) load_next(stage);
    }
    launch_next_kernel();
    fill(act_rows, [&] {
        if (lane == 0)
            for (int stage = early_stages; stage < stages && next.tile < tiles; stage++) load_next(stage);
    });
    __syncthreads();

    int row = lane % TILE_ROWS, second = lane / TILE_ROWS;
    int stage = 0, phase = 0;
    for (int batch = 0, parity = 0; batch < tiles; batch += batch_tiles, parity ^= 1) {
        int batch_end = min(batch + batch_tiles, tiles);
        float *batch_values = values + parity * values_per_batch;
        for (; own.tile < batch_end; own.advance(pairs_per_row_tile)) {
            int tile = own.tile - batch, col = own.pair * TILES_PER_STAGE + second;
            barrier_wait(barriers + stage, phase);
            if (col < col_tiles)
                batch_values[(tile * col_tiles + col) * TILE_ROWS + row] =
                    Format::dot(pipeline + stage * STAGE_BYTES + second * Format::TILE_BYTES, row,
                                act_rows + col * ACT_ROW_BYTES);
            __syncwarp();
            if (lane == 0 && next.tile < tiles) load_next(stage);
            if (++stage == stages) stage = 0, phase ^= 1;
        }
        // One barrier per batch is enough for the two buffers. A warp writes to this buffer again
        // only after the next batch's barrier, which every thread reaches after its sums.
        add_values(params, residual, first_tile + batch, batch_end - batch, batch_values);
    }
}

template <class Format>
__device__ void multiply(const LinearParams &params, float *residual, int stages) {
    multiply_with<Format>(
        params, residual, stages, all_blocks(), [&](uint8_t *act_rows, auto copy_more_weights) {
            wait_for_previous_kernel();
            copy_act_rows<Format::ACTIVATION>(params.act_tiles, params.col_tiles, 1, act_rows);
            copy_more_weights();
            wait_copies<0>();
        });
}

// The input is the norm of one row, which the block computes.
template <class Format>
__device__ void multiply_normed(const LinearParams &params, const NormedInput &in, int stages,
                                BlockRange range) {
    multiply_with<Format>(params, nullptr, stages, range, [&](uint8_t *act_rows, auto copy_more_weights) {
        normed_input::fill_act_rows<Format::ACTIVATION>(in, params, act_rows, copy_more_weights);
    });
}

// The same for matrices of two types. The first `first_blocks` blocks compute those of the first
// type.
template <class First, class Second>
__device__ void multiply_normed_both(const LinearParams &first, const LinearParams &second,
                                     const NormedInput &in, int first_stages, int second_stages,
                                     int first_blocks) {
    static_assert(First::ACTIVATION == Second::ACTIVATION);
    const int block = blockIdx.x, blocks = gridDim.x;
    if (block < first_blocks) {
        multiply_normed<First>(first, in, first_stages, {block, first_blocks});
    } else {
        multiply_normed<Second>(second, in, second_stages, {block - first_blocks, blocks - first_blocks});
    }
}

}  // namespace matvec
