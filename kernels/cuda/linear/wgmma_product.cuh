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
// A block computes output tiles of 64 ROW_GROUPS weight rows by TOKENS tokens. A warpgroup computes
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
//   B operand: tokens in shared memory, units of 8 tokens: 64 columns of f16 quants, or 128 columns
//              of activation tiles if Format::EIGHT_BIT (tile.cuh).
//   C: lane 4 g + t holds sums[4 j + 0, 1] = row g,     tokens 8 j + 2 t, 8 j + 2 t + 1
//                         sums[4 j + 2, 3] = row g + 8, the same tokens
//
//   Stages of 256 columns (weights, sums, scales) and of 64 columns (f16 quants), each a ring. A
//   stage of 8-bit quants has 256 columns, and the scales of the tokens. Rings go on from output
//   tile to output tile.
//
//     copies      |weights, sums c   |c + 1             |            quants 4 c ... |
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
//   4096 x 4096      14.0     15.9     26.0     14.9
//   12288 x 4096     31.1     40.3     70.9     37.9
//   4096 x 12288     32.9     30.6     27.8     40.2
//
// Limit: instructions (q4_k_wgmma.cuh has the counts). With four column groups the four warps of a
// scheduler issue in half of the clocks. Copies by one lane, and one warp that unpacked the scales
// of all rows, were the limit before: 40.1 us instead of 31.1 for 12288 x 4096.

#pragma once

#include "async_copy.cuh"
#include "params.cuh"
#include "stream_order.cuh"
#include "wgmma.cuh"

#if HAS_WGMMA

