// SPDX-License-Identifier: Apache-2.0

// out[t][r] = sum_k weights[r][k] * x[t][k] + bias[r] with quantized weights on wgmma (sm_90a), for
// many tokens. The bits are those of matmul.cuh, which computes the same integers with 8-bit
// products.
//
// Integers as floats: f16 holds integers up to 2,048, and f32 sums of integers are exact below
// 2^24. A tensor core adds the products of one chain exactly, so an integer sum is not rounded.
// `Format` says how values of 256 columns come from such sums (q4_k_wgmma.cuh), or from sums of
// 8-bit integers (q6_k_wgmma.cuh, legacy_wgmma.cuh).
//
// A block computes 128 weight rows by TOKENS tokens at a time: 128, as drawn, or 64. Where that
// leaves multiprocessors idle, the SPLIT blocks of a cluster divide the columns of an output tile
// (cluster_values.cuh).
//
//                 128 tokens                  warps 0 to 3, 4 to 7  expand weights to A fragments
//              +---------------+                                    in registers, and multiply
//    64 rows   | warpgroup 0   |              warp 8                copies weight tiles
//              +---------------+              warps 9, 10           copy units, and sums
//    64 rows   | warpgroup 1   |              warp 11               unpacks the scales of the
//              +---------------+                                    block's rows, if Format does
//
//   A operand: 64 weight rows in registers. Lane 4 g + t of warp w has rows 16 w + g and + 8.
//   B operand: tokens in shared memory, units of 8 tokens: 64 columns of f16 quants, or 128 columns
//              of activation tiles if Format::EIGHT_BIT (tile.cuh).
//   C: lane 4 g + t holds sums[4 j + 0, 1] = row g,     tokens 8 j + 2 t, 8 j + 2 t + 1
//                         sums[4 j + 2, 3] = row g + 8, the same tokens
//
//   Stages of 256 columns (weights, sums, scales) and of 64 columns (f16 quants), each a ring. A
//   stage of 8-bit quants has 256 columns, and the scales of the tokens.
//
//     copies      |weights, sums c   |c + 1             |            quants 4 c ... |
//     warp 11     |                  |scales of c       |c + 1            |
//     warpgroups  |                                     |products, values of c | c + 1

#pragma once

#include "async_copy.cuh"
#include "cluster_values.cuh"
#include "params.cuh"
#include "stream_order.cuh"
#include "wgmma.cuh"

#if HAS_WGMMA

