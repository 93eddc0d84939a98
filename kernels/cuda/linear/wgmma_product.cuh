// SPDX-License-Identifier: Apache-2.0

// out[t][r] = sum_k weights[r][k] * x[t][k] + bias[r] with quantized weights on wgmma (sm_90a), for
// many tokens. The bits are those of matmul.cuh, which computes the same integers with 8-bit
// products.
//
// A tensor core adds products of 8-bit integers exactly. `Format` says how values of 256 columns
// come from such sums (affine_k_wgmma.cuh, q6_k_wgmma.cuh, legacy_wgmma.cuh).
//
// A block computes output tiles of 64 ROW_GROUPS weight rows by up to TOKENS tokens, which `Tiles`
// deals (wgmma_matrices.cuh: linear layers; experts/wgmma.cuh: experts). A warpgroup computes
// the values of 64 rows and 256 columns at a time. Its warps expand weights to A fragments in
// registers, and multiply. Further warps copy.
//
//   128 tokens, two row groups           32 tokens, one row group, four column groups
//                 128 tokens                            column tiles of 256
//              +---------------+                  +----+----+----+----+----+----
//    64 rows   | warpgroup 0   |         64 rows  | w0 | w1 | w2 | w3 | w0 | ...
//              +---------------+                  +----+----+----+----+----+----
//    64 rows   | warpgroup 1   |         column groups multiply at the same time, and add their
//              +---------------+         values one after the other
//
//   A operand: 64 weight rows in registers. Lane 4 g + t of warp w has rows 16 w + g and + 8.
//   B operand: tokens in shared memory, units of 8 tokens by 128 columns of activation tiles
//              (tile.cuh).
//   C: lane 4 g + t holds sums[4 j + 0, 1] = row g,     tokens 8 j + 2 t, 8 j + 2 t + 1
//                         sums[4 j + 2, 3] = row g + 8, the same tokens
//
//   Stages of 256 columns: weights, with the f16 sums of the tokens if Format::HAS_SUMS, and
//   quants of the tokens, each a ring. Rings go on from output tile to output tile.
//
//     copies      |weights c         |c + 1             |            quants c       |
//     warpgroups  |                  |scales, products, values of c | c + 1
//
// Sums. Values are added in ascending order of columns. With one column group, sums stay in
// registers. Several column groups add in turn (column_turns.cuh). Two blocks of a cluster may also
// divide the column tiles of an output tile (value_exchange.cuh). Then a step is a column tile of
// each, otherwise it is one column tile.
//
// Small products need several column groups: two warpgroups do not hide the latencies of a chain
// of 256 columns, and narrow matrices have too few tiles of 128 rows for a device. Those with long
// rows need two blocks. Measured on an H200, Q4_K, us for 64 tokens, by tokens, row groups, column
// groups and blocks of an output tile:
//
//                    32/1/4/1   64/1/4/1   64/1/4/2   64/2/1/1   matmul.cuh
//   4096 x 4096      10.1       11.9       10.7       21.5       14.7
//   12288 x 4096     23.4       31.8       22.6       60.6       37.4
//   4096 x 12288     23.9       22.6       23.6       22.9       39.5
//
// Wide matrices have three row groups and one column group: 24,576 rows are 128 output tiles, one
// each for most multiprocessors of an H200. 64 tokens times 4,096 columns and so many rows take
// 32.0 us instead of 35.3 with 64/1/4/1 (Q4_K), and 41.8 instead of 47.0 (Q8_0).
//
// Limit: instructions (affine_k_wgmma.cuh has the counts). With four column groups, a scheduler
// issues in 58 to 64% of the clocks (Nsight Compute, Q4_K, 32/1/4/1). A warp starts its copies one
// after the other, which can limit a block (wgmma_block.cuh).

#pragma once

#include "wgmma_block.cuh"

#if HAS_WGMMA

namespace wgmma_product {

template <class Format, class Shape, class Tiles>
struct Kernel {
    static_assert(FITS<Format, Shape>);
    using SharedMemory = Shared<Format, Shape>;
    using Stage = RingPosition<Shape::STAGES>;
    using UnitStage = RingPosition<SharedMemory::UNIT_STAGES>;
    static constexpr int TOKENS = Shape::TOKENS, GROUPS = Shape::GROUPS, ROW_TILES = Shape::ROW_TILES,
                         COLUMN_GROUPS = Shape::COLUMN_GROUPS, BLOCKS = Shape::BLOCKS,
                         ADDED_GROUPS = Shape::ADDED_GROUPS, TILE = Format::TILE_BYTES;
    using OutputTile = typename Tiles::OutputTile;