namespace wgmma_product {

// The shape of a block.
template <int TOKENS_, int ROW_GROUPS_, int COLUMN_GROUPS_, int STAGES_>
struct Shape {
    static constexpr int TOKENS = TOKENS_, ROW_GROUPS = ROW_GROUPS_, COLUMN_GROUPS = COLUMN_GROUPS_;
    // Stages of 256 columns. At least one per column group, and some that are being filled.
    static constexpr int STAGES = STAGES_;
    static constexpr int ROWS = 64 * ROW_GROUPS, ROW_TILES = ROWS / TILE_ROWS;
    // Warps of a column group.
    static constexpr int GROUP_WARPS = 4 * ROW_GROUPS;
    static constexpr int MULTIPLYING_WARPS = GROUP_WARPS * COLUMN_GROUPS;
    // Registers move between whole warpgroups, so four warps copy, of which one has nothing to do.
    static constexpr int COPY_WEIGHTS = MULTIPLYING_WARPS, COPY_UNITS = COPY_WEIGHTS + 1,
                         COPY_SUMS = COPY_UNITS + 1;
    static constexpr int THREADS = 32 * (MULTIPLYING_WARPS + 4);
    // Groups of 8 tokens.
    static constexpr int GROUPS = TOKENS / ACT_TILE_TOKENS;
    // Elements of a thread.
    static constexpr int VALUES = TOKENS / 2;
    // A multiprocessor has 65,536 registers. Threads start with equal shares, in steps of 8. The
    // multiplying warps then take some of the other warps' share: with 128 tokens, 64 products, 64
    // values and 64 sums are live at once.
    static constexpr int START_REGISTERS = 65536 / THREADS / 8 * 8;
    static constexpr int OTHER_REGISTERS = MULTIPLYING_WARPS > 12 ? 32 : 40;
    static constexpr int MULTIPLYING_REGISTERS =
        (START_REGISTERS * (MULTIPLYING_WARPS + 4) - OTHER_REGISTERS * 4) / MULTIPLYING_WARPS / 8 * 8;
};

// Bytes of the scales of an activation tile.
__host__ __device__ constexpr int scale_bytes(ActivationFormat format) {
    return (format == ActivationFormat::Q8_K ? 1 : 8) * ACT_TILE_TOKENS * int(sizeof(float));
}

// Shared memory, in this order. Units take what the other parts leave.
template <class Format, class Shape>
struct Shared {
    static constexpr int GROUPS = Shape::GROUPS, STAGES = Shape::STAGES;
    // Stages of units in 256 columns. Fewer need fewer barriers, more use less memory at a time.
    static constexpr int F16_UNITS = TILE_COLS / F16_UNIT_COLS;
    static constexpr int UNITS = Format::EIGHT_BIT || Shape::TOKENS <= 32 ? 1 : F16_UNITS;
    static constexpr int UNIT_STAGE =
        GROUPS * (Format::EIGHT_BIT ? ACT_TILE_QUANT_BYTES : F16_UNITS / UNITS * F16_UNIT_BYTES);
    static constexpr bool HAS_UNIT_SCALES = Format::EIGHT_BIT;
    static constexpr int SCALES_BYTES = HAS_UNIT_SCALES ? GROUPS * scale_bytes(Format::ACTIVATION) : 16;
    static constexpr int SUMS_BYTES = Format::EIGHT_BIT ? 1 : GROUPS * F16_SUMS_BYTES;
    static constexpr int WEIGHT_BYTES = Shape::ROW_TILES * Format::TILE_BYTES;
    // Scales of a warp's 16 rows. For formats that need none, a byte that is not used.
    static constexpr int UNPACKED_BYTES = Format::UNPACKED_ROW > 0 ? TILE_ROWS *Format::UNPACKED_ROW : 1;
    // With one column group, an element that is not used.
    static constexpr int TOTAL_GROUPS = Shape::COLUMN_GROUPS > 1 ? GROUPS : 1,
                         TOTAL_THREADS = Shape::COLUMN_GROUPS > 1 ? 32 * Shape::GROUP_WARPS : 1;
    static constexpr int ALIGNMENT = 1024, BARRIERS = 1024;
    static constexpr int REST = STAGES * (WEIGHT_BYTES + SUMS_BYTES) +
                                Shape::MULTIPLYING_WARPS * UNPACKED_BYTES +
                                TOTAL_GROUPS * TOTAL_THREADS * int(sizeof(float4));
    static constexpr int FITTING =
        (WGMMA_PRODUCT_SHARED_BYTES - ALIGNMENT - BARRIERS - REST) / (UNIT_STAGE + SCALES_BYTES);
    static constexpr int USEFUL = STAGES * UNITS;
    static constexpr int UNIT_STAGES = FITTING < USEFUL ? FITTING : USEFUL;
    static_assert(UNIT_STAGES > UNITS && STAGES > Shape::COLUMN_GROUPS);
    uint8_t units[UNIT_STAGES][UNIT_STAGE];
    uint8_t weights[STAGES][WEIGHT_BYTES];
    // Scales of the tokens, as in activation tiles, if HAS_UNIT_SCALES.
    uint8_t unit_scales[UNIT_STAGES][SCALES_BYTES];
    uint8_t sums[STAGES][SUMS_BYTES];
    uint8_t unpacked[Shape::MULTIPLYING_WARPS][UNPACKED_BYTES];
    // Sums of the output tile, four of a thread and a group of 8 tokens.
    alignas(16) float4 totals[TOTAL_GROUPS][TOTAL_THREADS];
    uint64_t weights_full[STAGES], weights_empty[STAGES];
    uint64_t units_full[UNIT_STAGES], units_empty[UNIT_STAGES];
    // A warp of a column group has added the values of its last column tile.
    uint64_t added[Shape::COLUMN_GROUPS][Shape::GROUP_WARPS];
};
// The swizzle is a function of address bits 4 to 9, so `Shared` begins at a multiple of 1,024.
template <class Format, class Shape>
constexpr bool FITS = sizeof(Shared<Format, Shape>) + 1024 - 128 <= WGMMA_PRODUCT_SHARED_BYTES;

// A position in a ring of COUNT stages. A reader waits for `phase`, a writer for the opposite one.
template <int COUNT>
struct RingPosition {
    int stage = 0, phase = 0;

    __device__ void advance() {
        if (++stage == COUNT) stage = 0, phase ^= 1;
    }

    template <int BY>
    __device__ void advance_by() {
        static_assert(BY <= COUNT);
        stage += BY;
        if (stage >= COUNT) stage -= COUNT, phase ^= 1;
    }
};

struct OutputTile {
    int matrix, row_tile, group;
};

// `LOADED` says whether the warp has loaded from the stage, and not only multiplied with it.
template <bool LOADED>
__device__ __forceinline__ void release_stage(uint64_t *empty) {
    if (LOADED) end_loads_before_copy();
    // Every lane arrives for its own reads. One lane after __syncwarp() would do and costs as much,
    // but racecheck does not follow that order.
    barrier_arrive(empty);
}

// What a multiplying warp reads in the ring of units. A stage that was passed stays in use until
// products with it have ended.
template <class SharedMemory>
struct UnitReader {
    // Columns of a stage of f16 quants, and bytes of 64 columns in it.
    static constexpr int STAGE_COLS = TILE_COLS / SharedMemory::UNITS,
                         UNIT_BYTES = SharedMemory::GROUPS * F16_UNIT_BYTES;
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