namespace wgmma_product {

constexpr int WARPGROUPS = 2;
constexpr int MULTIPLYING_WARPS = 4 * WARPGROUPS;
constexpr int COPY_WEIGHTS = MULTIPLYING_WARPS, COPY_UNITS = COPY_WEIGHTS + 1, COPY_SUMS = COPY_UNITS + 1,
              UNPACK = COPY_SUMS + 1;
static_assert(32 * (UNPACK + 1) == WGMMA_PRODUCT_THREADS);
constexpr int ROW_TILES = WGMMA_PRODUCT_ROWS / TILE_ROWS, ROWS = WGMMA_PRODUCT_ROWS;
static_assert(ROWS == 64 * WARPGROUPS);
// With 128 tokens, 64 products, 64 values and 64 sums of the result are live at once. A block has
// 64,512 registers: 384 threads of 168, which the warps then share out anew.
constexpr int MULTIPLYING_REGISTERS = 232, OTHER_REGISTERS = 40;
static_assert(MULTIPLYING_WARPS * MULTIPLYING_REGISTERS + 4 * OTHER_REGISTERS <= 12 * 168);
// Stages of 256 columns. With two, Q4_K takes 2% longer.
constexpr int STAGES = 3;

// Bytes of the scales of an activation tile.
__host__ __device__ constexpr int scale_bytes(ActivationFormat format) {
    return (format == ActivationFormat::Q8_K ? 1 : 8) * ACT_TILE_TOKENS * int(sizeof(float));
}

// Shared memory, in this order. Units take what the other parts leave.
template <class Format, int TOKENS, int SPLIT>
struct Shared {
    static constexpr int GROUPS = TOKENS / ACT_TILE_TOKENS;
    // Stages of units in 256 columns.
    static constexpr int UNITS = Format::EIGHT_BIT ? 1 : TILE_COLS / F16_UNIT_COLS;
    static constexpr int UNIT_STAGE = GROUPS * (Format::EIGHT_BIT ? ACT_TILE_QUANT_BYTES : F16_UNIT_BYTES);
    static constexpr int SCALES_BYTES = Format::EIGHT_BIT ? GROUPS * scale_bytes(Format::ACTIVATION) : 16;
    static constexpr int SUMS_BYTES = Format::EIGHT_BIT ? 1 : GROUPS * F16_SUMS_BYTES;
    static constexpr int WEIGHT_BYTES = ROW_TILES * Format::TILE_BYTES;
    // For formats that need none, a byte that is not used.
    static constexpr int UNPACKED_BYTES = Format::UNPACKED_ROW > 0 ? ROWS *Format::UNPACKED_ROW : 1;
    using Values = ClusterValues<GROUPS, SPLIT, MULTIPLYING_WARPS>;
    static constexpr int ALIGNMENT = 1024, BARRIERS = 1024;
    static constexpr int REST =
        STAGES * (WEIGHT_BYTES + SUMS_BYTES + UNPACKED_BYTES) + sizeof(typename Values::Buffers);
    static constexpr int UNIT_STAGES =
        (WGMMA_PRODUCT_SHARED_BYTES - ALIGNMENT - BARRIERS - REST) / (UNIT_STAGE + SCALES_BYTES);
    static_assert(UNIT_STAGES > UNITS);
    uint8_t units[UNIT_STAGES][UNIT_STAGE];
    uint8_t weights[STAGES][WEIGHT_BYTES];
    // Scales of the tokens, as in activation tiles, if Format::EIGHT_BIT.
    uint8_t unit_scales[UNIT_STAGES][SCALES_BYTES];
    uint8_t sums[STAGES][SUMS_BYTES];
    uint8_t unpacked[STAGES][UNPACKED_BYTES];
    typename Values::Buffers values;
    uint64_t weights_full[STAGES], weights_empty[STAGES], unpacked_full[STAGES];
    uint64_t units_full[UNIT_STAGES], units_empty[UNIT_STAGES];
};
// The swizzle is a function of address bits 4 to 9, so `Shared` begins at a multiple of 1,024.
template <class Format, int TOKENS, int SPLIT>
constexpr bool FITS = sizeof(Shared<Format, TOKENS, SPLIT>) + 1024 - 128 <= WGMMA_PRODUCT_SHARED_BYTES;

// A position in a ring of COUNT stages. A reader waits for `phase`, a writer for the opposite one.
template <int COUNT>
struct RingPosition {
    int stage = 0, phase = 0;

    __device__ void advance() {
        if (++stage == COUNT) stage = 0, phase ^= 1;
    }
};
using Stage = RingPosition<STAGES>;

struct OutputTile {
    int matrix, row_tile, group;
};

__device__ __forceinline__ void release_stage(uint64_t *empty) {
    // The reads of all lanes come before.
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty);
}

// What a multiplying warp reads in the ring of units. A stage that was passed stays in use until
// products with it have ended.
template <class SharedMemory>
struct UnitReader {
    SharedMemory &shared;
    RingPosition<SharedMemory::UNIT_STAGES> at;
    int in_use = -1;

    __device__ const uint8_t *wait() const {
        barrier_wait(shared.units_full + at.stage, at.phase);
        return shared.units[at.stage];
    }

    // Those of a group of 8 tokens.
    __device__ const float *scales(int group) const {
        constexpr int BYTES = sizeof(shared.unit_scales[0]) / SharedMemory::GROUPS;
        return reinterpret_cast<const float *>(shared.unit_scales[at.stage] + group * BYTES);
    }

    __device__ void advance() {
        in_use = at.stage;
        at.advance();
    }

