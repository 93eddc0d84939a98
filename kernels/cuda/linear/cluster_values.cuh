// SPDX-License-Identifier: Apache-2.0

// The exchange of values between the SPLIT blocks of a cluster that divide the columns of an output
// tile. Block r computes the values of column tiles r, r + SPLIT, ... and adds up the values of the
// r-th part of the tokens. Sums are those of a single block: one thread adds an element's values in
// ascending order of columns.
//
//   round       0                 1                 2        column tiles 0 .. SPLIT-1, SPLIT ..
//   compute   | values 0        | values 1        | values 2
//   send        to their owners   to their owners   ...
//   add                         | values 0        | values 1   arrived while 1 was computed
//
// A warp exchanges values only with the warps of its own number in other blocks. They hold the
// same elements. Two buffers are enough: a warp adds round n - 1 before it sends round n. It has
// then seen round n - 1 of the other warps, and these had added round n - 2 before they sent it.
//
// Limit: the stores to other blocks, 0.45 us a round of 16 KB with two blocks on an H200. Tried:
// ordinary stores and one arrival per warp, which waits for them (0.95 us); four blocks, of which
// the device runs fewer at a time (twice the time of two for the same product).

#pragma once

#include "async_copy.cuh"

// GROUPS: groups of 8 tokens of an output tile; a thread has four elements of each.
template <int GROUPS, int SPLIT, int WARPS>
struct ClusterValues {
    static constexpr int OWN = GROUPS / SPLIT, BUFFERS = 2;
    static_assert(OWN * SPLIT == GROUPS);
    static constexpr uint32_t ARRIVING = (SPLIT - 1) * OWN * 32 * sizeof(float4);

    struct Buffers {
        // By round and by the number of blocks between this block and the sender, less one.
        float4 values[BUFFERS][SPLIT - 1][OWN][WARPS * 32];
        uint64_t full[BUFFERS][WARPS];
    };

    Buffers &buffers;
    int rank;
    uint32_t begun = 0, added = 0;
    float own[OWN][4];

    __device__ ClusterValues(Buffers &buffers, int rank) : buffers(buffers), rank(rank) {}

    // Called by one thread, before barrier_init_done.
    static __device__ void init(Buffers &buffers) {
        for (int buffer = 0; buffer < BUFFERS; buffer++)
            for (int warp = 0; warp < WARPS; warp++) barrier_init(&buffers.full[buffer][warp]);
    }

    // Waits until every thread of the cluster is here.
    static __device__ void wait_for_cluster() {
        asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
    }

    // Begins a round: all values of the round are sent next.
    __device__ void begin_round() {
        if (threadIdx.x % 32 == 0) barrier_expect(&buffers.full[begun % BUFFERS][threadIdx.x / 32], ARRIVING);
        begun++;
    }

    // Takes this thread's four values of a group.
    __device__ void send(int group, const float (&values)[4]) {
        int owner = group / OWN;
        if (owner == rank) {
#pragma unroll
            for (int i = 0; i < 4; i++) own[group % OWN][i] = values[i];
            return;
        }
        int buffer = (begun - 1) % BUFFERS, distance = (rank - owner + SPLIT) % SPLIT - 1;
        uint32_t to = shared_address(&buffers.values[buffer][distance][group % OWN][threadIdx.x]);
        uint32_t full = shared_address(&buffers.full[buffer][threadIdx.x / 32]);
        asm volatile(
            "{\n"
            ".reg .b32 to, full;\n"
            "mapa.shared::cluster.u32 to, %0, %6;\n"
            "mapa.shared::cluster.u32 full, %1, %6;\n"
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {%2, %3, %4, %5}, "
            "[full];\n"
            "}" ::"r"(to),
            "r"(full), "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]), "r"(owner)
            : "memory");
    }

    // A round of a block that has no column tile in it. The others wait for its values, and do not
    // add them.
    __device__ void send_nothing() {
        begin_round();
        float zeros[4] = {};
#pragma unroll
        for (int group = 0; group < GROUPS; group++) send(group, zeros);
    }

    // Waits for the values of the oldest round that has not been added, and adds those of the first
    // `senders` blocks.
    __device__ void add(float (&total)[4 * OWN], int senders) {
        int buffer = added % BUFFERS, warp = threadIdx.x / 32;
        cluster_barrier_wait(&buffers.full[buffer][warp], added / BUFFERS % 2);
        added++;
#pragma unroll
        for (int sender = 0; sender < SPLIT; sender++) {
            if (sender >= senders) break;
            int distance = (sender - rank + SPLIT) % SPLIT - 1;
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                float4 values = sender == rank ? make_float4(own[i][0], own[i][1], own[i][2], own[i][3])
                                               : buffers.values[buffer][distance][i][threadIdx.x];
                total[4 * i + 0] += values.x;
                total[4 * i + 1] += values.y;
                total[4 * i + 2] += values.z;
                total[4 * i + 3] += values.w;
            }
        }
    }
};

// A block alone has nothing to exchange.
template <int GROUPS, int WARPS>
struct ClusterValues<GROUPS, 1, WARPS> {
    struct Buffers {};
    __device__ ClusterValues(Buffers &, int) {}
    static __device__ void init(Buffers &) {}
    static __device__ void wait_for_cluster() { __syncthreads(); }
    __device__ void begin_round() {}
    __device__ void send_nothing() {}
    template <int N>
    __device__ void add(float (&)[N], int) {}
};
