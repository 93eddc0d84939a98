// SPDX-License-Identifier: Apache-2.0

// Products of one token with the matrices of its experts, by the method of linear/matvec.cuh: a
// lane computes one row's value of 256 columns, and each warp has a pipeline of its own. Pairs need
// not be sorted, and the sum over the experts is made where the products are.
//
//   gate and up   item: a row tile of one expert in one stack. Its columns are the token's
//   down          item: a row tile. Its columns are those of all experts, one after the other:
//
//                    expert of rank 0    rank 1              rank 2
//                  +------+------+------+------+------+------+------
//     16 rows      | c 0  | c 1  | c 2  | c 0  | c 1  | c 2  | ...     weight tiles
//                  +------+------+------+------+------+------+------
//     activations  | pair 0             | pair 1             | ...
//
//     out[r] = sum over ranks of the pair's weight times (sum over c), as expert_combine
//
// The values of 256 columns are added in ascending order of columns, as in matmul.cuh. Limit:
// latency. Before the weights come the experts, and with 8 experts of 768 in a width of 2,048, a
// multiprocessor has 107 KiB of Q4_K to load.

#pragma once

#include "../linear/matvec.cuh"
#include "abi/experts.cuh"

namespace expert_row {

using matvec::THREADS, matvec::TilePair, matvec::WARPS;
constexpr int TILES_PER_STAGE = MATVEC_TILES_PER_STAGE;

// What the token chose, in shared memory.
struct Choice {
    uint32_t experts[EXPERT_ROW_USED_MAX];
    float weights[EXPERT_ROW_USED_MAX];
};
static_assert(sizeof(Choice) <= 256, "MATVEC_STATIC_BYTES of linear.rs");

template <class Format>
struct GateAndUp {
    const ExpertRowParams &params;
    const Choice &choice;

    __device__ int act_rows() const { return 1; }
    __device__ int columns() const { return params.col_tiles; }
    __device__ int row_tiles() const { return params.rows / TILE_ROWS; }
    __device__ int items() const { return params.stacks * params.used * row_tiles(); }

    __device__ const uint8_t *tile(int item, int col) const {
        int part = item / row_tiles(), stack = part / params.used;
        size_t row_tile = size_t(choice.experts[part % params.used]) * row_tiles() + item % row_tiles();
        return params.weights[stack] + (row_tile * params.col_tiles + col) * Format::TILE_BYTES;
    }

    // `values` of row `row` of the item; those of successive columns are TILE_ROWS apart.
    __device__ void finish(int item, int row, const float *values) const {
        int part = item / row_tiles(), stack = part / params.used;
        float sum = 0.0f;
#pragma unroll 8
        for (int col = 0; col < params.col_tiles; col++) sum += values[col * TILE_ROWS];
        params.out[stack][size_t(part % params.used) * params.rows + item % row_tiles() * TILE_ROWS + row] =
            sum;
    }
};

template <class Format>
struct Down {
    const ExpertRowParams &params;
    const Choice &choice;

    __device__ int act_rows() const { return params.used; }
    __device__ int columns() const { return params.used * params.col_tiles; }
    __device__ int row_tiles() const { return params.rows / TILE_ROWS; }
    __device__ int items() const { return row_tiles(); }

    __device__ const uint8_t *tile(int item, int col) const {
        size_t row_tile = size_t(choice.experts[col / params.col_tiles]) * row_tiles() + item;
        return params.weights[0] +
               (row_tile * params.col_tiles + col % params.col_tiles) * Format::TILE_BYTES;
    }

