// SPDX-License-Identifier: Apache-2.0

// out[t][r] = sum_k weights[r][k] * x[t][k] + bias[r] on the tensor cores, for at most 8 NT tokens.
// `out` is f32 [tokens][rows]; weights and `x` are tiles (tile.cuh). A warp computes the values of
// one weight tile at a time: 16 rows by 256 columns by 8 NT tokens.
//
//      weight tiles of a block, row tile by row tile        a warp and a stage
//   +---------+---------+---------+---------+              +--------------------+
//   | 16 rows | x 256   | ...     |         | row tile 0   | 16 rows x 256 cols |
//   +---------+---------+---------+---------+              +--------------------+
//   | ...     |         |         |         | row tile 1
//   +---------+---------+---------+---------+
//   tiles go to the warps in turn
//
//   Each warp has a pipeline of its own, as in matvec.cuh. Its first copy starts before the
//   previous kernel has ended:
//     bulk copies   tile 0 -> stage 0 | tile W -> stage 1 | ...
//     products                        | tile 0            | tile W
//                   values of 256 columns go to shared memory
//     epilogue      a thread per element of the output adds its values by ascending columns
//
// Shared memory holds the activation tiles of all columns for the whole block. Each column tile has
// a barrier, so that a warp waits only for the activations that it needs. The order of sums is that
// of matmul.cuh.
//
// Limit: instructions; a warp issues some 320 for a weight tile and 16 tokens. Measured on an H200
// for 16 tokens, times in us of this kernel, of matmul.cuh, and of the weights' bytes alone, when
// each tile took two divisions more:
//
//                   4096 x 12288          4096 x 151936
//   Q4_K            14.2, 17.5, 6.6       138, 186, 82
//   Q6_K            18.2, 21.0, 9.6       175, 223, 119
//   Q8_0            17.2, 19.3, 12.5      172, 193, 154
//
// For 4096 x 4096 both are equal. For up to 8 tokens, matmul.cuh is faster with Q4_K, and
// this kernel with Q8_0. Rows of 12288 do not fit shared memory with 16 tokens.

#pragma once

#include "async_copy.cuh"
#include "params.cuh"

namespace skinny_matmul {

// Elements of the output per row tile.
template <int NT>
constexpr int ELEMENTS = TILE_ROWS * ACT_TILE_TOKENS * NT;

// A weight tile of the block: its row tile, counted from the block's first one, and its column
// tile.
struct WarpTile {
    int row_tile, col;

