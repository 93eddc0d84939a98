// SPDX-License-Identifier: Apache-2.0

// Two blocks of a cluster compute output tiles together, for wgmma_product.cuh. In each step, block
// 0 computes the values of an even column tile, and block 1 those of the odd one behind it. Steps
// are counted across output tiles. Sums have one order, that of the columns. So each block adds the
// values of half of the tokens, its own and those that the other one sends:
//
//                         step 0   step 1   step 2   step 3   step 4   ...
//   block 0, column tile  0        2        4        6        8
//   block 1, column tile  1        3        5        7        9
//   warpgroup of both     0        1        2        3        0
//
//   values of a step    tokens of the other block -> inbox in that block
//                       tokens of this block      -> own
//   a step later        sums + inbox and own, in the order of the columns -> sums
//
// The warpgroup of the next step adds, in its turn. So the values of the other block have a step's
// time to arrive.
//
// An odd number of column tiles has a last step with one of them. Block 1 computes the same one,
// and its values are not added.
//
//   barriers, one for each warp of a warpgroup, complete when
//     arrived[group]    the values that the other block's warpgroup has sent are in the inbox
//     loaded[group]     the other block has loaded what this warpgroup sent; it may send again
//     added[group]      this warpgroup has added
//
// A block may end while the other one works: it has waited for all values and arrivals from there.
// Behind a warpgroup's last step, no arrival at `loaded` follows, since nothing more is sent.
//
// PTX does not promise two parts of the order that this needs: that values are seen after a wait at
// `arrived`, which acquires for the block and not for the cluster; and that they have been loaded
// before the arrival at `loaded`, which is relaxed. A release and an acquire for the cluster become
// a wait for stores to global memory, and emptying of the first-level cache.

#pragma once

#include "../cluster.cuh"
#include "../stream_order.cuh"
#include "async_copy.cuh"
#include "tile.cuh"

template <class Shape>
struct ValueExchange {
    static constexpr int COLUMN_GROUPS = Shape::COLUMN_GROUPS, WARPS = Shape::GROUP_WARPS;
    static constexpr int ADDED_GROUPS = Shape::ADDED_GROUPS, THREADS = 32 * WARPS;
    static_assert(Shape::BLOCKS == 2 && COLUMN_GROUPS * WARPS <= 32);
    // Four values of each thread for a group of 8 tokens, elements of its C fragment.
    using Values = float4[ADDED_GROUPS][THREADS];

    // `own` has values of the step before, for the tokens that this block adds.
    alignas(16) Values sums, own;
    alignas(16) Values inbox[COLUMN_GROUPS];
    uint64_t arrived[COLUMN_GROUPS][WARPS], loaded[COLUMN_GROUPS][WARPS], added[COLUMN_GROUPS][WARPS];

    // All lanes of one warp call it, before this block arrives at the barrier of the cluster.
    __device__ void init_barriers() {
        const int at = threadIdx.x % 32;
        const bool has_barriers = at < COLUMN_GROUPS * WARPS;
        if (has_barriers) {
            barrier_init(&arrived[0][at]);
            barrier_init(&loaded[0][at]);
            barrier_init(&added[0][at], 32);
        }
        // For racecheck: the lanes initialise one after the other.
        __syncwarp();
        if (has_barriers) expect_values(&arrived[0][at]);
    }

    // The barrier will count the bytes that a warp receives in a step.
    __device__ void expect_values(uint64_t *barrier) {
        barrier_expect(barrier, ADDED_GROUPS * 32 * sizeof(float4));
    }
};

// A step of an output tile: whether it is the first or the last one, and has two column tiles.
struct Step {
    bool is_first, is_last, has_both;
};

// A warp's part.
template <class Shape>
struct ExchangingWarp {
    using Exchange = ValueExchange<Shape>;
    static constexpr int ADDED_GROUPS = Shape::ADDED_GROUPS, COLUMN_GROUPS = Shape::COLUMN_GROUPS;

    Exchange &shared;
    const int rank, column_group, row_tile;
    // Steps of all output tiles, from this column group's next one on.
    int steps_left;
    const int thread = threadIdx.x % Exchange::THREADS;
    const int group_before = (column_group + COLUMN_GROUPS - 1) % COLUMN_GROUPS;
    // Phases: of `loaded`, and of `added` and `arrived` of the group before. That group has had one
    // step more than this one, except for the first group.
    int send_phase = 1, turn_phase = column_group == 0 ? 1 : 0;
    bool is_first_step = column_group == 0;

