// SPDX-License-Identifier: Apache-2.0

// out[t][r] = sum_k weights[r][k] * x[t][k] + bias[r] on the tensor cores, for at most 8 NT tokens.
// `out` is f32 [tokens][rows]; weights and `x` are tiles (tile.cuh). A block has a run of row
// tiles, whose weight tiles lie one after the other. A warp computes the values of one weight tile
// at a time: 16 rows by 256 columns by 8 NT tokens.
//
//      weight tiles of a block, row tile by row tile
//   +---------+---------+---------+---------+
//   | 16 rows | x 256   | ...     |         | row tile 0    a stage: TILES successive weight tiles
//   +---------+---------+---------+---------+               a round: a weight tile for each of the
//   | ...     |         |         |         | row tile 1             WARPS multiplying warps
//   +---------+---------+---------+---------+
//
//   Warps are specialised:
//     copying warp       stage 0 | stage 1 | stage 2 | ...     weights, ahead of the others
//     multiplying warps            round 0         | round 1   values of 256 columns -> buffer
//     adding warps                                 | round 0   buffer -> sums by ascending columns
//
//   barriers                completes when
//     full[stage]           the copies of the stage have arrived
//     empty[stage]          the warps have used its tiles
//     act_full[piece]       the activations of TILES column tiles have arrived
//     values_full[buffer]   the warps have stored the values of a round
//     values_empty[buffer]  the adding warps have loaded them
//
// So no barrier stops all warps, and a multiplying warp may be up to two rounds ahead of others of
// its kind. Shared memory holds the activation tiles of all columns for the whole block. The order
// of sums is that of matmul.cuh.
//
// Limit: weight bytes over memory bandwidth (an H200 copies at 4.3 TB/s). A multiplying warp issues
// 251 instructions for a weight tile of Q4_K and 8 tokens, 369 for 16 tokens. Measured, times in us
// of this kernel, of matmul.cuh, and of the weights' bytes alone:
//
//                   8 tokens                                  16 tokens
//                   4096 x 12288         4096 x 151936        4096 x 12288         4096 x 151936
//   Q4_K            10.8, 10.8, 6.6      92, 98, 82           13.2, 16.5, 6.6      115, 173, 82
//   Q6_K            14.4, 14.2, 9.6      131, 129, 119        15.7, 21.0, 9.6      140, 220, 119
//   Q8_0            15.0, 15.9, 12.5     158, 159, 154        17.6, 19.5, 12.5     175, 195, 154
//
// In a step it gains more than that, since the memory works while the kernel before ends. With one
// adding warp instead of four, the second product of Q4_K took 105 us.

#pragma once

#include "async_copy.cuh"
#include "params.cuh"

namespace skinny_matmul {

// Warps that multiply. The next ones add, each an element of all C fragments, and the last one
// copies. One adding warp would take longer for a round than the others.
constexpr int WARPS = SKINNY_WARPS, ADDING_WARPS = SKINNY_ADDING_WARPS, COPYING_WARP = WARPS + ADDING_WARPS;
constexpr int THREADS = 32 * (COPYING_WARP + 1);
static_assert(ADDING_WARPS == 4);
// Weight tiles of a stage. Copies of fewer bytes take longer for each byte.
constexpr int TILES = SKINNY_STAGE_TILES;
static_assert(WARPS % TILES == 0);
constexpr int BUFFERS = SKINNY_VALUE_BUFFERS;
// Stages of a round. The ring has whole rounds, so that a stage is always used by the same warps.
// Otherwise a warp that is ahead of others would take an earlier phase of `full` for its own.
constexpr int ROUND_STAGES = WARPS / TILES;
// Stages of weights that are copied before the activations are, which wait for the copies before
// them. With two, eight streams of qwen3-8b Q8_0 decode 2.3% slower (H200).
constexpr int EARLY_STAGES = ROUND_STAGES;

template <class Format, int NT>
struct Matmul {
    static constexpr int TILE_BYTES = Format::TILE_BYTES, STAGE_BYTES = TILES * TILE_BYTES;
    static constexpr int ACT_TILE_BYTES = act_tile_bytes(Format::ACTIVATION);
    // Values of a weight tile: elements of C fragments (mma.cuh), [NT][4 elements][32 lanes].
    static constexpr int TILE_VALUES = 128 * NT;

    const LinearParams &params;
    const int stages, col_tiles;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint8_t *ring, *act_tiles;
    float *values;
    uint64_t *full, *empty, *act_full, *values_full, *values_empty;
    // The block's row tiles, counted over all matrices, and its weight tiles.
    int first_row_tile, tiles;

    __device__ Matmul(const LinearParams &params, int stages, BlockRange range, uint8_t *shared)
        : params(params), stages(stages), col_tiles(params.col_tiles), ring(shared) {
        act_tiles = ring + stages * STAGE_BYTES;
        values = reinterpret_cast<float *>(act_tiles + NT * col_tiles * ACT_TILE_BYTES);
        full = reinterpret_cast<uint64_t *>(values + BUFFERS * WARPS * TILE_VALUES);
        empty = full + stages, values_full = empty + stages, values_empty = values_full + BUFFERS,
        act_full = values_empty + BUFFERS;
        int total = count_row_tile_groups<1>(params);
        first_row_tile = static_cast<int64_t>(range.block) * total / range.blocks;
        tiles = (static_cast<int64_t>(range.block + 1) * total / range.blocks - first_row_tile) * col_tiles;
    }

