// SPDX-License-Identifier: Apache-2.0

// out[t][r] = sum_k weights[r][k] * x[t][k] + bias[r] on the tensor cores, for at most 8 NT tokens.
// `out` is f32 [tokens][rows]; weights and `x` are tiles (tile.cuh). skinny_pipeline.cuh has the
// work of the warps. Shared memory holds the activation tiles of all columns for the whole block;
// act_full[piece] completes when those of TILES column tiles have arrived.
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

#include "params.cuh"
#include "skinny_pipeline.cuh"

namespace skinny_matmul {

using skinny::COPYING_WARP, skinny::EARLY_STAGES, skinny::THREADS, skinny::TILES, skinny::WARPS;

template <class Format, int NT>
struct Matmul {
    static constexpr int TILE_BYTES = Format::TILE_BYTES, STAGE_BYTES = TILES * TILE_BYTES;
    static constexpr int ACT_TILE_BYTES = act_tile_bytes(Format::ACTIVATION);

    const LinearParams &params;
    skinny::Pipeline<Format, NT> pipeline;
    const int col_tiles;
    // The block's first row tile, counted over all matrices.
    int first_row_tile;

    __device__ Matmul(const LinearParams &params, int stages, BlockRange range, uint8_t *shared)
        : params(params),
          pipeline(stages, params.col_tiles, NT * params.col_tiles * ACT_TILE_BYTES, shared),
          col_tiles(params.col_tiles) {
        const skinny::Run run = skinny::divide(count_row_tile_groups<1>(params), range.block, range.blocks);
        first_row_tile = run.first;
        pipeline.tiles = run.count * col_tiles;
    }

    __device__ int act_pieces() const { return (col_tiles + TILES - 1) / TILES; }

    // Tiles that are left are those of the matrix.
    struct Cursor : skinny::WeightCursor {
        int matrix;
    };

    __device__ void copy_stage(Cursor &cursor, int stage) const {
        pipeline.copy_stage(cursor, stage, [&] {
            cursor.matrix++;
            cursor.from = params.weights[cursor.matrix];
            cursor.left = row_tiles(params, cursor.matrix) * col_tiles;
        });
    }

    __device__ void copy_act_piece(int piece) const {
        int groups = (params.tokens + ACT_TILE_TOKENS - 1) / ACT_TILE_TOKENS, col = piece * TILES;
        uint32_t bytes = min(TILES, col_tiles - col) * ACT_TILE_BYTES;
        barrier_expect(pipeline.act_full + piece, groups * bytes);
#pragma unroll 1
        for (int group = 0; group < groups; group++) {
            size_t at = (static_cast<size_t>(group) * col_tiles + col) * ACT_TILE_BYTES;
            bulk_copy(pipeline.act_tiles + at, params.act_tiles + at, bytes, pipeline.act_full + piece);
        }
    }

    // Copies the first stages' weights before the previous kernel has ended. After that, a piece of
    // activations comes before the stage that needs it first.
    __device__ void copy() const {
        RowTile first = find_row_tile<1>(params, first_row_tile);
        Cursor cursor = {};
        cursor.matrix = first.matrix;
        cursor.left = (row_tiles(params, first.matrix) - first.first) * col_tiles;
        cursor.from =
            params.weights[first.matrix] + static_cast<size_t>(first.first) * col_tiles * TILE_BYTES;
        const int early_stages = EARLY_STAGES, tiles = pipeline.tiles;
        int stage = 0, piece = 0, phase = 1;
#pragma unroll 1
        for (; stage < early_stages && cursor.copied < tiles; stage++) copy_stage(cursor, stage);
        wait_for_input(params);
        launch_next_kernel();
#pragma unroll 1
        for (; piece <= early_stages && piece < act_pieces(); piece++) copy_act_piece(piece);
        for (; cursor.copied < tiles; stage++) {
            if (stage == pipeline.stages) stage = 0, phase ^= 1;
            barrier_wait(pipeline.empty + stage, phase);
            copy_stage(cursor, stage);
            if (piece < act_pieces()) copy_act_piece(piece++);
        }
#pragma unroll 1
        for (; piece < act_pieces(); piece++) copy_act_piece(piece);
    }

    // Where an adding warp stores: rows of a matrix from `row` on. Its lane has one row and a token
    // of each activation tile.
    struct Output {
        static constexpr bool STORES_ANY_TILE = false;
        const LinearParams &params;
        int lane_row, lane_token;
        int matrix, row, rows;
        float *out;
        const float *bias;

        __device__ void begin(int matrix_index, int row_tile) {
            matrix = matrix_index, row = row_tile * TILE_ROWS, rows = params.rows[matrix];
            out = params.out[matrix], bias = params.bias[matrix];
        }

        // Stores the sums of a row tile, and goes on to the next one.
        __device__ void store(const float (&sums)[NT]) {
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
            while (row >= rows && matrix + 1 < params.matrices) begin(matrix + 1, 0);
        }

        __device__ void end_round() const {}
    };

    __device__ void multiply() const {
        skinny::MultiplyingPlace place(pipeline.warp);
        pipeline.multiply(place, col_tiles * ACT_TILE_BYTES, [&](int, int col) {
            barrier_wait(pipeline.act_full + col / TILES, 0);
            return col;
        });
    }

    __device__ void add() const {
        RowTile first = find_row_tile<1>(params, first_row_tile);
        Output output{params, pipeline.lane_row(), pipeline.lane_token()};
        output.begin(first.matrix, first.first);
        skinny::AddingPlace place;
        pipeline.add(place, output);
    }

    __device__ void run() const {
        if (pipeline.lane == 0) pipeline.init_barriers(act_pieces());
        __syncthreads();
        if (pipeline.warp == COPYING_WARP) {
            // The other lanes must not wait for the previous kernel while this one starts copies.
            if (pipeline.lane == 0) copy();
        } else {
            wait_for_input(params);
            launch_next_kernel();
            if (pipeline.warp < WARPS)
                multiply();
            else if (pipeline.warp < COPYING_WARP)
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
