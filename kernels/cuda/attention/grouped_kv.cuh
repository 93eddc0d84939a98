// SPDX-License-Identifier: Apache-2.0

// Attention for few decode rows. A block computes all splits of one row and KV head, as
// attention_merged_kv does, but four at a time: four groups of four warps have a split each. With
// more rows, a block has two groups, and two blocks share a multiprocessor. If a row has more than
// four splits, a cluster of blocks may have them. With two blocks:
//
//             block 0                       block 1
//   group 0 | split 0 | split 8  |       | split 4 | split 12 |    a split is one tile of 64 keys
//   group 1 | split 1 | split 9  |       | split 5 | ...           if the block prepares its heads
//   group 2 | split 2 | split 10 |       | split 6 |               (raw_heads.cuh), copies of the
//   group 3 | split 3 | split 11 |       | split 7 |               first tiles start before the
//                     ^ round ends                                 previous kernel has ended
//
//   at the end of a round, in shared memory:
//     largest scores and sums of weights     each group stores them in all blocks
//     sums, a tile of 256 columns after      the block whose turn it is loads them from all blocks,
//     the other                              and merges splits in order
//
// So no kernel has to merge afterwards, which takes some 3 us more on an H200.
//
//   grid: (KV heads times blocks of a cluster, entries of the plan)
//   shared memory: a stage for each group | query rows | weights for each group | results for each
//   group, [query heads of the KV head][DIM] f32

#pragma once

#include "kv_pipeline.cuh"
#include "raw_heads.cuh"
#include "row_blocks.cuh"
#include "split_results.cuh"
#include "split_tiles.cuh"

namespace {

// A barrier of one group. Barrier 0 is that of the block.
struct GroupBarrier {
    int group;

    __device__ __forceinline__ void operator()() const {
        asm volatile("barrier.sync %0, %1;" ::"r"(1 + group), "n"(THREADS) : "memory");
    }
};

template <class Cache, class Blocks>
struct GroupedShared {
    static constexpr int GROUPS = Blocks::GROUPS;
    float largest_by_warp[GROUPS][WARPS][16];
    typename Cache::KeyAddress addresses[GROUPS][TILE];
    // Largest score and sum of weights, for the splits of a round in all blocks.
    float2 split_weights[Blocks::COUNT_MAX * GROUPS][16];
    typename RawHeads<Cache>::Shared raw;
};

// What is behind the stages in the dynamic shared memory of a block.
struct GroupedMemory {
    __half *query_rows, *weight_tiles;
    float *split_sums;
};

template <class Cache, int GROUPS>
__device__ __forceinline__ GroupedMemory divide_memory(uint8_t *stages) {
    __half *query_rows = reinterpret_cast<__half *>(stages + GROUPS * Cache::STAGE_BYTES);
    __half *weight_tiles = query_rows + 16 * Cache::PITCH;
    return {query_rows, weight_tiles, reinterpret_cast<float *>(weight_tiles + GROUPS * 16 * WEIGHT_PITCH)};
}

// Stores the results of a split for `MergedValues`: `sums` in this block, and the weights in all
// blocks. Called by a group.
template <class Cache, class Blocks>
__device__ __forceinline__ void store_split(const SplitTiles<Cache, false> &state, int pairs, int warp,
                                            const Blocks &blocks, float2 *weights, float *sums) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int pair = lane / 4 + 8 * half;
        if (pair >= pairs) continue;
        // Each of the four lanes of a pair sends to some of the blocks.
        if (warp == 0)
            for (int of = lane % 4; of < blocks.count; of += 4)
                blocks.store(of, weights + pair,
                             make_float2(state.softmax[half].largest, state.weight_sum[2 * half]));
        Cache::store_sums(sums + pair * Cache::DIM, state.sums, half, warp, lane);
    }
}

// The merged values of one thread. The column tiles of all values of the row's heads are dealt to
// the blocks in turn.
template <class Cache, class Blocks>
struct MergedValues {
    static constexpr int GROUPS = Blocks::GROUPS, BLOCK_THREADS = GROUPS * THREADS;
    static constexpr int COUNT = (16 * Cache::DIM + BLOCK_THREADS - 1) / BLOCK_THREADS;
    static_assert(BLOCK_THREADS % TILE_COLS == 0);

    const Blocks &blocks;
    // Values of all heads.
    int values;
    SplitMerge total[COUNT] = {};
    float sums[COUNT] = {}, weights[COUNT] = {};

    // The thread's k-th value.
    __device__ __forceinline__ int value(int k) const {
        const int tile = threadIdx.x / TILE_COLS + k * (BLOCK_THREADS / TILE_COLS);
        return (tile * blocks.count + blocks.rank) * TILE_COLS + threadIdx.x % TILE_COLS;
    }

