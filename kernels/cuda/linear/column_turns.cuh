// SPDX-License-Identifier: Apache-2.0

// Adds the values of a block whose warpgroups divide the columns, for wgmma_product.cuh. Sums have
// one order, that of the columns, and are in shared memory. Column tiles, counted across output
// tiles, go to the warpgroups in turn. A warp adds the values of its column tile after the warp of
// the same rows in the group before. So groups are out of step, and one multiplies while another
// one computes values.

#pragma once

#include "async_copy.cuh"
#include "tile.cuh"

template <class Shape>
struct ColumnSums {
    static constexpr int COLUMN_GROUPS = Shape::COLUMN_GROUPS, WARPS = Shape::GROUP_WARPS;

    static_assert(COLUMN_GROUPS * WARPS <= 32);
    // Sums of the output tile, four of a thread and a group of 8 tokens.
    alignas(16) float4 sums[Shape::GROUPS][32 * WARPS];
    // A warp of a column group has added the values of its last column tile.
    uint64_t added[COLUMN_GROUPS][WARPS];

    // All lanes of one warp call it.
    __device__ void init_barriers() {
        const int at = threadIdx.x % 32;
        if (at < COLUMN_GROUPS * WARPS) barrier_init(&added[0][at], 32);
    }
};

// A warp's part.
template <class Shape>
struct WarpInTurn {
    static constexpr int GROUPS = Shape::GROUPS, COLUMN_GROUPS = Shape::COLUMN_GROUPS;

    ColumnSums<Shape> &shared;
    const int column_group, row_tile;
    const int group_before = (column_group + COLUMN_GROUPS - 1) % COLUMN_GROUPS;
    // The group before has added once more than this one, except for the first group.
    int phase = column_group == 0 ? 1 : 0;

    // Adds the values of column tile `col` of `col_tiles`. Calls `store(sums)` if it is the last
    // one.
    template <class Store>
    __device__ void add(const float (&values)[Shape::VALUES], int col, int col_tiles, Store store) {
        const int thread = threadIdx.x % (32 * Shape::GROUP_WARPS);
        const bool is_last = col + 1 == col_tiles;
        float sums[Shape::VALUES];
        barrier_wait(&shared.added[group_before][row_tile], phase);
        phase ^= 1;
        // All loads come before the first store.
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            const float4 four = col == 0 ? make_float4(0, 0, 0, 0) : shared.sums[group][thread];
            sums[4 * group] = four.x, sums[4 * group + 1] = four.y;
            sums[4 * group + 2] = four.z, sums[4 * group + 3] = four.w;
        }
#pragma unroll
        for (int i = 0; i < Shape::VALUES; i++) sums[i] += values[i];
        if (!is_last)
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                const float *four = sums + 4 * group;
                shared.sums[group][thread] = make_float4(four[0], four[1], four[2], four[3]);
            }
        // Before an output tile is stored, which takes longer than a turn.
        barrier_arrive(&shared.added[column_group][row_tile]);
        if (is_last) store(sums);
    }
};
