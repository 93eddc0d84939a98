// SPDX-License-Identifier: Apache-2.0

// out[slot] = matrix of the slot's expert times the activations of the slot, for many slots. The
// products are those of linear/matmul.cuh, bit for bit; the device picks the matrix.
//
// Slots are pairs in the order of experts. The slots of each expert begin a new activation tile
// (expert_sort_pairs in experts.cu). An output tile is one group of at most 64 slots of an expert
// by ROW_TILES row tiles, of one of up to two stacks. Block b computes output tiles b, b + blocks,
// ...
//
//                    up to 8 activation tiles of a group (8 slots each)
//                    +----+----+----+ ... +----+
//   weight tile w0 ->| warp 0: all of them     |  a warp converts its weight tile to fragments once
//   weight tile w1 ->| warp 1                  |  for up to 64 slots, so the time of a group grows
//   ...        w7 -> | warp 7                  |  with its activation tiles
//                    +----+----+----+ ... +----+
//
//   Pipeline: a stage holds 256 columns of the 8 weight tiles and of the activation tiles
//     bulk copies   step 0 -> stage 0 | step 1 -> stage 1 | step 2 -> stage 2 | ...
//                   lane 0 of each warp copies the warp's weight tile and one activation tile
//     full[stage]   completes when all copies of the stage have arrived
//     empty[stage]  completes when all warps have used the stage; then it is filled again
//
// The values of 256 columns are added in ascending order of columns.
//
// Limit: weight bytes over memory bandwidth up to about 8 slots an expert; above that the
// operations around the tensor cores, as in linear/matmul.cuh. Measured on an H200 with 128
// experts, gate and up of 2048 x 768 in Q4_K: 2.6 TB/s of weights at 4 slots an expert, 2.4 at 8;
// 187 TOPS at 32 slots. Blocks of 16 row tiles, one a multiprocessor, were 8% slower. For 16 to 24
// slots an expert and more, wgmma.cuh is faster.
#pragma once

#include "../linear/async_copy.cuh"
#include "../linear/tile.cuh"
#include "abi/experts.cuh"