    const Tiles &tiles;
    const F16Sums &sums;
    SharedMemory &shared;
    // This block's rank in its cluster, the cluster's number, and how many there are. A block that
    // is alone counts as a cluster.
    const int rank = BLOCKS > 1 ? rank_in_cluster() : 0, cluster = blockIdx.x / BLOCKS,
              clusters = gridDim.x / BLOCKS;

    // Calls `work(tile)` for the output tiles of the block, or of its cluster.
    template <class Work>
    __device__ void for_each_tile(Work work) const {
        OutputTile tile;
        for (int index = cluster; tiles.find(index, tile); index += clusters) work(tile);
    }

    // The steps of an output tile, and the block's column tile in one of them.
    __device__ int steps() const { return (tiles.col_tiles() + BLOCKS - 1) / BLOCKS; }
    __device__ int column_tile(int step) const {
        return BLOCKS > 1 ? min(BLOCKS * step + rank, tiles.col_tiles() - 1) : step;
    }

    // Where a group of 8 tokens is in shared memory and in registers: those come first whose values
    // the block adds.
    __device__ int place(int group) const { return (group + rank * ADDED_GROUPS) % GROUPS; }

    // Rows beyond the matrix are not copied. What is computed from them is not stored.
    __device__ void copy_weights() const {
        Stage at;
        int lane = threadIdx.x % 32;
        for_each_tile([&](const OutputTile &tile) {
            int row_tiles = min(ROW_TILES, tiles.row_tiles(tile) - tile.row_tile);
            const uint8_t *from =
                tiles.weights(tile) + static_cast<size_t>(tile.row_tile + lane) * tiles.col_tiles() * TILE;
            for (int step = 0; step < steps(); step++, at.advance()) {
                uint64_t *full = shared.weights_full + at.stage;
                barrier_wait(shared.weights_empty + at.stage, at.phase ^ 1);
                if (lane == 0) barrier_expect(full, row_tiles * TILE);
                __syncwarp();
                if (lane < row_tiles)
                    bulk_copy(shared.weights[at.stage] + lane * TILE, from + size_t(column_tile(step)) * TILE,
                              TILE, full);
            }
        });
    }

    __device__ void copy_sums() const {
        Stage at;
        size_t groups = sums.groups;
        for_each_tile([&](const OutputTile &tile) {
            const int tile_groups = tiles.groups(tile);
            for (int step = 0; step < steps(); step++, at.advance()) {
                uint64_t *full = shared.weights_full + at.stage;
                const uint8_t *from = sums.data + (column_tile(step) * groups + tile.group) * F16_SUMS_BYTES;
                barrier_wait(shared.weights_empty + at.stage, at.phase ^ 1);
                barrier_expect(full, tile_groups * F16_SUMS_BYTES);
                for (int first = 0; first < tile_groups; first += ADDED_GROUPS)
                    bulk_copy(shared.sums[at.stage] + place(first) * F16_SUMS_BYTES,
                              from + first * F16_SUMS_BYTES,
                              min(ADDED_GROUPS, tile_groups - first) * F16_SUMS_BYTES, full);
            }
        });
    }

    // Copies BYTES of the activation tile of each group, from SKIPPED on, into the stages of units.
    // Groups from FIRST to END - 1, one per lane. Groups beyond the tokens are not copied. What is
    // computed from them is not stored. `find_place(stage, group)` is where they go. The warp
    // arrives once at each stage's `units_full`, also if it has no group: that counts all warps.
    template <int FIRST, int END, int SKIPPED, int BYTES, class FindPlace>
    __device__ void copy_of_act_tiles(FindPlace find_place) const {
        constexpr int TILE_BYTES = act_tile_bytes(Format::ACTIVATION);
        UnitStage at;
        const int lane = threadIdx.x % 32, group = FIRST + lane;
        for_each_tile([&](const OutputTile &tile) {
            const int groups = max(min(END, tiles.groups(tile)) - FIRST, 0);
            const uint8_t *from = tiles.act_tiles() + SKIPPED +
                                  static_cast<size_t>(tile.group + group) * tiles.col_tiles() * TILE_BYTES;
            for (int step = 0; step < steps(); step++, at.advance()) {
                uint64_t *full = shared.units_full + at.stage;
                barrier_wait(shared.units_empty + at.stage, at.phase ^ 1);
                if (lane == 0) barrier_expect(full, groups * BYTES);
                __syncwarp();
                if (lane < groups)
                    bulk_copy(find_place(at.stage, place(group)),
                              from + size_t(column_tile(step)) * TILE_BYTES, BYTES, full);
            }
        });
    }