    __device__ int act_pieces() const { return (col_tiles + TILES - 1) / TILES; }

    // Each warp initialises some of the barriers.
    __device__ void init_barriers() const {
        int barriers = 2 * stages + 2 * BUFFERS + act_pieces();
        for (int at = warp; at < barriers; at += COPYING_WARP + 1) {
            uint64_t *barrier = full + at;
            int warps_arriving = barrier < values_full    ? TILES
                                 : barrier < values_empty ? WARPS
                                                          : ADDING_WARPS;
            int arrivals = barrier < empty || barrier >= act_full ? 1 : 32 * warps_arriving;
            barrier_init(barrier, arrivals);
        }
        barrier_init_done();
    }

    // Where the copying warp is: tiles of the matrix from `from` on.
    struct Cursor {
        int matrix, left, copied;
        const uint8_t *from;
    };

    __device__ void copy_stage(Cursor &cursor, int stage) const {
        int count = min(TILES, tiles - cursor.copied);
        uint8_t *to = ring + stage * STAGE_BYTES;
        barrier_expect(full + stage, count * TILE_BYTES);
        cursor.copied += count;
        while (count > 0) {
            while (cursor.left == 0) {
                cursor.matrix++;
                cursor.from = params.weights[cursor.matrix];
                cursor.left = row_tiles(params, cursor.matrix) * col_tiles;
            }
            int part = min(count, cursor.left);
            bulk_copy(to, cursor.from, part * TILE_BYTES, full + stage);
            to += part * TILE_BYTES, cursor.from += part * TILE_BYTES;
            count -= part, cursor.left -= part;
        }
    }

    __device__ void copy_act_piece(int piece) const {
        int groups = (params.tokens + ACT_TILE_TOKENS - 1) / ACT_TILE_TOKENS, col = piece * TILES;
        uint32_t bytes = min(TILES, col_tiles - col) * ACT_TILE_BYTES;
        barrier_expect(act_full + piece, groups * bytes);
        for (int group = 0; group < groups; group++) {
            size_t at = (static_cast<size_t>(group) * col_tiles + col) * ACT_TILE_BYTES;
            bulk_copy(act_tiles + at, params.act_tiles + at, bytes, act_full + piece);
        }
    }

    // Copies the first stages' weights before the previous kernel has ended. After that, a piece of
    // activations comes before the stage that needs it first.
    __device__ void copy() const {
        RowTile first = find_row_tile<1>(params, first_row_tile);
        Cursor cursor = {
            first.matrix, (row_tiles(params, first.matrix) - first.first) * col_tiles, 0,
            params.weights[first.matrix] + static_cast<size_t>(first.first) * col_tiles * TILE_BYTES};
        const int early_stages = EARLY_STAGES;
        int stage = 0, piece = 0, phase = 1;
        for (; stage < early_stages && cursor.copied < tiles; stage++) copy_stage(cursor, stage);
        wait_for_input(params);
        launch_next_kernel();
        for (; piece <= early_stages && piece < act_pieces(); piece++) copy_act_piece(piece);
        for (; cursor.copied < tiles; stage++) {
            if (stage == stages) stage = 0, phase ^= 1;
            barrier_wait(empty + stage, phase);
            copy_stage(cursor, stage);
            if (piece < act_pieces()) copy_act_piece(piece++);
        }
        for (; piece < act_pieces(); piece++) copy_act_piece(piece);
    }

    __device__ void multiply() const {
        int stage = warp / TILES, phase = 0, buffer = 0, buffer_phase = 1;
        int col = warp % col_tiles;
        const int ring_offset = warp % TILES * TILE_BYTES;
        float *own = values + warp * TILE_VALUES + lane;
        for (int at = warp; at - warp < tiles; at += WARPS) {
            bool has_tile = at < tiles;
            float value[NT][4];
            if (has_tile) {
                barrier_wait(act_full + col / TILES, 0);
                barrier_wait(full + stage, phase);
                Format::template products<1, NT>(ring + stage * STAGE_BYTES + ring_offset, TILE_BYTES,
                                                 act_tiles + col * ACT_TILE_BYTES, col_tiles * ACT_TILE_BYTES,
                                                 [&](int, int nt, int i, float v) { value[nt][i] = v; });
            }
            // Also without a tile: an arrival must not count for the round before.
            barrier_wait(values_empty + buffer, buffer_phase);
            if (has_tile) {
                float *to = own + buffer * WARPS * TILE_VALUES;
#pragma unroll
                for (int nt = 0; nt < NT; nt++)
#pragma unroll
                    for (int i = 0; i < 4; i++) to[(nt * 4 + i) * 32] = value[nt][i];
            }
            barrier_arrive(values_full + buffer);
            if (has_tile) barrier_arrive(empty + stage);
            for (col += WARPS; col >= col_tiles;) col -= col_tiles;
            if ((stage += ROUND_STAGES) >= stages) stage -= stages, phase ^= 1;
            if (++buffer == BUFFERS) buffer = 0, buffer_phase ^= 1;
        }
    }

