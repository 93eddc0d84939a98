// SPDX-License-Identifier: Apache-2.0

// Attention for long runs of tokens on wgmma (sm_90a), for caches of two bytes. The bits are those
// of prefill.cuh: chains of wgmma over k16 steps give the sums of mma.m16n8k16. attention.cu has a
// drawing.
//
//   grid: (KV heads, query tiles)      queries, out: f32 [rows][heads][DIM]
//   block: PREFILL_WGMMA_GROUPS warpgroups of 64 (row, head) pairs each, and four warps that copy
//
// A warpgroup starts S of the next tile and then P V of this tile. During P V, it computes the
// softmax of the next tile.
//
// Limit: the chain of steps of one warpgroup. Clocks of a tile for heads of 64, read in the kernel
// (H200): start products 300, wait for S 100, softmax 800, stage and P V 120, rescale and round
// 170. P V holds its warps until the products before it have begun, because its A operand is in
// registers. Why the softmax takes 800 is not known: its exponentials need 270 (16 a clock).
//
// Tried, TFLOP/s of 2,048 tokens at 16,384 keys with heads of 128 (515 as it is):
//   the two warpgroups multiply in turn, by named barriers    493
//   P V before S, and merges during S                         478, in turn 491
//   no copies after four tiles (wrong results)                533: copies are not the limit
//   no exponentials (wrong results)                           550
//   S two tiles ahead                 ptxas waits after every wgmma (C7514); not measured

#pragma once

#include "wgmma_pairs.cuh"

namespace {

constexpr int WGMMA_PREFILL_THREADS = 128 * (PREFILL_WGMMA_GROUPS + 1);

}  // namespace

#if HAS_WGMMA

namespace {

namespace prefill_wgmma {

// A block.
template <class Mma, int DIM>
struct Block {
    Shared<DIM> &shared;
    const AttentionQueries &queries;
    const QueryTile query_tile;
    uint32_t kv_head;

    __device__ __forceinline__ int pairs() const { return query_tile.tokens * queries.group; }

    // Index of a pair's first value in queries and out.
    __device__ __forceinline__ size_t first_value(int pair) const {
        size_t row = query_tile.row + pair / queries.group;
        size_t head = kv_head * queries.group + pair % queries.group;
        return (row * queries.heads + head) * DIM;
    }

    // Stores the 64 queries of a warpgroup, scaled and rounded. Pairs that do not exist are zero.
    __device__ __forceinline__ void load_queries(int group) const {
        constexpr int VECTORS = DIM / 8;
        const float s = queries.scale;
        for (int index = threadIdx.x % 128; index < GROUP_PAIRS * VECTORS; index += 128) {
            const int row = index / VECTORS, vector = index % VECTORS, pair = group * GROUP_PAIRS + row;
            float4 a = make_float4(0.0f, 0.0f, 0.0f, 0.0f), b = a;
            if (pair < pairs()) {
                const float4 *from =
                    reinterpret_cast<const float4 *>(queries.values + first_value(pair) + vector * 8);
                a = from[0], b = from[1];
            }
            *reinterpret_cast<uint4 *>(shared.queries[group][0] + swizzled_offset(row, vector)) =
                make_uint4(Mma::pack(a.x * s, a.y * s), Mma::pack(a.z * s, a.w * s),
                           Mma::pack(b.x * s, b.y * s), Mma::pack(b.z * s, b.w * s));
        }
        publish_to_wgmma();
        asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
    }

    __device__ __forceinline__ const Stage<DIM> &wait(int tile) const {
        barrier_wait(shared.full + tile % STAGES, tile / STAGES % 2);
        return shared.stages[tile % STAGES];
    }

    __device__ __forceinline__ void release(int tile) const {
        if (threadIdx.x % 32 == 0) barrier_arrive(shared.empty + tile % STAGES);
    }

    // `warp` is equal in all lanes.
    __device__ __forceinline__ void multiply(int warp, float *out) const {
        const int group = warp / 4, first_pair = warp * 16 + threadIdx.x % 32 / 4;
        Pairs<Mma, DIM> state;
        state.clear();
        const uint32_t last = query_tile.position + query_tile.tokens - 1;
        const int first_tile = first_key(query_tile.position, queries.window) / TILE;
        const int tiles = last / TILE + 1 - first_tile;
        const int split_tiles = 1 << query_tile.split_shift;
        // The tiles of which every row sees every key: the last row sees the first key, and the
        // first row the last key.
        const int first_seen = int(first_key(last, queries.window) + TILE - 1) / TILE - first_tile,
                  end_seen = int(query_tile.position + 1) / TILE - first_tile;
        auto compute_weights = [&](int tile) {
            state.compute_weights(first_tile + tile, tile < first_seen || tile >= end_seen, queries.window);
        };
#pragma unroll
        for (int half = 0; half < 2; half++)
            state.position[half] = query_tile.position +
                                   min((first_pair + 8 * half) / queries.group, int(query_tile.tokens) - 1);
        load_queries(group);
        const uint64_t query_rows = operand_descriptor(shared.queries[group][0], ATOM_BYTES);

        begin_products(state.scores);
        state.start_scores(query_rows, wait(0));
        commit_products();
        wait_for_products(state.scores);
        compute_weights(0);
        state.round_weights();
        wait(min(1, tiles - 1));
        for (int tile = 0; tile + 1 < tiles; tile++) {
            const int next = tile + 1;
            const Stage<DIM> &next_stage = shared.stages[next % STAGES];
            begin_products(state.sums);
            begin_products(state.scores);
            state.start_scores(query_rows, next_stage);
            commit_products();
            state.start_values(shared.stages[tile % STAGES]);
            end_products(state.scores);
            const bool begins_split = ((first_tile + next) & (split_tiles - 1)) == 0;
            if (begins_split) state.begin_split();
            compute_weights(next);
            // The compiler moves the wait for P V to the begin of its basic block. This loop ends
            // the block of the softmax, so P V runs during the softmax.
            wait(min(next + 1, tiles - 1));
            state.wait_for_values();
            release(tile);
            if (begins_split)
                state.merge();
            else
                state.rescale();
            state.round_weights();
        }
        begin_products(state.sums);
        state.start_values(shared.stages[(tiles - 1) % STAGES]);
        commit_products();
        state.wait_for_values();
        state.begin_split();
        state.merge();
        store(state, first_pair, out);
    }

