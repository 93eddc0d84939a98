// SPDX-License-Identifier: Apache-2.0

// How the warps of a block compute products of few tokens, for skinny_matmul.cuh,
// experts/skinny_matmul.cuh and experts/fused.cuh. A block has a run of weight tiles (tile.cuh),
// row tile by row tile. A warp computes the values of one weight tile at a time: 16 rows by 256
// columns by 8 NT tokens.
//
//      weight tiles of a block
//   +---------+---------+---------+---------+
//   | 16 rows | x 256   | ...     |         | row tile 0    a stage: TILES successive weight tiles
//   +---------+---------+---------+---------+               a round: a weight tile for each of the
//   | ...     |         |         |         | row tile 1             WARPS multiplying warps
//   +---------+---------+---------+---------+
//
//   Warps are specialised:
//     copying warp       stage 0 | stage 1 | stage 2 | ...     weights, ahead of the others
//     multiplying warps            round 0         | round 1   values of 256 columns -> buffer
//     adding warps                                 | round 0   buffer -> sums by ascending columns
//
//   barriers                completes when
//     full[stage]           the copies of the stage have arrived
//     empty[stage]          the warps have used its tiles
//     values_full[buffer]   the warps have stored the values of a round
//     values_empty[buffer]  the adding warps have loaded them
//     act_full[i]           activations have arrived; which ones is the kernel's matter
//
// So no barrier stops all warps, and a multiplying warp may be up to two rounds ahead of others of
// its kind. The order of sums is that of matmul.cuh.

#pragma once

#include "async_copy.cuh"
#include "tile.cuh"

#include "abi/linear.cuh"

namespace skinny {

// Warps that multiply. The next ones add, each an element of all C fragments, and the last one
// copies. One adding warp would take longer for a round than the others.
constexpr int WARPS = SKINNY_WARPS, ADDING_WARPS = SKINNY_ADDING_WARPS, COPYING_WARP = WARPS + ADDING_WARPS;
constexpr int THREADS = 32 * (COPYING_WARP + 1);
static_assert(ADDING_WARPS == 4);
// Weight tiles of a stage. Copies of fewer bytes take longer for each byte.
constexpr int TILES = SKINNY_STAGE_TILES;
static_assert(WARPS % TILES == 0);
constexpr int BUFFERS = SKINNY_VALUE_BUFFERS;
// Stages of a round. The ring has whole rounds, so that a stage is always used by the same warps.
// Otherwise a warp that is ahead of others would take an earlier phase of `full` for its own.
constexpr int ROUND_STAGES = WARPS / TILES;
// Stages of weights that are copied before the activations are, which wait for the copies before
// them. With two, eight streams of qwen3-8b Q8_0 decode 2.3% slower (H200).
constexpr int EARLY_STAGES = ROUND_STAGES;

// The row tiles of a block.
struct Run {
    int first, count;
};

__device__ inline Run divide(int row_tiles, int block, int blocks) {
    const int each = row_tiles / blocks, more = row_tiles % blocks;
    return {block * each + min(block, more), each + (block < more ? 1 : 0)};
}

// Where a copying warp is: `left` successive weight tiles are at `from`, and `copied` of the block
// have been copied.
struct WeightCursor {
    int left, copied;
    const uint8_t *from;
};

// Where a multiplying warp is in the ring and in the buffers of values, and where an adding warp is
// in the latter.
struct MultiplyingPlace {
    int stage, phase = 0, buffer = 0, buffer_phase = 1;

    __device__ MultiplyingPlace(int warp) : stage(warp / TILES) {}
};
struct AddingPlace {
    int buffer = 0, phase = 0;
};

// A stage of the ring takes STAGE_BYTES.
template <class Format, int NT, int STAGE_BYTES = TILES * Format::TILE_BYTES>
struct Pipeline {
    static constexpr int TILE_BYTES = Format::TILE_BYTES;
    static constexpr int ACT_TILE_BYTES = act_tile_bytes(Format::ACTIVATION);
    // Values of a weight tile: elements of C fragments (mma.cuh), [NT][4 elements][32 lanes].
    static constexpr int TILE_VALUES = 128 * NT;

    const int stages, col_tiles;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint8_t *ring, *act_tiles;
    float *values;
    uint64_t *full, *empty, *values_full, *values_empty, *act_full;
    // The weight tiles of the block.
    int tiles = 0;

    __device__ Pipeline(int stages, int col_tiles, int act_bytes, uint8_t *shared)
        : stages(stages), col_tiles(col_tiles), ring(shared) {
        act_tiles = ring + stages * STAGE_BYTES;
        values = reinterpret_cast<float *>(act_tiles + act_bytes);
        full = reinterpret_cast<uint64_t *>(values + BUFFERS * WARPS * TILE_VALUES);
        empty = full + stages, values_full = empty + stages, values_empty = values_full + BUFFERS,
        act_full = values_empty + BUFFERS;
    }

    // Each warp initialises some of the barriers.
    __device__ void init_barriers(int act_barriers) const {
        int barriers = 2 * stages + 2 * BUFFERS + act_barriers;
#pragma unroll 1
        for (int at = warp; at < barriers; at += COPYING_WARP + 1) {
            uint64_t *barrier = full + at;
            int warps_arriving = barrier < values_full    ? TILES
                                 : barrier < values_empty ? WARPS
                                                          : ADDING_WARPS;
            int arrivals = barrier < empty || barrier >= act_full ? 1 : 32 * warps_arriving;
            barrier_init(barrier, arrivals);
        }
        barrier_init_done();
    }

