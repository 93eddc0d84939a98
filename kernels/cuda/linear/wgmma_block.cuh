// SPDX-License-Identifier: Apache-2.0

// What a block of wgmma_product.cuh consists of: its shape, its shared memory, and the rings in it.

#pragma once

#include "abi/linear.cuh"
#include "async_copy.cuh"
#include "column_turns.cuh"
#include "tile.cuh"
#include "value_exchange.cuh"
#include "wgmma.cuh"

#if HAS_WGMMA

namespace wgmma_product {

// The shape of a block.
template <int TOKENS_, int ROW_GROUPS_, int COLUMN_GROUPS_, int BLOCKS_, int STAGES_>
struct Shape {
    static constexpr int TOKENS = TOKENS_, ROW_GROUPS = ROW_GROUPS_, COLUMN_GROUPS = COLUMN_GROUPS_;
    // Blocks that compute an output tile together.
    static constexpr int BLOCKS = BLOCKS_;
    // Stages of 256 columns. At least one per column group, and some that are being filled.
    static constexpr int STAGES = STAGES_;
    static constexpr int ROWS = 64 * ROW_GROUPS, ROW_TILES = ROWS / TILE_ROWS;
    // Warps of a column group.
    static constexpr int GROUP_WARPS = 4 * ROW_GROUPS;
    static constexpr int MULTIPLYING_WARPS = GROUP_WARPS * COLUMN_GROUPS;
    // Registers move between whole warpgroups, so there are four warps more. They copy; with sums,
    // one has nothing to do.
    static constexpr int THREADS = 32 * (MULTIPLYING_WARPS + 4);
    // Groups of 8 tokens.
    static constexpr int GROUPS = TOKENS / ACT_TILE_TOKENS;
    // Those whose values a block adds.
    static constexpr int ADDED_GROUPS = GROUPS / BLOCKS;
    static_assert(GROUPS % BLOCKS == 0);
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

// What column groups need to add their values. One column group has its sums in registers.
template <class Shape, int COLUMN_GROUPS = Shape::COLUMN_GROUPS, int BLOCKS = Shape::BLOCKS>
struct SharedSums : ColumnSums<Shape> {};
template <class Shape>
struct SharedSums<Shape, 1, 1> {};
template <class Shape, int COLUMN_GROUPS>
struct SharedSums<Shape, COLUMN_GROUPS, 2> : ValueExchange<Shape> {};

// Shared memory, in this order. Units take what the other parts leave.
template <class Format, class Shape>
struct Shared {
    static constexpr int GROUPS = Shape::GROUPS, STAGES = Shape::STAGES;
    static constexpr int UNIT_STAGE = GROUPS * ACT_TILE_QUANT_BYTES;
    // F16 sums have the scales as well.
    static constexpr bool HAS_UNIT_SCALES = !Format::HAS_SUMS;
    // Warps that copy units, beside one for their scales if they have any. A warp starts copies one
    // after the other. Measured on an H200, 12,288 columns and 64 tokens, blocks of four column
    // groups: one warp for 16 copies a stage took 54 us instead of 44 (Q8_0), and 45 instead of 39
    // (Q6_K). With sums, two warps were 5 to 8% slower for 64 tokens of two blocks.
    static constexpr int UNIT_WARPS = HAS_UNIT_SCALES ? 2 : 1;
    static_assert(GROUPS % UNIT_WARPS == 0 && UNIT_WARPS <= 2);
    static constexpr int SCALES_BYTES = HAS_UNIT_SCALES ? GROUPS * scale_bytes(Format::ACTIVATION) : 16;
    static constexpr int SUMS_BYTES = Format::HAS_SUMS ? GROUPS * F16_SUMS_BYTES : 1;
    static constexpr int WEIGHT_BYTES = Shape::ROW_TILES * Format::TILE_BYTES;
    static constexpr int ALIGNMENT = 1024, BARRIERS = 1024;
    static constexpr int REST = STAGES * (WEIGHT_BYTES + SUMS_BYTES) + int(sizeof(SharedSums<Shape>));
    static constexpr int FITTING =
        (WGMMA_PRODUCT_SHARED_BYTES - ALIGNMENT - BARRIERS - REST) / (UNIT_STAGE + SCALES_BYTES);
    static constexpr int UNIT_STAGES = FITTING < STAGES ? FITTING : STAGES;
    static_assert(UNIT_STAGES > 1 && UNIT_STAGES >= Shape::COLUMN_GROUPS && STAGES > Shape::COLUMN_GROUPS);
    uint8_t units[UNIT_STAGES][UNIT_STAGE];
    uint8_t weights[STAGES][WEIGHT_BYTES];
    // Scales of the tokens, as in activation tiles, if HAS_UNIT_SCALES.
    uint8_t unit_scales[UNIT_STAGES][SCALES_BYTES];
    uint8_t sums[STAGES][SUMS_BYTES];
    SharedSums<Shape> column_sums;
    uint64_t weights_full[STAGES], weights_empty[STAGES];
    uint64_t units_full[UNIT_STAGES], units_empty[UNIT_STAGES];
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

    // By at most COUNT stages.
    __device__ void advance_by(int stages) {
        stage += stages;
        if (stage >= COUNT) stage -= COUNT, phase ^= 1;
    }
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
    SharedMemory &shared;
    RingPosition<SharedMemory::UNIT_STAGES> at = {};
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
    __device__ void skip(int stages) { at.advance_by(stages); }

    // Called when the products with the stage that was passed have ended.
    __device__ void release() {
        if (in_use >= 0) release_stage<SharedMemory::HAS_UNIT_SCALES>(shared.units_empty + in_use);
        in_use = -1;
    }
};

// 256 columns of a warp's 16 rows, and the sums of the block's tokens.
struct ColumnTile {
    const uint8_t *weights, *sums;
};

// Of a stage of units: columns 32 block to 32 block + 31, from token 8 group on.
__device__ __forceinline__ uint64_t eight_bit_operand(const uint8_t *unit, int block, int group = 0) {
    return operand_descriptor(unit + group * ACT_TILE_QUANT_BYTES + block / 4 * ACT_UNIT_BYTES,
                              ACT_TILE_QUANT_BYTES) +
           2 * (block % 4);
}

// A predicate, not a branch around the store.
__device__ __forceinline__ void store_if(bool condition, float *to, float value) {
    asm volatile(
        "{\n"
        ".reg .pred condition;\n"
        "setp.ne.b32 condition, %2, 0;\n"
        "@condition st.global.f32 [%0], %1;\n"
        "}" ::"l"(to),
        "f"(value), "r"(int(condition))
        : "memory");
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

}  // namespace wgmma_product

#endif