    // Merges `splits` splits, up to GROUPS of each block.
    __device__ __forceinline__ void merge(const float *split_sums, const float2 (*split_weights)[16],
                                          int splits) {
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            const int at = value(k);
            if (at >= values) break;
            for (int first = 0, of = 0; first < splits; first += GROUPS, of++) {
                // All loads come before the first use. Beyond the last split are old values.
                float sum[GROUPS];
                blocks.load(of, split_sums + at, values, sum);
#pragma unroll
                for (int group = 0; group < GROUPS; group++) {
                    if (first + group >= splits) break;
                    const float2 weight = split_weights[first + group][at / Cache::DIM];
                    total[k].update(weight.x);
                    weights[k] = total[k].merge(weights[k], weight.y);
                    sums[k] = total[k].merge(sums[k], sum[group]);
                }
            }
        }
    }

    __device__ __forceinline__ void store(float *out, float *rows) const {
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            const int at = value(k);
            if (at >= values) break;
            const float merged = __fdiv_rn(sums[k], weights[k]);
            out[at] = merged;
            rows[at] = merged;
        }
    }
};

template <class Cache>
__device__ __forceinline__ void load_group_tile(uint8_t *stage, const typename Cache::KeyAddress *addresses,
                                                const KvLayerAddress &kv, const KeyRange &copied) {
    Cache::load(stage, addresses, kv.head_bytes, copied);
    commit_copies();
}

// Waits for the previous kernel, fills the query rows of the block, and starts the first copies.
template <class Cache, class LoadFirst>
__device__ __forceinline__ void fill_query_rows(bool is_raw, const RawHeads<Cache> &raw,
                                                const KvLayerAddress &kv, const AttentionQueries &queries,
                                                const QueryTile &query_tile, uint32_t kv_head,
                                                __half *query_rows, LoadFirst load_first) {
    if (is_raw) {
        load_first();
        zero_query_rows<Cache>(query_rows, queries.group, 16);
        __syncthreads();
        wait_for_previous_kernel();
        launch_next_kernel();
        // A warp has a head, or up to three of a group of 16.
        raw.template finish<1>(kv, queries, query_rows);
    } else {
        wait_for_previous_kernel();
        launch_next_kernel();
        load_first();
        load_queries<Cache>(query_rows, queries, query_tile, kv_head, queries.group, 16);
    }
    __syncthreads();
}

// Stores the merged rows, and quantizes them if the next product wants quants.
template <class Cache, class Blocks>
__device__ __forceinline__ void end_row(const MergedValues<Cache, Blocks> &merged, const Blocks &blocks,
                                        const QueryTile &query_tile, const AttentionQueries &queries,
                                        uint32_t kv_head, uint8_t *stages, float *out,
                                        ActivationFormat quantizer, const QuantizedRows &quantized) {
    // The stages are free. Other blocks may still read the results of splits.
    static_assert(16 * Cache::DIM * sizeof(float) <= Cache::STAGE_BYTES);
    float *const rows = reinterpret_cast<float *>(stages);
    const size_t first_head = size_t(query_tile.row) * queries.heads + kv_head * queries.group;
    // Loads of other groups from these stages come before the barrier of the cluster. Racecheck of
    // compute-sanitizer reports hazards without this one.
    __syncthreads();
    merged.store(out + first_head * Cache::DIM, rows);
    quantize_merged<Cache>(query_tile, queries, kv_head, rows, quantizer, quantized, blocks.rank,
                           blocks.count);
    blocks.wait_last();
}

