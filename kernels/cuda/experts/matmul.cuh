// SPDX-License-Identifier: Apache-2.0

// out[slot] = matrix of the slot's expert times the activations of the slot, for many slots. The
// products are those of linear/matmul.cuh, bit for bit; the device picks the matrix.
//
// Slots are pairs in the order of experts. The slots of each expert begin a new activation tile
// (expert_sort_pairs in experts.cu). An output tile is one group of at most 8 * ACT_TILES slots of
// an expert by up to ROW_TILES row tiles, of one of up to two stacks. Blocks take output tiles in
// turn.
//
//                    up to ACT_TILES activation tiles of a group (8 slots each)
//                    +----+----+----+----+
//   weight tile w0 ->| warp 0: all of them     a warp converts its weight tile to fragments once
//   weight tile w1 ->| warp 1                  for all slots, so the time of a group grows with its
//   ...        w7 -> | warp 7                  activation tiles
//                    +----+----+----+----+
//
//   Pipeline: a stage holds 256 columns of the 8 weight tiles and of the activation tiles
//     warp 8        copies step 0 -> stage 0 | step 1 -> stage 1 | step 2 -> stage 2 | ...
//                   and goes on with the next output tile while values are stored
//     full[stage]   completes when all copies of the stage have arrived
//     empty[stage]  completes when all lanes have used the stage; then it is filled again
//
// The values of 256 columns are added in ascending order of columns.
//
// Limit: weight bytes over memory bandwidth up to some 6 slots an expert; above that the operations
// around the tensor cores, as in linear/matmul.cuh. When each warp copied for itself, nothing was
// copied while it stored values: 2.6 TB/s of weights at 4 slots an expert instead of 3.3 to 3.6
// (H200).
//
// A weight tile is converted for up to 32 slots. Eight activation tiles need more registers than
// two blocks have: they spill, and were slower than four at 2 to 16 slots an expert. More was not
// measured. skinny_matmul.cuh is faster for groups of 8 slots.
#pragma once

#include "../linear/async_copy.cuh"
#include "../linear/tile.cuh"
#include "abi/experts.cuh"

namespace experts {

// Warps of a block that multiply. Another one copies. A multiprocessor has two such blocks.
constexpr int ROW_TILES = EXPERT_MATMUL_ROW_TILES;
static_assert(EXPERT_MATMUL_WARPS == ROW_TILES + 1);

// Multiplies with the first `act_tiles` activation tiles of the group. Each number of activation
// tiles has its own code: branches between the tiles keep their operations apart, which is a fifth
// slower.
template <class Format, int NT, class Accumulate>
__device__ void multiply_tiles(int act_tiles, const uint8_t *tile, const uint8_t *act_tile,
                               Accumulate accumulate) {
    if constexpr (NT > 1) {
        if (act_tiles < NT) return multiply_tiles<Format, NT - 1>(act_tiles, tile, act_tile, accumulate);
    }
    Format::template products<1, NT>(tile, 0, act_tile, act_tile_bytes(Format::ACTIVATION), accumulate);
}

// Row tiles of one stack: the first one, and how many.
struct OutputTile {
    int stack, first, row_tiles;
};

template <class Format, int ACT_TILES>
struct Matmul {
    static constexpr int TILE = Format::TILE_BYTES, ACT_TILE = act_tile_bytes(Format::ACTIVATION);
    static constexpr int ACT_TILES_OFFSET = ROW_TILES * TILE,
                         STAGE_BYTES = ACT_TILES_OFFSET + ACT_TILES * ACT_TILE;
    static_assert(ACT_TILES <= ROW_TILES, "a lane copies one activation tile");

    const ExpertMatmulParams &params;
    uint8_t *stages;
    uint64_t *full, *empty;
    int row_tiles, row_blocks, groups;

    __device__ Matmul(const ExpertMatmulParams &params, uint8_t *shared) : params(params), stages(shared) {
        full = reinterpret_cast<uint64_t *>(shared + params.stages * STAGE_BYTES);
        empty = full + params.stages;
        row_tiles = params.common.rows / TILE_ROWS;
        row_blocks = (row_tiles + ROW_TILES - 1) / ROW_TILES;
    }

    __device__ ExpertGroup read_group(int group) const {
        return group < groups ? params.common.groups[group] : ExpertGroup{};
    }

    // Calls `work(output tile, group)` for the block's output tiles. A group is read while the one
    // before it is worked on.
    template <class Work>
    __device__ void for_each_output_tile(Work work) const {
        const int group_output_tiles = row_blocks * params.stacks, output_tiles = groups * group_output_tiles;
        ExpertGroup group = read_group(blockIdx.x / group_output_tiles);
        for (int at = blockIdx.x; at < output_tiles; at += gridDim.x) {
            ExpertGroup next = read_group((at + gridDim.x) / group_output_tiles);
            const int first = at % row_blocks * ROW_TILES;
            work(OutputTile{at / row_blocks % params.stacks, first, min(ROW_TILES, row_tiles - first)},
                 group);
            group = next;
        }
    }