    __device__ __forceinline__ void store(const Pairs<Mma, DIM> &state, int first_pair, float *out) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int pair = first_pair + 8 * half;
            if (pair >= pairs()) continue;
            float *to = out + first_value(pair) + threadIdx.x % 4 * 2;
#pragma unroll
            for (int n = 0; n < DIM / 8; n++) {
                float a = __fdiv_rn(state.total_sums[4 * n + 2 * half], state.total_weights[half]);
                float b = __fdiv_rn(state.total_sums[4 * n + 2 * half + 1], state.total_weights[half]);
                *reinterpret_cast<float2 *>(to + n * 8) = make_float2(a, b);
            }
        }
    }
};

template <class Mma, int DIM>
__device__ __forceinline__ void attend(const KvLayerAddress &kv, const AttentionQueries &queries,
                                       const uint32_t *tables, const QueryTile *query_tiles,
                                       const uint32_t *query_tile_count, float *out) {
    extern __shared__ __align__(128) uint8_t memory[];
    static_assert(sizeof(Shared<DIM>) + ATOM_BYTES - 128 <= PREFILL_WGMMA_SHARED_BYTES);
    uint8_t *aligned = memory + (-shared_address(memory) & (ATOM_BYTES - 1));
    auto &shared = *reinterpret_cast<Shared<DIM> *>(aligned);

    const uint32_t count = *query_tile_count;
    if (blockIdx.y >= count) return;
    // Later query tiles of a sequence have more keys, so the first blocks take the last tiles.
    const QueryTile query_tile = query_tiles[count - 1 - blockIdx.y];
    // Equal in all lanes: the compiler then keeps descriptors in uniform registers.
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (threadIdx.x < STAGES) {
        barrier_init(shared.full + threadIdx.x, 128);
        barrier_init(shared.empty + threadIdx.x, 4 * GROUPS);
        barrier_init_done();
    }
    for (int index = threadIdx.x; index < STAGES * (UNIT_BYTES / 16); index += WGMMA_PREFILL_THREADS) {
        uint8_t *ones = shared.stages[index / (UNIT_BYTES / 16)].ones;
        *reinterpret_cast<uint4 *>(ones + index % (UNIT_BYTES / 16) * 16) =
            make_uint4(Mma::ONES, Mma::ONES, Mma::ONES, Mma::ONES);
    }
    publish_to_wgmma();
    __syncthreads();

    wait_for_previous_kernel();
    launch_next_kernel();
    if (warp < 4 * GROUPS) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLYING_REGISTERS));
        Block<Mma, DIM>{shared, queries, query_tile, blockIdx.x}.multiply(warp, out);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COPYING_REGISTERS));
        copy_tiles(shared, kv, tables + query_tile.table, blockIdx.x,
                   first_key(query_tile.position, queries.window),
                   query_tile.position + query_tile.tokens - 1);
    }
}

}  // namespace prefill_wgmma

}  // namespace

#define ATTEND_ON_WGMMA(MMA, DIM) \
    prefill_wgmma::attend<MMA, DIM>(kv, queries, tables, query_tiles, query_tile_count, out)
#else
// The launcher uses these kernels on sm_90a alone.
#define ATTEND_ON_WGMMA(MMA, DIM) __trap()
#endif

#define PREFILL_WGMMA_KERNEL(DIM, MMA)                                                                    \
    extern "C" __global__ void __launch_bounds__(WGMMA_PREFILL_THREADS, 1) attention_prefill_wgmma_##DIM( \
        const __grid_constant__ KvLayerAddress kv, const __grid_constant__ AttentionQueries queries,      \
        const uint32_t *tables, const QueryTile *query_tiles, const uint32_t *query_tile_count,           \
        float *out) {                                                                                     \
        ATTEND_ON_WGMMA(MMA, DIM);                                                                        \
    }                                                                                                     \
    CHECK_SIGNATURE(attention_prefill_wgmma_##DIM, AttentionPrefill);