    // Called when the products with the stage that was passed have ended.
    __device__ void release() {
        if (in_use >= 0) release_stage(shared.units_empty + in_use);
        in_use = -1;
    }
};

// 256 columns of a warp's 16 rows. `unpacked` is that of the lane's row g; `sums` are those of the
// block's tokens.
struct ColumnTile {
    const uint8_t *weights, *unpacked, *sums;
    uint64_t *unpacked_full;
    int phase;
};

// Of a stage of 8-bit units: columns 32 block to 32 block + 31, from token 8 group on.
__device__ __forceinline__ uint64_t eight_bit_operand(const uint8_t *unit, int block, int group = 0) {
    return operand_descriptor(unit + group * ACT_TILE_QUANT_BYTES + block / 4 * ACT_UNIT_BYTES,
                              ACT_TILE_QUANT_BYTES) +
           2 * (block % 4);
}

template <int N>
__device__ __forceinline__ void pin_registers(float (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(values[i])::"memory");
}
template <int N>
__device__ __forceinline__ void pin_registers(int (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(values[i])::"memory");
}

template <class Format, int TOKENS, int SPLIT>
struct Kernel {
    static_assert(FITS<Format, TOKENS, SPLIT>);
    using SharedMemory = Shared<Format, TOKENS, SPLIT>;
    using Values = typename SharedMemory::Values;
    using UnitStage = RingPosition<SharedMemory::UNIT_STAGES>;
    static constexpr int GROUPS = SharedMemory::GROUPS, UNIT_STAGE = SharedMemory::UNIT_STAGE,
                         TILE = Format::TILE_BYTES, UNITS = SharedMemory::UNITS;
    // Elements of a thread: those it computes for 256 columns, and those it adds up.
    static constexpr int VALUES = TOKENS / 2, TOTALS = VALUES / SPLIT;

    const LinearParams &params;
    const F16Quants &quants;
    SharedMemory &shared;
    int token_tiles, output_tiles;
    // This block's number in its cluster. It computes column tiles rank, rank + SPLIT, ...
    int rank;

    __device__ bool find_tile(int index, OutputTile &tile) const {
        if (index >= output_tiles) return false;
        RowTile rows = find_row_tile<ROW_TILES>(params, index / token_tiles);
        tile = {rows.matrix, rows.first, index % token_tiles * GROUPS};
        return true;
    }

    // Calls `work(tile)` for the block's output tiles. Tiles of one group of weight rows are
    // neighbours, so that blocks that run at the same time read the same weights.
    template <class Work>
    __device__ void for_each_tile(Work work) const {
        OutputTile tile;
        for (int index = blockIdx.x / SPLIT; find_tile(index, tile); index += gridDim.x / SPLIT) work(tile);
    }

    // Rows beyond the matrix are not copied. What is computed from them is not stored.
    __device__ void copy_weights() const {
        Stage at;
        int lane = threadIdx.x % 32;
        for_each_tile([&](const OutputTile &tile) {
            int tiles = min(ROW_TILES, row_tiles(params, tile.matrix) - tile.row_tile);
            const uint8_t *from = params.weights[tile.matrix] +
                                  static_cast<size_t>(tile.row_tile + lane) * params.col_tiles * TILE;
            for (int col = rank; col < params.col_tiles; col += SPLIT, at.advance()) {
                uint64_t *full = shared.weights_full + at.stage;
                barrier_wait(shared.weights_empty + at.stage, at.phase ^ 1);
                if (lane == 0) barrier_expect(full, tiles * TILE);
                __syncwarp();
                if (lane < tiles)
                    bulk_copy(shared.weights[at.stage] + lane * TILE, from + size_t(col) * TILE, TILE, full);
            }
        });
    }

    __device__ void copy_sums() const {
        Stage at;
        size_t groups = quants.groups;
        for_each_tile([&](const OutputTile &tile) {
            for (int col = rank; col < params.col_tiles; col += SPLIT, at.advance()) {
                uint64_t *full = shared.weights_full + at.stage;
                barrier_wait(shared.weights_empty + at.stage, at.phase ^ 1);
                barrier_expect(full, GROUPS * F16_SUMS_BYTES);
                bulk_copy(shared.sums[at.stage], quants.sums + (col * groups + tile.group) * F16_SUMS_BYTES,
                          GROUPS * F16_SUMS_BYTES, full);
            }
        });
    }