    __device__ void advance(int tiles, int col_tiles) {
        for (col += tiles; col >= col_tiles; col -= col_tiles) row_tile++;
    }
};

// Copies the activation tiles of a column tile to their places in `act_tiles`.
template <class Format>
__device__ void copy_act_tiles(const LinearParams &params, int col, uint8_t *act_tiles, uint64_t *full) {
    constexpr int BYTES = act_tile_bytes(Format::ACTIVATION);
    int groups = (params.tokens + ACT_TILE_TOKENS - 1) / ACT_TILE_TOKENS;
    barrier_expect(full, groups * BYTES);
    for (int group = 0; group < groups; group++) {
        size_t index = static_cast<size_t>(group) * params.col_tiles + col;
        bulk_copy(act_tiles + index * BYTES, params.act_tiles + index * BYTES, BYTES, full);
    }
}

// Adds the values of an element of the output. `values` has those of row tiles from `first_tile`
// on.
template <int NT>
__device__ void store_sum(const LinearParams &params, int first_tile, const float *values, int at) {
    int row_tile = at / ELEMENTS<NT>, element = at % ELEMENTS<NT>;
    const float *from = values + row_tile * params.col_tiles * ELEMENTS<NT> + element;
    float sum = 0;
#pragma unroll 8
    for (int c = 0; c < params.col_tiles; c++) sum += from[c * ELEMENTS<NT>];
    // C fragments (mma.cuh): element i of lane l, for activation tile nt.
    int l = element % 32, i = element / 32 % 4, nt = element / 128;
    RowTile output = find_row_tile<1>(params, first_tile + row_tile);
    store_output(params, output.matrix, output.first * TILE_ROWS + l / 4 + i / 2 * 8,
                 nt * ACT_TILE_TOKENS + l % 4 * 2 + i % 2, sum);
}

template <class Format, int NT>
__device__ void multiply(const LinearParams &params, const SkinnyPipeline &pipeline) {
    extern __shared__ __align__(128) uint8_t shared[];
    constexpr int TILE_BYTES = Format::TILE_BYTES, ACT_TILE_BYTES = act_tile_bytes(Format::ACTIVATION);
    constexpr int ELEMENTS = skinny_matmul::ELEMENTS<NT>;
    int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int col_tiles = params.col_tiles, stages = pipeline.stages, batch_tiles = pipeline.batch_tiles;
    int values_per_batch = batch_tiles * col_tiles * ELEMENTS;
    uint8_t *ring = shared;
    uint8_t *act_tiles = ring + warps * stages * TILE_BYTES;
    float *values = reinterpret_cast<float *>(act_tiles + NT * col_tiles * ACT_TILE_BYTES);
    uint64_t *full = reinterpret_cast<uint64_t *>(values + pipeline.value_buffers * values_per_batch);
    uint64_t *act_full = full + warps * stages;

    ring += warp * stages * TILE_BYTES;
    full += warp * stages;
    int total = count_row_tile_groups<1>(params);
    int first_tile = static_cast<int64_t>(blockIdx.x) * total / gridDim.x;
    int row_tiles = static_cast<int64_t>(blockIdx.x + 1) * total / gridDim.x - first_tile;
    WarpTile own = {}, next = {};
    own.advance(warp, col_tiles);
    next = own;
    auto load_next = [&](int stage) {
        RowTile row_tile = find_row_tile<1>(params, first_tile + next.row_tile);
        size_t index = static_cast<size_t>(row_tile.first) * col_tiles + next.col;
        barrier_expect(full + stage, TILE_BYTES);
        bulk_copy(ring + stage * TILE_BYTES, params.weights[row_tile.matrix] + index * TILE_BYTES, TILE_BYTES,
                  full + stage);
        next.advance(warps, col_tiles);
    };
    if (lane == 0) {
        for (int stage = 0; stage < stages; stage++) barrier_init(full + stage);
        for (int col = warp; col < col_tiles; col += warps) barrier_init(act_full + col);
        barrier_init_done();
        if (next.row_tile < row_tiles) load_next(0);
    }
    wait_for_input(params);
    launch_next_kernel();
    if (lane == 0) {
        for (int col = warp; col < col_tiles; col += warps)
            copy_act_tiles<Format>(params, col, act_tiles, act_full + col);
        // Not before the activations, which would wait for them.
        for (int stage = 1; stage < stages && next.row_tile < row_tiles; stage++) load_next(stage);
    }
    // Other warps' barriers of activations exist from here on.
    __syncthreads();

    int stage = 0, phase = 0, rotation = 0;
    float *batch_values = values;
    for (int batch = 0; batch < row_tiles; batch += batch_tiles) {
        int batch_end = min(batch + batch_tiles, row_tiles);
        for (; own.row_tile < batch_end; own.advance(warps, col_tiles)) {
            barrier_wait(full + stage, phase);
            barrier_wait(act_full + own.col, 0);
            float *to = batch_values + ((own.row_tile - batch) * col_tiles + own.col) * ELEMENTS + lane;
            Format::template products<1, NT>(
                ring + stage * TILE_BYTES, TILE_BYTES, act_tiles + own.col * ACT_TILE_BYTES,
                col_tiles * ACT_TILE_BYTES,
                [&](int, int nt, int i, float value) { to[(nt * 4 + i) * 32] = value; });
            __syncwarp();
            if (lane == 0 && next.row_tile < row_tiles) load_next(stage);
            if (++stage == stages) stage = 0, phase ^= 1;
        }
        // With two buffers, one barrier per batch is enough: a warp writes to this buffer again
        // only after the next batch's barrier, which every thread reaches after its sums below.
        __syncthreads();
        // Successive batches give their sums to different warps.
        int elements = (batch_end - batch) * ELEMENTS;
        int thread = threadIdx.x + rotation;
        if (thread >= blockDim.x) thread -= blockDim.x;
        for (int at = thread; at < elements; at += blockDim.x)
            store_sum<NT>(params, first_tile + batch, batch_values, at);
        rotation = (rotation + elements) % blockDim.x;
        if (pipeline.value_buffers == 1) {
            __syncthreads();
        } else {
            batch_values = batch_values == values ? values + values_per_batch : values;
        }
    }
    wait_for_products_beside(params);
}

}  // namespace skinny_matmul