    // Those of one of the warps that copy units.
    template <int WARP>
    __device__ void copy_quants() const {
        constexpr int COUNT = GROUPS / SharedMemory::UNIT_WARPS;
        copy_of_act_tiles<WARP * COUNT, (WARP + 1) * COUNT, 0, ACT_TILE_QUANT_BYTES>(
            [&](int stage, int to) { return shared.units[stage] + to * ACT_TILE_QUANT_BYTES; });
    }

    __device__ void copy_unit_scales() const {
        constexpr int BYTES = scale_bytes(Format::ACTIVATION);
        copy_of_act_tiles<0, GROUPS, ACT_TILE_QUANT_BYTES, BYTES>(
            [&](int stage, int to) { return shared.unit_scales[stage] + to * BYTES; });
    }

    // Computes the values of 256 columns, those of the stage `at`, for N tokens.
    template <int N, class Units>
    __device__ void column_values(float (&values)[N / 2], const Stage &at, Units &units, int row_tile) const {
        ColumnTile tile = {shared.weights[at.stage] + row_tile * TILE, shared.sums[at.stage]};
        typename Format::Sum products[N / 2];
        barrier_wait(shared.weights_full + at.stage, at.phase);
        Format::template multiply_columns<N>(products, tile, units);
        Format::template finish_values<N>(products, tile, units, [&](int group, const float(&four)[4]) {
#pragma unroll
            for (int i = 0; i < 4; i++) values[4 * group + i] = four[i];
        });
        release_stage<true>(shared.weights_empty + at.stage);
    }

    // Sums of an output tile in registers, for N tokens.
    template <int N>
    __device__ void multiply_tile(const OutputTile &output, Stage &at, UnitStage &units_at,
                                  int row_tile) const {
        UnitReader<SharedMemory> units{shared, units_at};
        float total[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; i++) total[i] = 0.0f;
        for (int step = 0; step < steps(); step++, at.advance()) {
            float values[N / 2];
            column_values<N>(values, at, units, row_tile);
#pragma unroll
            for (int i = 0; i < N / 2; i++) total[i] += values[i];
        }
        units_at = units.at;
        tiles.template store_tile<N>(output, row_tile, total);
    }

    // Output tiles of fewer tokens have code of their own: from TOKENS_MIN on, every TOKENS_STEP
    // tokens.
    template <int N>
    __device__ void multiply_fitting(const OutputTile &output, int tokens, Stage &at, UnitStage &units_at,
                                     int row_tile) const {
        if constexpr (N > Tiles::TOKENS_MIN) {
            constexpr int FEWER = N - Tiles::TOKENS_STEP;
            if (tokens <= FEWER) return multiply_fitting<FEWER>(output, tokens, at, units_at, row_tile);
        }
        multiply_tile<N>(output, at, units_at, row_tile);
    }

    // One column group.
    __device__ void multiply() const {
        Stage at;
        UnitStage units_at;
        int row_tile = threadIdx.x / 32;
        for_each_tile([&](const OutputTile &output) {
            multiply_fitting<TOKENS>(output, tiles.block_tokens(output), at, units_at, row_tile);
        });
    }

    // Several column groups: steps of all output tiles, counted on, go to the groups in turn.
    // `take(values, step, index)` gets the values of a step of output tile `index`. The matrix, the
    // rows and the tokens of a tile are found when it is stored. When every warp found them between
    // two tiles, Q6_K products with several output tiles a block took 2 to 3% longer (H200).
    template <class Take>
    __device__ void multiply_in_turn(int column_group, int row_tile, Take take) const {
        Stage at;
        UnitReader<SharedMemory> units{shared};
        at.advance_by(column_group);
        units.skip(column_group);
        int index = cluster, step = column_group;
        for (;;) {
            for (; step >= steps(); step -= steps()) index += clusters;
            if (index >= tiles.output_tiles) return;
            float values[Shape::VALUES];
            column_values<TOKENS>(values, at, units, row_tile);
            at.advance_by(COLUMN_GROUPS);
            units.skip(COLUMN_GROUPS - 1);
            take(values, step, index);
            step += COLUMN_GROUPS;
        }
    }

    // The block is alone: its groups add to the same sums.
    __device__ void multiply_alone(int column_group, int row_tile) const {
        WarpInTurn<Shape> adding{shared.column_sums, column_group, row_tile};
        multiply_in_turn(column_group, row_tile, [&](const auto &values, int col, int index) {
            adding.add(values, col, tiles.col_tiles(), [&](const auto &sums) {
                tiles.template store_tile<TOKENS>(tiles.output_tile(index), row_tile, sums);
            });
        });
    }