    __device__ void copy_units() const {
        UnitStage at;
        size_t groups = quants.groups;
        for_each_tile([&](const OutputTile &tile) {
            int units = (params.col_tiles - rank + SPLIT - 1) / SPLIT * UNITS;
            for (int i = 0; i < units; i++, at.advance()) {
                int unit = (i / UNITS * SPLIT + rank) * UNITS + i % UNITS;
                uint64_t *full = shared.units_full + at.stage;
                barrier_wait(shared.units_empty + at.stage, at.phase ^ 1);
                barrier_expect(full, UNIT_STAGE);
                bulk_copy(shared.units[at.stage],
                          quants.units + (unit * groups + tile.group) * F16_UNIT_BYTES, UNIT_STAGE, full);
            }
        });
    }

    // Whole groups of 256 columns from activation tiles, a group per lane. Groups beyond the tokens
    // are not copied. What is computed from them is not stored.
    __device__ void copy_act_tiles() const {
        constexpr int BYTES = act_tile_bytes(Format::ACTIVATION), SCALES = scale_bytes(Format::ACTIVATION);
        UnitStage at;
        int lane = threadIdx.x % 32;
        int all_groups = (params.tokens + ACT_TILE_TOKENS - 1) / ACT_TILE_TOKENS;
        for_each_tile([&](const OutputTile &tile) {
            int groups = min(GROUPS, all_groups - tile.group);
            const uint8_t *from =
                params.act_tiles + static_cast<size_t>(tile.group + lane) * params.col_tiles * BYTES;
            for (int col = rank; col < params.col_tiles; col += SPLIT, at.advance()) {
                uint64_t *full = shared.units_full + at.stage;
                barrier_wait(shared.units_empty + at.stage, at.phase ^ 1);
                if (lane == 0) barrier_expect(full, groups * (ACT_TILE_QUANT_BYTES + SCALES));
                __syncwarp();
                if (lane >= groups) continue;
                const uint8_t *act_tile = from + size_t(col) * BYTES;
                bulk_copy(shared.units[at.stage] + lane * ACT_TILE_QUANT_BYTES, act_tile,
                          ACT_TILE_QUANT_BYTES, full);
                bulk_copy(shared.unit_scales[at.stage] + lane * SCALES, act_tile + ACT_TILE_QUANT_BYTES,
                          SCALES, full);
            }
        });
    }

    __device__ void unpack_scales() const {
        Stage at;
        int lane = threadIdx.x % 32;
        for_each_tile([&](const OutputTile &) {
            for (int col = rank; col < params.col_tiles; col += SPLIT, at.advance()) {
                barrier_wait(shared.weights_full + at.stage, at.phase);
#pragma unroll 1
                for (int row = lane; row < ROWS; row += 32)
                    Format::unpack_row(shared.weights[at.stage] + row / TILE_ROWS * TILE, row % TILE_ROWS,
                                       shared.unpacked[at.stage] + row * Format::UNPACKED_ROW);
                __syncwarp();
                if (lane == 0) barrier_arrive(shared.unpacked_full + at.stage);
            }
        });
    }