    __device__ void finish(int item, int row, const float *values) const {
        const int at = item * TILE_ROWS + row;
        const float before = params.residual == nullptr ? 0.0f : params.residual[at];
        float total = 0.0f;
        for (int rank = 0; rank < params.used; rank++) {
            float sum = 0.0f;
#pragma unroll 4
            for (int col = 0; col < params.col_tiles; col++, values += TILE_ROWS) sum += *values;
            total += choice.weights[rank] * sum;
        }
        params.out[0][at] = total;
        if (params.residual != nullptr) params.residual[at] = before + total;
    }
};

// Past the first-level cache, where a kernel that reads before it waits might find the choice of
// the layer before.
__device__ inline void read_choice(const ExpertRowParams &params, Choice &choice) {
    const int rank = threadIdx.x;
    if (rank < params.used) {
        choice.experts[rank] = __ldcg(params.experts + rank);
        choice.weights[rank] = __ldcg(params.pair_weights + rank);
    }
    __syncthreads();
}

// `READS_EARLY`: the experts were chosen before the previous kernel waited for the one before it.
template <class Format, class Work, bool READS_EARLY>
__device__ void multiply(const ExpertRowParams &params) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ Choice choice;
    constexpr int ACT_ROW_BYTES = act_row_bytes(Format::ACTIVATION);
    constexpr int STAGE_BYTES = TILES_PER_STAGE * Format::TILE_BYTES;
    const Work work{params, choice};
    const int columns = work.columns(), stages = params.stages;
    const int pairs_per_item = (columns + TILES_PER_STAGE - 1) / TILES_PER_STAGE;
    const int batch_items = matvec::tiles_per_batch(pairs_per_item);
    const int values_per_batch = batch_items * columns * TILE_ROWS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint8_t *act_rows = shared + WARPS * stages * STAGE_BYTES;
    float *values = reinterpret_cast<float *>(act_rows + columns * ACT_ROW_BYTES);
    uint64_t *barriers = reinterpret_cast<uint64_t *>(values + 2 * values_per_batch) + warp * stages;
    uint8_t *pipeline = shared + warp * stages * STAGE_BYTES;

    const int total = work.items();
    const int first_item = static_cast<int64_t>(blockIdx.x) * total / gridDim.x;
    const int items = static_cast<int64_t>(blockIdx.x + 1) * total / gridDim.x - first_item;
    TilePair own = {}, next = {};
    own.skip(warp, pairs_per_item);
    next = own;
    auto load_next = [&](int stage) {
        const int first = next.pair * TILES_PER_STAGE, tiles = min(TILES_PER_STAGE, columns - first);
        barrier_expect(barriers + stage, tiles * Format::TILE_BYTES);
        for (int i = 0; i < tiles; i++)
            bulk_copy(pipeline + stage * STAGE_BYTES + i * Format::TILE_BYTES,
                      work.tile(first_item + next.tile, first + i), Format::TILE_BYTES, barriers + stage);
        next.advance(pairs_per_item);
    };
    auto load_first = [&]() {
        read_choice(params, choice);
        if (lane == 0)
            for (int stage = 0; stage < stages && next.tile < items; stage++) load_next(stage);
    };

    if (lane == 0) {
        for (int stage = 0; stage < stages; stage++) barrier_init(barriers + stage);
        barrier_init_done();
    }
    if (READS_EARLY) load_first();
    wait_for_previous_kernel();
    launch_next_kernel();
    matvec::copy_act_rows<Format::ACTIVATION>(params.act_tiles, params.col_tiles, work.act_rows(), act_rows);
    if (!READS_EARLY) load_first();
    wait_copies<0>();
    __syncthreads();

    const int row = lane % TILE_ROWS, second = lane / TILE_ROWS;
    int stage = 0, phase = 0;
    for (int batch = 0, parity = 0; batch < items; batch += batch_items, parity ^= 1) {
        const int batch_end = min(batch + batch_items, items);
        float *batch_values = values + parity * values_per_batch;
        for (; own.tile < batch_end; own.advance(pairs_per_item)) {
            const int col = own.pair * TILES_PER_STAGE + second;
            barrier_wait(barriers + stage, phase);
            if (col < columns)
                batch_values[((own.tile - batch) * columns + col) * TILE_ROWS + row] =
                    Format::dot(pipeline + stage * STAGE_BYTES + second * Format::TILE_BYTES, row,
                                act_rows + col * ACT_ROW_BYTES);
            __syncwarp();
            if (lane == 0 && next.tile < items) load_next(stage);
            if (++stage == stages) stage = 0, phase ^= 1;
        }
        // With two buffers, one barrier per batch is enough, as in linear/matvec.cuh.
        __syncthreads();
        for (int at = threadIdx.x; at < (batch_end - batch) * TILE_ROWS; at += THREADS) {
            const int item = batch + at / TILE_ROWS, r = at % TILE_ROWS;
            work.finish(first_item + item, r, batch_values + (item - batch) * columns * TILE_ROWS + r);
        }
    }
}

}  // namespace expert_row