    // The block has half of the columns, and adds the values of half of the tokens.
    __device__ void multiply_with_other_block(int column_group, int row_tile) const {
        const int tiles_of_block = (tiles.output_tiles - cluster + clusters - 1) / clusters;
        ExchangingWarp<Shape> adding{shared.column_sums, rank, column_group, row_tile,
                                     tiles_of_block * steps() - column_group};
        wait_for_cluster();
        auto step_at = [&](int step) {
            return Step{step == 0, step + 1 == steps(), BLOCKS * step + 1 < tiles.col_tiles()};
        };
        auto store_to = [&](int index) {
            return [=](const auto &sums) {
                OutputTile output = tiles.output_tile(index);
                output.group += rank * ADDED_GROUPS;
                tiles.template store_tile<TOKENS / BLOCKS>(output, row_tile, sums);
            };
        };
        multiply_in_turn(column_group, row_tile, [&](const auto &values, int step, int index) {
            adding.send(values);
            const bool is_first = step == 0;
            adding.take_turn(step_at(is_first ? steps() - 1 : step - 1), values,
                             store_to(is_first ? index - clusters : index));
        });
        adding.end(step_at(steps() - 1), store_to(cluster + (tiles_of_block - 1) * clusters));
    }

    // Called before the kernel waits for the previous one.
    static __device__ void init_barriers(SharedMemory &shared) {
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (warp == 0) {
            for (int i = lane; i < Shape::STAGES; i += 32) {
                barrier_init(shared.weights_full + i, Format::HAS_SUMS ? 2 : 1);
                barrier_init(shared.weights_empty + i, 32 * Shape::GROUP_WARPS);
            }
            for (int i = lane; i < SharedMemory::UNIT_STAGES; i += 32) {
                barrier_init(shared.units_full + i, SharedMemory::UNIT_WARPS + SharedMemory::HAS_UNIT_SCALES);
                barrier_init(shared.units_empty + i, 32 * Shape::GROUP_WARPS);
            }
            if constexpr (COLUMN_GROUPS > 1) shared.column_sums.init_barriers();
            barrier_init_done();
        }
        __syncthreads();
        if constexpr (BLOCKS > 1) arrive_at_cluster_relaxed();
    }

    __device__ void run() const {
        int warp = threadIdx.x / 32;
        if (warp < Shape::MULTIPLYING_WARPS) {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Shape::MULTIPLYING_REGISTERS));
            if constexpr (COLUMN_GROUPS > 1) {
                // Equal in all lanes: the compiler then keeps positions and descriptors in uniform
                // registers.
                const int uniform_warp = __shfl_sync(0xFFFFFFFF, warp, 0);
                const int column_group = uniform_warp / Shape::GROUP_WARPS,
                          row_tile = uniform_warp % Shape::GROUP_WARPS;
                if constexpr (BLOCKS > 1)
                    multiply_with_other_block(column_group, row_tile);
                else
                    multiply_alone(column_group, row_tile);
            } else {
                multiply();
            }
        } else {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Shape::OTHER_REGISTERS));
            // One warp copies weights, others units, and one scales or sums.
            constexpr int UNIT_WARPS = SharedMemory::UNIT_WARPS;
            const int copying = warp - Shape::MULTIPLYING_WARPS;
            if (copying == 0) {
                copy_weights();
            } else if (copying == 1) {
                tiles.wait_for_input();
                launch_next_kernel();
                copy_quants<0>();
                tiles.end();
            } else if (copying <= UNIT_WARPS) {
                tiles.wait_for_input();
                copy_quants<UNIT_WARPS - 1>();
            } else if (copying == UNIT_WARPS + 1) {
                tiles.wait_for_input();
                if constexpr (SharedMemory::HAS_UNIT_SCALES) copy_unit_scales();
                if (Format::HAS_SUMS && threadIdx.x % 32 == 0) copy_sums();
            }
        }
    }
};

// The block's shared memory. Its address comes from a shuffle, so that the compiler keeps it. It
// would otherwise compute it again for each column tile, and products of one column group would
// take 1 to 2% longer (H200). Clusters of two are 1 to 2% slower with the shuffle.
template <class Format, class Shape>
__device__ inline Shared<Format, Shape> &shared_memory() {
    extern __shared__ __align__(128) uint8_t memory[];
    uint32_t address = (shared_address(memory) + 1023) / 1024 * 1024;
    if (Shape::BLOCKS == 1) address = __shfl_sync(0xFFFFFFFF, address, 0);
    return *reinterpret_cast<Shared<Format, Shape> *>(__cvta_shared_to_generic(address));
}

}  // namespace wgmma_product

#endif