template <class Cache, class Blocks>
__device__ void attention_grouped_kv(const KvLayerAddress &kv, const AttentionQueries &queries,
                                     const uint32_t *tables, const KvSplits *splits,
                                     const uint32_t *split_count, const NormRopeKvParams &raw_params,
                                     float *out, int quantizer, const QuantizedRows &quantized) {
    constexpr int GROUPS = Blocks::GROUPS;
    extern __shared__ __align__(16) uint8_t shared_stages[];
    const auto [query_rows, weight_tiles, split_sums] = divide_memory<Cache, GROUPS>(shared_stages);
    __shared__ GroupedShared<Cache, Blocks> shared;
    static_assert(sizeof(shared) <= Blocks::SHARED_BYTES_MAX);

    // The host sent plans and tables before this part of the step, and what fetches them lets
    // nothing start early. So this kernel may read them before the previous one has ended.
    const uint32_t count = *split_count;
    const QueryTile query_tile = splits[blockIdx.y].queries;
    if (blockIdx.y >= count) return;
    const Blocks blocks;
    // The others may store in this block once it has started.
    blocks.arrive();
    const uint32_t kv_head = blockIdx.x >> (__ffs(blocks.count) - 1), last = query_tile.position;
    const int tiles = last / TILE + 1, pairs = queries.group, values = pairs * Cache::DIM;
    const int group = threadIdx.x / THREADS, warp = threadIdx.x % THREADS / 32;
    // Splits of a round, and the group's own one.
    const int round_splits = GROUPS * blocks.count, own_split = GROUPS * blocks.rank + group;
    const GroupBarrier barrier{group};
    const bool is_raw = Cache::TAKES_RAW_HEADS && raw_params.queries != nullptr,
               block_has_key = is_raw && ((tiles - 1) / GROUPS & (blocks.count - 1)) == blocks.rank,
               has_own_key = block_has_key && (tiles - 1) % GROUPS == group;
    uint8_t *const stage = shared_stages + group * Cache::STAGE_BYTES;

    // The tiles of this group, from its own split on.
    const KeyAddresses<Cache> keys{
        kv, tables + query_tile.table, kv_head, uint32_t(own_split * TILE), 0, last, has_own_key};
    typename Cache::KeyAddress *const addresses = shared.addresses[group];
    const uint32_t first_block = keys.block(0);
    uint32_t next_block = keys.block(round_splits);
    RawHeads<Cache> raw{raw_params, shared.raw, query_tile.row, kv_head, block_has_key};
    // While the entries of the block table arrive.
    if (is_raw) raw.prefetch();
    keys.store(addresses, 0, first_block);
    barrier();
    auto load_tile = [&](int tile) { load_group_tile<Cache>(stage, addresses, kv, keys.copied(tile)); };
    fill_query_rows<Cache>(is_raw, raw, kv, queries, query_tile, kv_head, query_rows, [&]() {
        if (own_split < tiles) load_tile(0);
    });
    SplitTiles<Cache, false> state(query_tile, queries, query_rows, weight_tiles + group * 16 * WEIGHT_PITCH,
                                   shared.largest_by_warp[group]);
    MergedValues<Cache, Blocks> merged{blocks, values};

    for (int round = 0; round < tiles; round += round_splits) {
        const int tile = round + own_split;
        blocks.wait();
        if (tile < tiles) {
            wait_copies<0>();
            barrier();
            if (has_own_key && tile + 1 == tiles) {
                raw.put(stage, last % TILE);
                barrier();
            }
            state.add_tile(stage, tile * TILE, warp, barrier);
            store_split<Cache>(state, pairs, warp, blocks, shared.split_weights[own_split],
                               split_sums + group * values);
            // The stage, the weights and the warps' maxima are free.
            barrier();
            if (tile + round_splits < tiles) {
                keys.store(addresses, round + round_splits, next_block);
                next_block = keys.block(round + 2 * round_splits);
                barrier();
                load_tile(round + round_splits);
                state.reset();
            }
        }
        blocks.arrive();
        blocks.wait();
        merged.merge(split_sums, shared.split_weights, min(round_splits, tiles - round));
        blocks.arrive();
    }
    end_row(merged, blocks, query_tile, queries, kv_head, shared_stages, out, ActivationFormat(quantizer),
            quantized);
}

}  // namespace

// The compiler leaves registers for RESIDENT blocks on a multiprocessor.
#define GROUPED_KV_KERNEL(NAME, CACHE, BLOCKS, RESIDENT)                                                  \
    extern "C" __global__ void __launch_bounds__(BLOCKS::GROUPS *THREADS, RESIDENT)                       \
        NAME(const __grid_constant__ KvLayerAddress kv, const __grid_constant__ AttentionQueries queries, \
             const uint32_t *tables, const KvSplits *splits, const uint32_t *split_count,                 \
             const __grid_constant__ NormRopeKvParams raw_heads, float *out, int quantizer,               \
             const __grid_constant__ QuantizedRows quantized) {                                           \
        attention_grouped_kv<CACHE, BLOCKS>(kv, queries, tables, splits, split_count, raw_heads, out,     \
                                            quantizer, quantized);                                        \
    }                                                                                                     \
    CHECK_SIGNATURE(NAME, AttentionGroupedKv);

#define GROUPED_KV_KERNELS(DIM, CACHE)                                                   \
    GROUPED_KV_KERNEL(attention_grouped_kv_##DIM, CACHE, LoneBlock<ATTENTION_GROUPS>, 1) \
    GROUPED_KV_KERNEL(attention_clustered_kv_##DIM, CACHE, BlocksOfCluster, 1)           \
    GROUPED_KV_KERNEL(attention_two_groups_kv_##DIM, CACHE, LoneBlock<ATTENTION_TWO_GROUPS>, 2)