    __device__ void multiply() const {
        Stage at;
        UnitReader<SharedMemory> units{shared};
        Values cluster_values(shared.values, rank);
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        for_each_tile([&](const OutputTile &output) {
            float total[TOTALS];
#pragma unroll
            for (int i = 0; i < TOTALS; i++) total[i] = 0.0f;
            for (int first = 0; first < params.col_tiles; first += SPLIT) {
                // The values of the columns before have arrived while this block multiplied.
                auto add_arrived = [&]() {
                    if (SPLIT > 1 && first > 0) cluster_values.add(total, SPLIT);
                };
                if (first + rank >= params.col_tiles) {
                    add_arrived();
                    cluster_values.send_nothing();
                    continue;
                }
                ColumnTile tile = {shared.weights[at.stage] + warp * TILE,
                                   shared.unpacked[at.stage] + (warp * TILE_ROWS + g) * Format::UNPACKED_ROW,
                                   shared.sums[at.stage], shared.unpacked_full + at.stage, at.phase};
                typename Format::Sum sums[VALUES];
                barrier_wait(shared.weights_full + at.stage, at.phase);
                Format::template multiply_columns<TOKENS>(sums, tile, units);
                add_arrived();
                cluster_values.begin_round();
                Format::template finish_values<TOKENS>(sums, tile, units,
                                                       [&](int group, const float(&values)[4]) {
                                                           if constexpr (SPLIT > 1) {
                                                               cluster_values.send(group, values);
                                                           } else {
#pragma unroll
                                                               for (int i = 0; i < 4; i++)
                                                                   total[4 * group + i] += values[i];
                                                           }
                                                       });
                release_stage(shared.weights_empty + at.stage);
                at.advance();
            }
            if constexpr (SPLIT > 1) {
                int rest = params.col_tiles % SPLIT;
                cluster_values.add(total, rest == 0 ? SPLIT : rest);
            }
#pragma unroll
            for (int i = 0; i < TOTALS; i++) {
                int row = (output.row_tile + warp) * TILE_ROWS + g + i % 4 / 2 * 8;
                int group = output.group + rank * (GROUPS / SPLIT) + i / 4;
                store_output(params, output.matrix, row, group * ACT_TILE_TOKENS + 2 * t + i % 2, total[i]);
            }
        });
    }

    __device__ void run() const {
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (threadIdx.x == 0) {
            for (int i = 0; i < STAGES; i++) {
                barrier_init(shared.weights_full + i, Format::EIGHT_BIT ? 1 : 2);
                barrier_init(shared.weights_empty + i, MULTIPLYING_WARPS);
                barrier_init(shared.unpacked_full + i);
            }
            for (int i = 0; i < SharedMemory::UNIT_STAGES; i++) {
                barrier_init(shared.units_full + i);
                barrier_init(shared.units_empty + i, MULTIPLYING_WARPS);
            }
            Values::init(shared.values);
            barrier_init_done();
        }
        Values::wait_for_cluster();
        launch_next_kernel();
        if (warp < MULTIPLYING_WARPS) {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLYING_REGISTERS));
            multiply();
        } else {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(OTHER_REGISTERS));
            if (warp == COPY_WEIGHTS) {
                copy_weights();
            } else if (warp == COPY_UNITS) {
                wait_for_previous_kernel();
                if constexpr (Format::EIGHT_BIT) {
                    copy_act_tiles();
                } else {
                    if (lane == 0) copy_units();
                }
            } else if (warp == COPY_SUMS) {
                wait_for_previous_kernel();
                if (!Format::EIGHT_BIT && lane == 0) copy_sums();
            } else if constexpr (Format::UNPACKED_ROW > 0) {
                unpack_scales();
            }
        }
        // Other blocks may still write to this block's shared memory.
        if constexpr (SPLIT > 1) Values::wait_for_cluster();
    }
};

template <class Format, int TOKENS, int SPLIT>
__device__ inline void multiply(const LinearParams &params, const F16Quants &quants) {
    extern __shared__ __align__(128) uint8_t memory[];
    uint8_t *aligned = memory + ((1024 - shared_address(memory) % 1024) & 1023);
    int token_tiles = (params.tokens + TOKENS - 1) / TOKENS;
    int output_tiles = count_row_tile_groups<ROW_TILES>(params) * token_tiles;
    int rank = SPLIT > 1 ? blockIdx.x % SPLIT : 0;
    auto &shared = *reinterpret_cast<Shared<Format, TOKENS, SPLIT> *>(aligned);
    Kernel<Format, TOKENS, SPLIT>{params, quants, shared, token_tiles, output_tiles, rank}.run();
}

}  // namespace wgmma_product

#endif