    // Passes the units of other column groups.
    template <int STAGES>
    __device__ void skip() {
        at.template advance_by<STAGES>();
    }

    // Called when the products with the stage that was passed have ended.
    __device__ void release() {
        if (in_use >= 0) release_stage<SharedMemory::HAS_UNIT_SCALES>(shared.units_empty + in_use);
        in_use = -1;
    }
};

// 256 columns of a warp's 16 rows. `unpacked` has the rows' scales; `sums` are those of the block's
// tokens.
struct ColumnTile {
    const uint8_t *weights, *unpacked, *sums;
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

template <class Format, class Shape>
struct Kernel {
    static_assert(FITS<Format, Shape>);
    using SharedMemory = Shared<Format, Shape>;
    using Stage = RingPosition<Shape::STAGES>;
    using UnitStage = RingPosition<SharedMemory::UNIT_STAGES>;
    static constexpr int TOKENS = Shape::TOKENS, GROUPS = Shape::GROUPS, ROW_TILES = Shape::ROW_TILES,
                         COLUMN_GROUPS = Shape::COLUMN_GROUPS, UNIT_STAGE = SharedMemory::UNIT_STAGE,
                         TILE = Format::TILE_BYTES, UNITS = SharedMemory::UNITS;

    const LinearParams &params;
    const F16Quants &quants;
    SharedMemory &shared;
    int token_tiles, output_tiles;

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
        for (int index = blockIdx.x; find_tile(index, tile); index += gridDim.x) work(tile);
    }