namespace experts {

// Warps of a block. A multiprocessor has two such blocks.
constexpr int ROW_TILES = EXPERT_MATMUL_WARPS;
constexpr int GROUP_ACT_TILES = EXPERT_MATMUL_ACT_TILES;

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

template <class Format>
__device__ void matmul(const ExpertMatmulParams &params) {
    extern __shared__ __align__(16) uint8_t shared[];
    constexpr int ACT_TILE_BYTES = act_tile_bytes(Format::ACTIVATION);
    constexpr int ACT_TILES_OFFSET = ROW_TILES * Format::TILE_BYTES,
                  STAGE_BYTES = ACT_TILES_OFFSET + GROUP_ACT_TILES * ACT_TILE_BYTES;
    static_assert(ROW_TILES >= GROUP_ACT_TILES);
    const int col_tiles = params.common.col_tiles, stages = params.stages;
    const int row_tiles = params.common.rows / TILE_ROWS,
              row_blocks = (row_tiles + ROW_TILES - 1) / ROW_TILES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint64_t *const full = reinterpret_cast<uint64_t *>(shared + stages * STAGE_BYTES), *const empty =
                                                                                            full + stages;
    if (threadIdx.x == 0) {
        for (int stage_index = 0; stage_index < stages; stage_index++) {
            barrier_init(full + stage_index, ROW_TILES);
            barrier_init(empty + stage_index, ROW_TILES);
        }
        barrier_init_done();
    }
    __syncthreads();
    wait_for_previous_kernel();
    launch_next_kernel();

    const int output_tiles = *params.common.group_count * row_blocks * params.stacks;
    // State of each warp's lane 0: the next stage to fill. The lane copies the warp's own weight
    // tile and one activation tile. The copies of one warp start one after the other, so every warp
    // starts some.
    int next_output_tile = blockIdx.x, next_col = 0, next_stage = 0, next_phase = 0;
    const uint8_t *weight_tile_source = nullptr, *act_tile_source = nullptr;
    auto load_next_stage = [&] {
        if (next_output_tile >= output_tiles) return;
        if (next_col == 0) {
            const ExpertGroup group = params.common.groups[next_output_tile / (row_blocks * params.stacks)];
            const int stack = next_output_tile / row_blocks % params.stacks,
                      tile = next_output_tile % row_blocks * ROW_TILES + warp;
            weight_tile_source =
                tile < row_tiles ? params.common.weights[stack] + (size_t(group.expert) * row_tiles + tile) *
                                                                      col_tiles * Format::TILE_BYTES
                                 : nullptr;
            act_tile_source = warp * ACT_TILE_TOKENS < int(group.pairs)
                                  ? params.common.act_tiles + (size_t(group.first / ACT_TILE_TOKENS) + warp) *
                                                                  col_tiles * ACT_TILE_BYTES
                                  : nullptr;
        }
        // No warp has used the stage in the first round. The wait for the opposite parity then
        // returns at once.
        barrier_wait(empty + next_stage, next_phase ^ 1);
        uint8_t *stage = shared + next_stage * STAGE_BYTES;
        barrier_expect(full + next_stage, (weight_tile_source ? Format::TILE_BYTES : 0) +
                                              (act_tile_source ? ACT_TILE_BYTES : 0));
        if (weight_tile_source)
            bulk_copy(stage + warp * Format::TILE_BYTES,
                      weight_tile_source + size_t(next_col) * Format::TILE_BYTES, Format::TILE_BYTES,
                      full + next_stage);
        if (act_tile_source)
            bulk_copy(stage + ACT_TILES_OFFSET + warp * ACT_TILE_BYTES,
                      act_tile_source + size_t(next_col) * ACT_TILE_BYTES, ACT_TILE_BYTES, full + next_stage);
        if (++next_col == col_tiles) next_col = 0, next_output_tile += gridDim.x;
        if (++next_stage == stages) next_stage = 0, next_phase ^= 1;
    };
    if (lane == 0)
        for (int stage_index = 0; stage_index < stages; stage_index++) load_next_stage();
    __syncwarp();

    // With more than two stages, a warp refills a stage only after it has used the next one too. By
    // then the other warps have mostly left the stage, so the warp seldom waits for them.
    int stage_index = 0, phase = 0, stages_before_refill = stages > 2 ? 1 : 0;
    for (int output_tile = blockIdx.x; output_tile < output_tiles; output_tile += gridDim.x) {
        const ExpertGroup group = params.common.groups[output_tile / (row_blocks * params.stacks)];
        const int stack = output_tile / row_blocks % params.stacks,
                  first = output_tile % row_blocks * ROW_TILES;
        const int row_tiles_here = min(ROW_TILES, row_tiles - first),
                  act_tiles = (group.pairs + ACT_TILE_TOKENS - 1) / ACT_TILE_TOKENS;
        float own[GROUP_ACT_TILES][4] = {};
        for (int col = 0; col < col_tiles; col++) {
            barrier_wait(full + stage_index, phase);
            const uint8_t *stage = shared + stage_index * STAGE_BYTES;
            auto accumulate = [&](int, int act_tile, int i, float value) { own[act_tile][i] += value; };
            if (warp < row_tiles_here)
                multiply_tiles<Format, GROUP_ACT_TILES>(act_tiles, stage + warp * Format::TILE_BYTES,
                                                        stage + ACT_TILES_OFFSET, accumulate);
            end_loads_before_copy();
            __syncwarp();
            if (lane == 0) {
                barrier_arrive(empty + stage_index);
                if (stages_before_refill-- <= 0) load_next_stage();
            }
            __syncwarp();
            if (++stage_index == stages) stage_index = 0, phase ^= 1;
        }
        if (warp >= row_tiles_here) continue;
        float *const out = params.common.out[stack] + (first + warp) * TILE_ROWS;
#pragma unroll
        for (int act_tile = 0; act_tile < GROUP_ACT_TILES; act_tile++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int row = lane / 4 + i / 2 * 8, at = act_tile * ACT_TILE_TOKENS + lane % 4 * 2 + i % 2;
                if (at >= int(group.pairs)) continue;
                uint32_t to = group.first + at;
                if (params.common.sorted_pairs != nullptr) to = params.common.sorted_pairs[to];
                out[size_t(to) * params.common.rows + row] = own[act_tile][i];
            }
    }
}

}  // namespace experts