    // Copies the next weight tiles to a stage. `go_on()` moves the cursor to further ones, when
    // none are left where it is.
    template <class GoOn>
    __device__ void copy_stage(WeightCursor &cursor, int stage, GoOn go_on) const {
        int count = min(TILES, tiles - cursor.copied);
        uint8_t *to = ring + stage * STAGE_BYTES;
        barrier_expect(full + stage, count * TILE_BYTES);
        cursor.copied += count;
        while (count > 0) {
            while (cursor.left == 0) go_on();
            int part = min(count, cursor.left);
            bulk_copy(to, cursor.from, part * TILE_BYTES, full + stage);
            to += part * TILE_BYTES, cursor.from += part * TILE_BYTES;
            count -= part, cursor.left -= part;
        }
    }

    // `wait_act_tile(at, col)` waits for the activations of weight tile `at`, which has column tile
    // `col` and has arrived. It returns the number of their tile. Those of 8 more tokens are
    // `act_pitch` bytes behind. After whole rounds, another product may go on at `place`.
    template <class WaitActTile>
    __device__ void multiply(MultiplyingPlace &place, int act_pitch, WaitActTile wait_act_tile) const {
        auto &[stage, phase, buffer, buffer_phase] = place;
        int col = warp % col_tiles;
        const int ring_offset = warp % TILES * TILE_BYTES;
        float *own = values + warp * TILE_VALUES + lane;
        for (int at = warp; at - warp < tiles; at += WARPS) {
            bool has_tile = at < tiles;
            float value[NT][4];
            if (has_tile) {
                barrier_wait(full + stage, phase);
                const int act_tile = wait_act_tile(at, col);
                Format::template products<1, NT>(ring + stage * STAGE_BYTES + ring_offset, TILE_BYTES,
                                                 act_tiles + act_tile * ACT_TILE_BYTES, act_pitch,
                                                 [&](int, int nt, int i, float v) { value[nt][i] = v; });
            }
            // Also without a tile: an arrival must not count for the round before.
            barrier_wait(values_empty + buffer, buffer_phase);
            if (has_tile) {
                float *to = own + buffer * WARPS * TILE_VALUES;
#pragma unroll
                for (int nt = 0; nt < NT; nt++)
#pragma unroll
                    for (int i = 0; i < 4; i++) to[(nt * 4 + i) * 32] = value[nt][i];
            }
            barrier_arrive(values_full + buffer);
            if (has_tile) barrier_arrive(empty + stage);
            for (col += WARPS; col >= col_tiles;) col -= col_tiles;
            if ((stage += ROUND_STAGES) >= stages) stage -= stages, phase ^= 1;
            if (++buffer == BUFFERS) buffer = 0, buffer_phase ^= 1;
        }
    }

    // The row of a row tile, and the token of each 8, whose sum a lane of an adding warp has.
    __device__ int lane_row() const { return lane / 4 + (warp - WARPS) / 2 * 8; }
    __device__ int lane_token() const { return lane % 4 * 2 + (warp - WARPS) % 2; }

    // `output.store(sums)` takes the sums of row tile after row tile, `output.end_round()` comes
    // after those that end in a round. If `Output::STORES_ANY_TILE`, a store is so little code that
    // one may be behind each tile.
    template <class Output>
    __device__ void add(AddingPlace &place, Output &output) const {
        auto &[buffer, phase] = place;
        float sums[NT] = {};
        int col = 0;
        auto end_row_tile = [&] {
            output.store(sums);
            col = 0;
#pragma unroll
            for (int nt = 0; nt < NT; nt++) sums[nt] = 0;
        };
        // Tiles of which the last one alone may end a row tile. Each store is code, which the
        // multiprocessor has to fetch: one for each tile would be most of the kernel.
        constexpr int STEP = 4;
        static_assert(WARPS % STEP == 0);
        const bool has_steps = col_tiles % STEP == 0;
        for (int round = 0; round < tiles; round += WARPS) {
            barrier_wait(values_full + buffer, phase);
            const float *from = values + buffer * WARPS * TILE_VALUES + (warp - WARPS) * 32 + lane;
            // Whole rounds, with all loads first: the buffer is free early.
            if ((has_steps || Output::STORES_ANY_TILE) && round + WARPS <= tiles) {
                float loaded[WARPS][NT];
#pragma unroll
                for (int j = 0; j < WARPS; j++)
#pragma unroll
                    for (int nt = 0; nt < NT; nt++) loaded[j][nt] = from[j * TILE_VALUES + nt * 128];
                barrier_arrive(values_empty + buffer);
                if (has_steps) {
#pragma unroll
                    for (int step = 0; step < WARPS; step += STEP) {
#pragma unroll
                        for (int j = 0; j < STEP; j++)
#pragma unroll
                            for (int nt = 0; nt < NT; nt++) sums[nt] += loaded[step + j][nt];
                        if ((col += STEP) == col_tiles) end_row_tile();
                    }
                } else {
#pragma unroll
                    for (int j = 0; j < WARPS; j++) {
#pragma unroll
                        for (int nt = 0; nt < NT; nt++) sums[nt] += loaded[j][nt];
                        if (++col == col_tiles) end_row_tile();
                    }
                }
            } else {
                const int count = min(WARPS, tiles - round);
                float next[NT];
#pragma unroll
                for (int nt = 0; nt < NT; nt++) next[nt] = from[nt * 128];
#pragma unroll 1
                for (int j = 0; j < count; j++) {
                    // Behind the last tile are old values, which are not added.
                    from += j + 1 < WARPS ? TILE_VALUES : 0;
#pragma unroll
                    for (int nt = 0; nt < NT; nt++) sums[nt] += next[nt], next[nt] = from[nt * 128];
                    if (++col == col_tiles) end_row_tile();
                }
                barrier_arrive(values_empty + buffer);
            }
            output.end_round();
            if (++buffer == BUFFERS) buffer = 0, phase ^= 1;
        }
    }
};

}  // namespace skinny