    // Where an adding warp stores: rows of a matrix from `row` on. Its lane has one row and a token
    // of each activation tile.
    struct Output {
        int matrix, row, rows;
        float *out;
        const float *bias;

        __device__ void begin(const LinearParams &params, int matrix_index, int row_tile) {
            matrix = matrix_index, row = row_tile * TILE_ROWS, rows = params.rows[matrix];
            out = params.out[matrix], bias = params.bias[matrix];
        }

        // Stores the sums of a row tile, and goes on to the next one.
        __device__ void store(const LinearParams &params, int lane_row, int lane_token,
                              const float (&sums)[NT]) {
            int r = row + lane_row;
            float bias_value = bias != nullptr && r < rows ? bias[r] : 0;
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                int token = nt * ACT_TILE_TOKENS + lane_token;
                if (r < rows && token < params.tokens)
                    out[static_cast<size_t>(token) * rows + r] =
                        bias != nullptr ? sums[nt] + bias_value : sums[nt];
            }
            row += TILE_ROWS;
            while (row >= rows && matrix + 1 < params.matrices) begin(params, matrix + 1, 0);
        }
    };

    __device__ void add() const {
        // Tiles that are added without a look at each, if they are of one row tile.
        constexpr int STEP = 4;
        static_assert(WARPS % STEP == 0);
        const int element = warp - WARPS;
        const int lane_row = lane / 4 + element / 2 * 8, lane_token = lane % 4 * 2 + element % 2;
        RowTile first = find_row_tile<1>(params, first_row_tile);
        Output output;
        output.begin(params, first.matrix, first.first);
        float sums[NT] = {};
        int col = 0, buffer = 0, phase = 0;
        auto end_row_tile = [&] {
            output.store(params, lane_row, lane_token, sums);
            col = 0;
#pragma unroll
            for (int nt = 0; nt < NT; nt++) sums[nt] = 0;
        };
        for (int round = 0; round < tiles; round += WARPS) {
            barrier_wait(values_full + buffer, phase);
            const float *from = values + buffer * WARPS * TILE_VALUES + element * 32 + lane;
            // Those beyond the last tile are old values, which are not added.
            float loaded[WARPS][NT];
#pragma unroll
            for (int j = 0; j < WARPS; j++)
#pragma unroll
                for (int nt = 0; nt < NT; nt++) loaded[j][nt] = from[j * TILE_VALUES + nt * 128];
            barrier_arrive(values_empty + buffer);
#pragma unroll
            for (int step = 0; step < WARPS; step += STEP) {
                if (col + STEP <= col_tiles && round + step + STEP <= tiles) {
#pragma unroll
                    for (int j = 0; j < STEP; j++)
#pragma unroll
                        for (int nt = 0; nt < NT; nt++) sums[nt] += loaded[step + j][nt];
                    if ((col += STEP) == col_tiles) end_row_tile();
                    continue;
                }
#pragma unroll
                for (int j = 0; j < STEP; j++) {
                    if (round + step + j >= tiles) break;
#pragma unroll
                    for (int nt = 0; nt < NT; nt++) sums[nt] += loaded[step + j][nt];
                    if (++col == col_tiles) end_row_tile();
                }
            }
            if (++buffer == BUFFERS) buffer = 0, phase ^= 1;
        }
    }

    __device__ void run() const {
        if (lane == 0) init_barriers();
        __syncthreads();
        if (warp == COPYING_WARP) {
            // The other lanes must not wait for the previous kernel while this one starts copies.
            if (lane == 0) copy();
        } else {
            wait_for_input(params);
            launch_next_kernel();
            if (warp < WARPS)
                multiply();
            else if (warp < COPYING_WARP)
                add();
        }
        wait_for_products_beside(params);
    }
};

template <class Format, int NT>
__device__ void multiply(const LinearParams &params, int stages, BlockRange range) {
    extern __shared__ __align__(128) uint8_t shared[];
    Matmul<Format, NT>(params, stages, range, shared).run();
}

// The same for matrices of two types. The first `first_blocks` blocks compute those of the first
// type.
template <class First, class Second, int NT>
__device__ void multiply_both(const LinearParams &first, const LinearParams &second, int first_stages,
                              int second_stages, int first_blocks) {
    static_assert(First::ACTIVATION == Second::ACTIVATION);
    const int block = blockIdx.x, blocks = gridDim.x;
    if (block < first_blocks) {
        multiply<First, NT>(first, first_stages, {block, first_blocks});
    } else {
        multiply<Second, NT>(second, second_stages, {block - first_blocks, blocks - first_blocks});
    }
}

}  // namespace skinny_matmul
