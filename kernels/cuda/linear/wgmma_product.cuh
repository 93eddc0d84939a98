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
// registers. With several, they are in shared memory, and column tile n is added after column tile
// n - 1: each warp waits for the warp of the same rows in the group before. So groups are out of
// step, and one multiplies while another one computes values.
//
// Small products need several column groups: two warpgroups do not hide the latencies of a chain
// of 256 columns, and narrow matrices have too few tiles of 128 rows for a device. Measured on an
// H200, Q4_K, us for 64 tokens, by tokens, row groups and column groups of a block:
//
//                    32/1/4   64/1/4   64/2/1   matmul.cuh
//   4096 x 4096      10.9     13.2     23.1     15.1
//   12288 x 4096     24.1     33.2     61.9     38.0
//   4096 x 12288     26.2     25.3     24.8     40.6
//
// Limit: instructions (affine_k_wgmma.cuh has the counts). With four column groups the four warps
// of a scheduler issue in half of the clocks. Copies by one lane, and one warp that unpacked the
// scales of all rows, were a limit before: 40 us instead of 31 for 12288 x 4096.

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
                         COLUMN_GROUPS = Shape::COLUMN_GROUPS, TILE = Format::TILE_BYTES;
    using OutputTile = typename Tiles::OutputTile;

    const Tiles &tiles;
    const F16Sums &sums;
    SharedMemory &shared;

    // Calls `work(tile)` for the block's output tiles.
    template <class Work>
    __device__ void for_each_tile(Work work) const {
        OutputTile tile;
        for (int index = blockIdx.x; tiles.find(index, tile); index += gridDim.x) work(tile);
    }

    // Rows beyond the matrix are not copied. What is computed from them is not stored.
    __device__ void copy_weights() const {
        Stage at;
        int lane = threadIdx.x % 32;
        for_each_tile([&](const OutputTile &tile) {
            int row_tiles = min(ROW_TILES, tiles.row_tiles(tile) - tile.row_tile);
            const uint8_t *from =
                tiles.weights(tile) + static_cast<size_t>(tile.row_tile + lane) * tiles.col_tiles() * TILE;
            for (int col = 0; col < tiles.col_tiles(); col++, at.advance()) {
                uint64_t *full = shared.weights_full + at.stage;
                barrier_wait(shared.weights_empty + at.stage, at.phase ^ 1);
                if (lane == 0) barrier_expect(full, row_tiles * TILE);
                __syncwarp();
                if (lane < row_tiles)
                    bulk_copy(shared.weights[at.stage] + lane * TILE, from + size_t(col) * TILE, TILE, full);
            }
        });
    }

    __device__ void copy_sums() const {
        Stage at;
        size_t groups = sums.groups;
        for_each_tile([&](const OutputTile &tile) {
            uint32_t bytes = tiles.groups(tile) * F16_SUMS_BYTES;
            for (int col = 0; col < tiles.col_tiles(); col++, at.advance()) {
                uint64_t *full = shared.weights_full + at.stage;
                barrier_wait(shared.weights_empty + at.stage, at.phase ^ 1);
                barrier_expect(full, bytes);
                bulk_copy(shared.sums[at.stage], sums.data + (col * groups + tile.group) * F16_SUMS_BYTES,
                          bytes, full);
            }
        });
    }

    // Whole groups of 256 columns from activation tiles, a group per lane. Groups beyond the tokens
    // are not copied. What is computed from them is not stored.
    __device__ void copy_act_tiles() const {
        constexpr int BYTES = act_tile_bytes(Format::ACTIVATION),
                      SCALES = SharedMemory::HAS_UNIT_SCALES ? scale_bytes(Format::ACTIVATION) : 0;
        UnitStage at;
        int lane = threadIdx.x % 32;
        for_each_tile([&](const OutputTile &tile) {
            int groups = tiles.groups(tile);
            const uint8_t *from =
                tiles.act_tiles() + static_cast<size_t>(tile.group + lane) * tiles.col_tiles() * BYTES;
            for (int col = 0; col < tiles.col_tiles(); col++, at.advance()) {
                uint64_t *full = shared.units_full + at.stage;
                barrier_wait(shared.units_empty + at.stage, at.phase ^ 1);
                if (lane == 0) barrier_expect(full, groups * (ACT_TILE_QUANT_BYTES + SCALES));
                __syncwarp();
                if (lane >= groups) continue;
                const uint8_t *act_tile = from + size_t(col) * BYTES;
                bulk_copy(shared.units[at.stage] + lane * ACT_TILE_QUANT_BYTES, act_tile,
                          ACT_TILE_QUANT_BYTES, full);
                if constexpr (SCALES > 0)
                    bulk_copy(shared.unit_scales[at.stage] + lane * SCALES, act_tile + ACT_TILE_QUANT_BYTES,
                              SCALES, full);
            }
        });
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
        for (int col = 0; col < tiles.col_tiles(); col++, at.advance()) {
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

    // Several column groups: column tiles of all output tiles, counted on, go to the groups in
    // turn.
    __device__ void multiply_in_turn() const {
        // Equal in all lanes: the compiler then keeps positions and descriptors in uniform
        // registers.
        int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
        int column_group = warp / Shape::GROUP_WARPS, row_tile = warp % Shape::GROUP_WARPS;
        int before = (column_group + COLUMN_GROUPS - 1) % COLUMN_GROUPS;
        Stage at;
        UnitReader<SharedMemory> units{shared};
        for (int i = 0; i < column_group; i++) {
            at.advance();
            units.skip(1);
        }
        // The group before has added once more than this one, except for the first group.
        int phase = column_group == 0 ? 1 : 0;
        int col = column_group;
        float4(*totals)[SharedMemory::TOTAL_THREADS] = shared.totals;
        int thread = threadIdx.x % SharedMemory::TOTAL_THREADS;
        for_each_tile([&](const OutputTile &output) {
            for (; col < tiles.col_tiles(); col += COLUMN_GROUPS) {
                float values[Shape::VALUES];
                column_values<TOKENS>(values, at, units, row_tile);
                at.advance_by(COLUMN_GROUPS);
                units.skip(COLUMN_GROUPS - 1);
                barrier_wait(&shared.added[before][row_tile], phase);
                phase ^= 1;
                // All loads come before the first store.
                float4 sums[GROUPS];
#pragma unroll
                for (int group = 0; group < GROUPS; group++)
                    sums[group] = col == 0 ? make_float4(0, 0, 0, 0) : totals[group][thread];
#pragma unroll
                for (int group = 0; group < GROUPS; group++) {
                    sums[group].x += values[4 * group], sums[group].y += values[4 * group + 1];
                    sums[group].z += values[4 * group + 2], sums[group].w += values[4 * group + 3];
                }
                const bool is_last = col + 1 == tiles.col_tiles();
                if (!is_last)
#pragma unroll
                    for (int group = 0; group < GROUPS; group++) totals[group][thread] = sums[group];
                // Before an output tile is stored, which takes longer than a turn.
                barrier_arrive(&shared.added[column_group][row_tile]);
                if (is_last) {
                    float total[Shape::VALUES];
#pragma unroll
                    for (int group = 0; group < GROUPS; group++) {
                        total[4 * group] = sums[group].x, total[4 * group + 1] = sums[group].y;
                        total[4 * group + 2] = sums[group].z, total[4 * group + 3] = sums[group].w;
                    }
                    tiles.template store_tile<TOKENS>(output, row_tile, total);
                }
            }
            col -= tiles.col_tiles();
        });
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
                barrier_init(shared.units_full + i);
                barrier_init(shared.units_empty + i, 32 * Shape::GROUP_WARPS);
            }
            for (int i = lane; i < Shape::MULTIPLYING_WARPS; i += 32)
                barrier_init(&shared.added[0][0] + i, 32);
            barrier_init_done();
        }
        __syncthreads();
    }

    __device__ void run() const {
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (warp < Shape::MULTIPLYING_WARPS) {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Shape::MULTIPLYING_REGISTERS));
            if constexpr (COLUMN_GROUPS > 1)
                multiply_in_turn();
            else
                multiply();
        } else {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Shape::OTHER_REGISTERS));
            if (warp == Shape::COPY_WEIGHTS) {
                copy_weights();
            } else if (warp == Shape::COPY_UNITS) {
                tiles.wait_for_input();
                launch_next_kernel();
                copy_act_tiles();
                tiles.end();
            } else if (warp == Shape::COPY_SUMS) {
                tiles.wait_for_input();
                if (Format::HAS_SUMS && lane == 0) copy_sums();
            }
        }
    }
};

// The block's shared memory.
template <class Format, class Shape>
__device__ inline Shared<Format, Shape> &shared_memory() {
    extern __shared__ __align__(128) uint8_t memory[];
    uint8_t *aligned = memory + ((1024 - shared_address(memory) % 1024) & 1023);
    return *reinterpret_cast<Shared<Format, Shape> *>(aligned);
}

}  // namespace wgmma_product

#endif