    // Rows beyond the matrix are not copied. What is computed from them is not stored.
    __device__ void copy_weights() const {
        Stage at;
        int lane = threadIdx.x % 32;
        for_each_tile([&](const OutputTile &tile) {
            int tiles = min(ROW_TILES, row_tiles(params, tile.matrix) - tile.row_tile);
            const uint8_t *from = params.weights[tile.matrix] +
                                  static_cast<size_t>(tile.row_tile + lane) * params.col_tiles * TILE;
            for (int col = 0; col < params.col_tiles; col++, at.advance()) {
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
            for (int col = 0; col < params.col_tiles; col++, at.advance()) {
                uint64_t *full = shared.weights_full + at.stage;
                barrier_wait(shared.weights_empty + at.stage, at.phase ^ 1);
                barrier_expect(full, GROUPS * F16_SUMS_BYTES);
                bulk_copy(shared.sums[at.stage], quants.sums + (col * groups + tile.group) * F16_SUMS_BYTES,
                          GROUPS * F16_SUMS_BYTES, full);
            }
        });
    }

    // A lane copies 64 columns of each column tile.
    __device__ void copy_units() const {
        constexpr int LANES = SharedMemory::F16_UNITS, LANES_PER_STAGE = LANES / UNITS;
        constexpr uint32_t BYTES = GROUPS * F16_UNIT_BYTES;
        UnitStage at;
        int lane = threadIdx.x % 32;
        if (lane >= LANES) return;
        for (int i = 0; i < lane / LANES_PER_STAGE; i++) at.advance();
        size_t groups = quants.groups;
        for_each_tile([&](const OutputTile &tile) {
            for (int col = 0; col < params.col_tiles; col++, at.template advance_by<UNITS>()) {
                uint64_t *full = shared.units_full + at.stage;
                barrier_wait(shared.units_empty + at.stage, at.phase ^ 1);
                // No lane is a round ahead: it would wait for a stage that is still to be filled.
                __syncwarp((1 << LANES) - 1);
                if (lane % LANES_PER_STAGE == 0) barrier_expect(full, UNIT_STAGE);
                __syncwarp((1 << LANES) - 1);
                size_t unit = size_t(col) * LANES + lane;
                bulk_copy(shared.units[at.stage] + lane % LANES_PER_STAGE * BYTES,
                          quants.units + (unit * groups + tile.group) * F16_UNIT_BYTES, BYTES, full);
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
            for (int col = 0; col < params.col_tiles; col++, at.advance()) {
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

    // Computes the values of 256 columns: those of the stage `at`.
    template <class Units>
    __device__ void column_values(float (&values)[Shape::VALUES], const Stage &at, Units &units,
                                  int row_tile) const {
        uint8_t *unpacked = shared.unpacked[threadIdx.x / 32];
        ColumnTile tile = {shared.weights[at.stage] + row_tile * TILE, unpacked, shared.sums[at.stage]};
        typename Format::Sum sums[Shape::VALUES];
        barrier_wait(shared.weights_full + at.stage, at.phase);
        if constexpr (Format::UNPACKED_ROW > 0) {
            // All lanes have read the scales of the column tile before.
            __syncwarp();
            Format::unpack_scales(tile.weights, unpacked);
            __syncwarp();
        }
        Format::template multiply_columns<TOKENS>(sums, tile, units);
        Format::template finish_values<TOKENS>(sums, tile, units, [&](int group, const float(&four)[4]) {
#pragma unroll
            for (int i = 0; i < 4; i++) values[4 * group + i] = four[i];
        });
        release_stage<true>(shared.weights_empty + at.stage);
    }

    __device__ void store(const OutputTile &output, int row_tile, int group, const float (&four)[4]) const {
        int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < 4; i++)
            store_output(params, output.matrix, (output.row_tile + row_tile) * TILE_ROWS + g + i / 2 * 8,
                         (output.group + group) * ACT_TILE_TOKENS + 2 * t + i % 2, four[i]);
    }

    // One column group: sums stay in registers.
    __device__ void multiply() const {
        Stage at;
        UnitReader<SharedMemory> units{shared};
        int row_tile = threadIdx.x / 32;
        for_each_tile([&](const OutputTile &output) {
            float total[Shape::VALUES];
#pragma unroll
            for (int i = 0; i < Shape::VALUES; i++) total[i] = 0.0f;
            for (int col = 0; col < params.col_tiles; col++, at.advance()) {
                float values[Shape::VALUES];
                column_values(values, at, units, row_tile);
#pragma unroll
                for (int i = 0; i < Shape::VALUES; i++) total[i] += values[i];
            }
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                float four[4] = {total[4 * group], total[4 * group + 1], total[4 * group + 2],
                                 total[4 * group + 3]};
                store(output, row_tile, group, four);
            }
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
            units.template skip<UNITS>();
        }
        // The group before has added once more than this one, except for the first group.
        int phase = column_group == 0 ? 1 : 0;
        int col = column_group;
        float4(*totals)[SharedMemory::TOTAL_THREADS] = shared.totals;
        int thread = threadIdx.x % SharedMemory::TOTAL_THREADS;
        for_each_tile([&](const OutputTile &output) {
            for (; col < params.col_tiles; col += COLUMN_GROUPS) {
                float values[Shape::VALUES];
                column_values(values, at, units, row_tile);
                at.template advance_by<COLUMN_GROUPS>();
                units.template skip<(COLUMN_GROUPS - 1) * UNITS>();
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
                if (col + 1 < params.col_tiles) {
#pragma unroll
                    for (int group = 0; group < GROUPS; group++) totals[group][thread] = sums[group];
                } else {
#pragma unroll
                    for (int group = 0; group < GROUPS; group++) {
                        float four[4] = {sums[group].x, sums[group].y, sums[group].z, sums[group].w};
                        store(output, row_tile, group, four);
                    }
                }
                barrier_arrive(&shared.added[column_group][row_tile]);
            }
            col -= params.col_tiles;
        });
    }

    __device__ void run() const {
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (warp == 0) {
            for (int i = lane; i < Shape::STAGES; i += 32) {
                barrier_init(shared.weights_full + i, Format::EIGHT_BIT ? 1 : 2);
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
        launch_next_kernel();
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
                wait_for_previous_kernel();
                if constexpr (Format::EIGHT_BIT) {
                    copy_act_tiles();
                } else {
                    copy_units();
                }
            } else if (warp == Shape::COPY_SUMS) {
                wait_for_previous_kernel();
                if (!Format::EIGHT_BIT && lane == 0) copy_sums();
            }
        }
    }
};

template <class Format, class Shape>
__device__ inline void multiply(const LinearParams &params, const F16Quants &quants) {
    extern __shared__ __align__(128) uint8_t memory[];
    uint8_t *aligned = memory + ((1024 - shared_address(memory) % 1024) & 1023);
    int token_tiles = (params.tokens + Shape::TOKENS - 1) / Shape::TOKENS;
    int output_tiles = count_row_tile_groups<Shape::ROW_TILES>(params) * token_tiles;
    auto &shared = *reinterpret_cast<Shared<Format, Shape> *>(aligned);
    Kernel<Format, Shape>{params, quants, shared, token_tiles, output_tiles}.run();
}

}  // namespace wgmma_product

#endif