    // Lanes 0 to 7 copy a weight tile of each stage, lanes 8 to 15 an activation tile.
    __device__ void copy() const {
        const int lane = threadIdx.x % 32, col_tiles = params.common.col_tiles;
        const int kind = lane / ROW_TILES, at = lane % ROW_TILES;
        const int offset = kind == 0 ? at * TILE : ACT_TILES_OFFSET + at * ACT_TILE;
        const uint32_t bytes = kind == 0 ? TILE : ACT_TILE;
        int stage = 0, phase = 1;
        for_each_output_tile([&](const OutputTile &output, const ExpertGroup &group) {
            const int weight_tiles = output.row_tiles,
                      act_tiles = (group.pairs + ACT_TILE_TOKENS - 1) / ACT_TILE_TOKENS;
            const bool copies = at < (kind == 0 ? weight_tiles : kind == 1 ? act_tiles : 0);
            const uint8_t *from =
                kind == 0 ? params.common.weights[output.stack] +
                                (size_t(group.expert) * row_tiles + output.first + at) * col_tiles * TILE
                          : params.common.act_tiles +
                                (size_t(group.first / ACT_TILE_TOKENS) + at) * col_tiles * ACT_TILE;
            for (int col = 0; col < col_tiles; col++) {
                barrier_wait(empty + stage, phase);
                if (lane == 0) barrier_expect(full + stage, weight_tiles * TILE + act_tiles * ACT_TILE);
                __syncwarp();
                if (copies)
                    bulk_copy(stages + stage * STAGE_BYTES + offset, from + size_t(col) * bytes, bytes,
                              full + stage);
                if (++stage == params.stages) stage = 0, phase ^= 1;
            }
        });
    }

    // The row of the output that slot `at` of a group has.
    __device__ uint32_t output_row(const ExpertGroup &group, int at) const {
        uint32_t slot = group.first + at;
        return params.common.sorted_pairs == nullptr ? slot : params.common.sorted_pairs[slot];
    }

    __device__ void multiply() const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, col_tiles = params.common.col_tiles;
        int stage = 0, phase = 0;
        for_each_output_tile([&](const OutputTile &output, const ExpertGroup &group) {
            const int act_tiles = (group.pairs + ACT_TILE_TOKENS - 1) / ACT_TILE_TOKENS;
            const bool has_rows = warp < output.row_tiles;
            // A lane's slots of an activation tile.
            const int slot = lane % 4 * 2;
            float own[ACT_TILES][4] = {};
            for (int col = 0; col < col_tiles; col++) {
                barrier_wait(full + stage, phase);
                const uint8_t *from = stages + stage * STAGE_BYTES;
                auto accumulate = [&](int, int act_tile, int i, float value) { own[act_tile][i] += value; };
                if (has_rows)
                    multiply_tiles<Format, ACT_TILES>(act_tiles, from + warp * TILE, from + ACT_TILES_OFFSET,
                                                      accumulate);
                end_loads_before_copy();
                barrier_arrive(empty + stage);
                if (++stage == params.stages) stage = 0, phase ^= 1;
            }
            if (!has_rows) return;
            float *const out = params.common.out[output.stack] + (output.first + warp) * TILE_ROWS + lane / 4;
#pragma unroll
            for (int act_tile = 0; act_tile < ACT_TILES; act_tile++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int at = act_tile * ACT_TILE_TOKENS + slot + i % 2;
                    if (at >= int(group.pairs)) continue;
                    out[size_t(output_row(group, at)) * params.common.rows + i / 2 * 8] = own[act_tile][i];
                }
        });
    }

    __device__ void run() {
        if (threadIdx.x == 0) {
            for (int stage = 0; stage < params.stages; stage++) {
                barrier_init(full + stage, 1);
                barrier_init(empty + stage, 32 * ROW_TILES);
            }
            barrier_init_done();
        }
        __syncthreads();
        wait_for_previous_kernel();
        launch_next_kernel();
        groups = int(*params.common.group_count);
        if (threadIdx.x / 32 == ROW_TILES)
            copy();
        else
            multiply();
    }
};

template <class Format, int ACT_TILES>
__device__ void matmul(const ExpertMatmulParams &params) {
    extern __shared__ __align__(16) uint8_t shared[];
    Matmul<Format, ACT_TILES>(params, shared).run();
}

}  // namespace experts
