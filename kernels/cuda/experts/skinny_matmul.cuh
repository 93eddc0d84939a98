// SPDX-License-Identifier: Apache-2.0

// out[slot] = matrix of the slot's expert times the activations of the slot, for groups of up to 8
// slots. linear/skinny_pipeline.cuh has the work of the warps; products and sums are those of
// linear/matmul.cuh, bit for bit.
//
//   row tiles of all groups         | group 0: gate | up | group 1: gate | up | ...
//   are divided among the blocks    |    block 0    |   block 1   |   block 2   |
//
// The weight tiles of a group's stack lie one after the other. Shared memory holds the activation
// tiles of two groups: act_full[i] completes when those of group i, i + 2, ... of the block have
// arrived. A group has at least as many weight tiles as the ring. So when the copying warp begins
// the next group but one, the stages of a group have been used, and with them its activations.
//
// Routing had ended before the previous kernel let this one start: that kernel, or the one before
// it, had waited for routing first. So the first stages of weights are copied before the previous
// kernel has ended.
//
// Limit: weight bytes over memory bandwidth (an H200 copies at 4.3 TB/s). Measured there, 8 experts
// of 128 a row, with groups of 8 slots in matmul.cuh before; us, and TB/s of weights:
//
//                        gate and up, 2048 x 768                down, 768 x 2048
//              2 rows        8 rows        64 rows        8 rows         64 rows
//   Q4_K    12.9 ->  9.6  29.2 -> 24.8  61.5 -> 58.4  15.6 -> 15.1  34.0 -> 33.6
//           2.2      2.9  3.2      3.7  3.6      3.8  2.9      3.0  3.3      3.3
//   Q6_K    17.7 -> 12.3  41.4 -> 34.4  87.9 -> 81.4  21.6 -> 19.5  46.5 -> 43.9
//           2.3      3.3  3.2      3.9  3.7      4.0  3.1      3.4  3.5      3.7

#pragma once

#include "../linear/skinny_pipeline.cuh"
#include "abi/experts.cuh"

namespace expert_skinny {

using skinny::COPYING_WARP, skinny::EARLY_STAGES, skinny::THREADS, skinny::TILES, skinny::WARPS;

// Groups whose activations are in shared memory.
constexpr int ACT_GROUPS = EXPERT_SKINNY_ACT_GROUPS;
static_assert(ACT_GROUPS == 2);

template <class Format>
struct Matmul {
    static constexpr int TILE_BYTES = Format::TILE_BYTES, STAGE_BYTES = TILES * TILE_BYTES;
    static constexpr int ACT_TILE_BYTES = act_tile_bytes(Format::ACTIVATION);

    const ExpertSkinnyParams &params;
    skinny::Pipeline<Format, 1> pipeline;
    const int col_tiles, row_tiles, group_row_tiles;
    // The number of groups. The block's first row tile, counted over all groups.
    int groups = 0, first_row_tile = 0;

    __device__ Matmul(const ExpertSkinnyParams &params, uint8_t *shared)
        : params(params),
          pipeline(params.stages, params.common.col_tiles,
                   ACT_GROUPS * params.common.col_tiles * ACT_TILE_BYTES, shared),
          col_tiles(params.common.col_tiles),
          row_tiles(params.common.rows / TILE_ROWS),
          group_row_tiles(row_tiles * params.stacks) {}

    // Past the first-level cache, which might have what was there before, if the kernel reads
    // before it waits.
    __device__ void find_run() {
        groups = int(__ldcg(params.common.group_count));
        const skinny::Run run = skinny::divide(groups * group_row_tiles, blockIdx.x, gridDim.x);
        first_row_tile = run.first;
        pipeline.tiles = run.count * col_tiles;
    }

    __device__ ExpertGroup read_group(int group) const {
        if (group >= groups) return {};
        const ExpertGroup *from = params.common.groups + group;
        return {__ldcg(&from->expert), __ldcg(&from->first), __ldcg(&from->pairs)};
    }

    // Tiles that are left are those of a group's stack.
    struct Cursor : skinny::WeightCursor {
        int index, stack;
        // The group with this index, and the one behind it.
        ExpertGroup group, next;
        // Groups of the block that were begun, and those whose activations were copied.
        int begun, acts;
    };

    __device__ void begin_stack(Cursor &cursor, int first) const {
        const size_t row_tile = size_t(cursor.group.expert) * row_tiles + first;
        cursor.from = params.common.weights[cursor.stack] + row_tile * col_tiles * TILE_BYTES;
        cursor.left = (row_tiles - first) * col_tiles;
    }

    __device__ Cursor begin() const {
        const int row_tile = first_row_tile % group_row_tiles;
        Cursor cursor = {};
        cursor.index = first_row_tile / group_row_tiles, cursor.stack = row_tile / row_tiles,
        cursor.begun = 1;
        cursor.group = read_group(cursor.index), cursor.next = read_group(cursor.index + 1);
        begin_stack(cursor, row_tile % row_tiles);
        return cursor;
    }

    __device__ void copy_stage(Cursor &cursor, int stage) const {
        pipeline.copy_stage(cursor, stage, [&] {
            if (++cursor.stack == params.stacks) {
                cursor.stack = 0, cursor.begun++;
                cursor.group = cursor.next, cursor.next = read_group(++cursor.index + 1);
            }
            begin_stack(cursor, 0);
        });
    }