    // Sends the second half of the values to the other block.
    __device__ void send(const float (&values)[Shape::VALUES]) {
        barrier_wait(&shared.loaded[column_group][row_tile], send_phase);
        send_phase ^= 1;
        const uint32_t to = address_in_block(1 - rank, &shared.inbox[column_group][0][thread]);
        const uint32_t barrier = address_in_block(1 - rank, &shared.arrived[column_group][row_tile]);
        delay_at_random();
#pragma unroll
        for (int group = 0; group < ADDED_GROUPS; group++)
            store_async(to + group * sizeof(shared.inbox[0][0]), four(values, ADDED_GROUPS + group), barrier);
    }

    // In this step's turn, adds the values of the step before, if there is one, and keeps the first
    // half of `values` for the next turn. Calls `store(sums)` if the step before was the last one
    // of an output tile.
    template <class Store>
    __device__ void take_turn(const Step &step_before, const float (&values)[Shape::VALUES], Store store) {
        float sums[4 * ADDED_GROUPS];
        barrier_wait(&shared.added[group_before][row_tile], turn_phase);
        if (!is_first_step) add_step_before(step_before, sums);
#pragma unroll
        for (int group = 0; group < ADDED_GROUPS; group++) shared.own[group][thread] = four(values, group);
        // Before an output tile is stored, which takes longer than a turn.
        barrier_arrive(&shared.added[column_group][row_tile]);
        if (!is_first_step && step_before.is_last) store(sums);
        is_first_step = false;
        turn_phase ^= 1;
        steps_left -= COLUMN_GROUPS;
    }

    // Adds the last step of all, if this column group would have the next one.
    template <class Store>
    __device__ void end(const Step &last, Store store) {
        if (steps_left != 0) return;
        float sums[4 * ADDED_GROUPS];
        barrier_wait(&shared.added[group_before][row_tile], turn_phase);
        add_step_before(last, sums);
        store(sums);
    }

private:
    __device__ void add_step_before(const Step &step, float (&sums)[4 * ADDED_GROUPS]) {
        uint64_t *arrived = &shared.arrived[group_before][row_tile];
        barrier_wait(arrived, turn_phase);
        // Before the other block knows that it may send again.
        if (thread % 32 == 0) shared.expect_values(arrived);
        auto &inbox = shared.inbox[group_before];
        auto &first = rank == 0 ? shared.own : inbox, &second = rank == 0 ? inbox : shared.own;
        delay_at_random();
        // All loads come before the first store.
        float4 a[ADDED_GROUPS], b[ADDED_GROUPS], all[ADDED_GROUPS];
#pragma unroll
        for (int group = 0; group < ADDED_GROUPS; group++) {
            all[group] = step.is_first ? make_float4(0, 0, 0, 0) : shared.sums[group][thread];
            a[group] = first[group][thread], b[group] = second[group][thread];
        }
#pragma unroll
        for (int group = 0; group < ADDED_GROUPS; group++) {
            add(all[group], a[group]);
            if (step.has_both) add(all[group], b[group]);
            sums[4 * group] = all[group].x, sums[4 * group + 1] = all[group].y;
            sums[4 * group + 2] = all[group].z, sums[4 * group + 3] = all[group].w;
        }
        if (!step.is_last)
#pragma unroll
            for (int group = 0; group < ADDED_GROUPS; group++) shared.sums[group][thread] = all[group];
        else
            end_loads_before_copy();
        // Loads have ended: sums of them were stored, or the fence waited. COLUMN_GROUPS steps
        // later, the other block sends to the same place.
        __syncwarp();
        delay_at_random();
        if (steps_left >= COLUMN_GROUPS && thread % 32 == 0)
            arrive_in_block(address_in_block(1 - rank, &shared.loaded[group_before][row_tile]));
    }

    static __device__ float4 four(const float (&values)[Shape::VALUES], int group) {
        const float *from = values + 4 * group;
        return make_float4(from[0], from[1], from[2], from[3]);
    }
    static __device__ void add(float4 &sums, float4 values) {
        sums.x += values.x, sums.y += values.y, sums.z += values.z, sums.w += values.w;
    }
};