    // Copies the activations of the next group, which begin with those of slot `first`.
    __device__ void copy_acts(Cursor &cursor, uint32_t first) const {
        const int at = cursor.acts++ % ACT_GROUPS;
        const uint32_t bytes = col_tiles * ACT_TILE_BYTES;
        barrier_expect(pipeline.act_full + at, bytes);
        bulk_copy(pipeline.act_tiles + at * bytes,
                  params.common.act_tiles + size_t(first / ACT_TILE_TOKENS) * bytes, bytes,
                  pipeline.act_full + at);
    }

    // The copying lane. The first stages have weight tiles of at most two groups.
    __device__ void copy() {
        find_run();
        const int tiles = pipeline.tiles;
        Cursor cursor = begin();
        const uint32_t first = cursor.group.first;
        int stage = 0, phase = 1;
#pragma unroll 1
        for (; stage < EARLY_STAGES && cursor.copied < tiles; stage++) copy_stage(cursor, stage);
        wait_for_previous_kernel();
        launch_next_kernel();
        if (tiles == 0) return;
        copy_acts(cursor, first);
        for (;;) {
            if (cursor.acts < cursor.begun) copy_acts(cursor, cursor.group.first);
            if (cursor.copied == tiles) return;
            if (stage == pipeline.stages) stage = 0, phase ^= 1;
            barrier_wait(pipeline.empty + stage, phase);
            copy_stage(cursor, stage++);
        }
    }

    // A warp may have no tile of the block's first group, and so skip a phase of act_full[0]. When
    // it waits for the next phase, that of the third group, a weight tile of the third group has
    // arrived. So the stages of the first group have been used, and its phase is complete.
    __device__ void multiply() const {
        const int group_tiles = group_row_tiles * col_tiles;
        // The end of the group, and where its activations are.
        int end = group_tiles - first_row_tile % group_row_tiles * col_tiles, slot = 0, phase = 0;
        skinny::MultiplyingPlace place(pipeline.warp);
        pipeline.multiply(place, 0, [&](int at, int col) {
            while (at >= end) {
                end += group_tiles;
                if (++slot == ACT_GROUPS) slot = 0, phase ^= 1;
            }
            barrier_wait(pipeline.act_full + slot, phase);
            return slot * col_tiles + col;
        });
    }

    // Where a lane of an adding warp stores its value of the next row tile, and where it goes on
    // when the `left` row tiles of the stack are done. A stack has at least as many weight tiles as
    // a round, so a round ends at most one of them.
    struct Output {
        static constexpr bool STORES_ANY_TILE = true;
        const Matmul &matmul;
        int index, stack, left;
        float *to, *next_to;
        bool has_slot, next_has_slot;
        ExpertGroup group, next;

        __device__ void store(const float (&sums)[1]) {
            if (has_slot) *to = sums[0];
            const bool ends = --left == 0;
            to = ends ? next_to : to + TILE_ROWS, has_slot = ends ? next_has_slot : has_slot;
        }

        __device__ void end_round() {
            if (left > 0) return;
            left += matmul.row_tiles;
            find_next();
        }

        // The stack behind the one of `index` and `stack`, which becomes the one at hand.
        __device__ void find_next() {
            if (++stack == matmul.params.stacks) {
                stack = 0, index++;
                group = next, next = matmul.read_group(index + 1);
            }
            next_has_slot = matmul.find_output(group, stack, next_to);
        }
    };

    // Finds where the lane's value of the first row tile goes. Returns false if its slot has no
    // pair.
    __device__ bool find_output(const ExpertGroup &group, int stack, float *&to) const {
        if (pipeline.lane_token() >= int(group.pairs)) return false;
        const uint32_t slot = group.first + pipeline.lane_token();
        const uint32_t row = params.common.sorted_pairs == nullptr ? slot : params.common.sorted_pairs[slot];
        to = params.common.out[stack] + size_t(row) * params.common.rows + pipeline.lane_row();
        return true;
    }

    __device__ void add() const {
        const int row_tile = first_row_tile % row_tiles;
        const int index = first_row_tile / group_row_tiles,
                  stack = first_row_tile % group_row_tiles / row_tiles;
        Output output{*this, index, stack, row_tiles - row_tile};
        output.group = read_group(output.index), output.next = read_group(output.index + 1);
        output.has_slot = find_output(output.group, output.stack, output.to);
        if (output.has_slot) output.to += row_tile * TILE_ROWS;
        output.find_next();
        skinny::AddingPlace place;
        pipeline.add(place, output);
    }

    __device__ void run() {
        if (pipeline.lane == 0) pipeline.init_barriers(ACT_GROUPS);
        __syncthreads();
        if (pipeline.warp == COPYING_WARP) {
            // The other lanes must not wait for the previous kernel while this one starts copies.
            if (pipeline.lane == 0) copy();
            return;
        }
        wait_for_previous_kernel();
        launch_next_kernel();
        find_run();
        if (pipeline.warp < WARPS)
            multiply();
        else
            add();
    }
};

template <class Format>
__device__ void multiply(const ExpertSkinnyParams &params) {
    extern __shared__ __align__(128) uint8_t shared[];
    Matmul<Format>(params, shared).run();
}

}  // namespace expert_skinny
