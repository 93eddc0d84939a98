// SPDX-License-Identifier: Apache-2.0

// Attention for few decode rows. A block computes all splits of one row and KV head, as
// attention_merged_kv does, but four at a time: four groups of four warps have a split each.
//
//   group 0 | split 0 | split 4 | ...      a split is one tile of 64 keys
//   group 1 | split 1 | split 5 |          if the block prepares its heads (raw_heads.cuh), copies
//   group 2 | split 2 |                    of the first four tiles start before the previous
//   group 3 | split 3 |                    kernel has ended
//                     ^ all threads merge the results of up to four splits, in order
//
// So no kernel has to merge afterwards, which takes some 3 us more on an H200.
//
//   grid: (KV heads, entries of the plan)
//   shared memory: a stage for each group | query rows | weights for each group | results for each
//   group, [query heads of the KV head][DIM] f32

#pragma once

#include "kv_pipeline.cuh"
#include "raw_heads.cuh"
#include "split_results.cuh"
#include "split_tiles.cuh"

namespace {

constexpr int GROUPS = ATTENTION_GROUPS;
constexpr int GROUPED_THREADS = GROUPS * THREADS;

// A barrier of one group. Barrier 0 is that of the block.
struct GroupBarrier {
    int group;

    __device__ __forceinline__ void operator()() const {
        asm volatile("barrier.sync %0, %1;" ::"r"(1 + group), "n"(THREADS) : "memory");
    }
};

template <class Cache>
struct GroupedShared {
    float largest_by_warp[GROUPS][WARPS][16];
    typename Cache::KeyAddress addresses[GROUPS][TILE];
    // Largest score and sum of weights.
    float2 split_weights[GROUPS][16];
    typename RawHeads<Cache>::Shared raw;
};

// Stores the results of a split for `MergedValues`; called by a group.
template <class Cache>
__device__ __forceinline__ void store_split(const SplitTiles<Cache, false> &state, int pairs, int warp,
                                            float2 *weights, float *sums) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int pair = lane / 4 + 8 * half;
        if (pair >= pairs) continue;
        if (warp == 0 && lane % 4 == 0)
            weights[pair] = make_float2(state.softmax[half].largest, state.weight_sum[2 * half]);
        Cache::store_sums(sums + pair * Cache::DIM, state.sums, half, warp, lane);
    }
}

// The merged values of one thread: value threadIdx.x of all values of the row's heads, and further
// ones at a distance of GROUPED_THREADS.
template <class Cache>
struct MergedValues {
    static constexpr int COUNT = (16 * Cache::DIM + GROUPED_THREADS - 1) / GROUPED_THREADS;

    // Values of all heads.
    int values;
    SplitMerge total[COUNT] = {};
    float sums[COUNT] = {}, weights[COUNT] = {};

    __device__ __forceinline__ void merge(const float *split_sums, const float2 (*split_weights)[16],
                                          int splits) {
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            const int at = threadIdx.x + k * GROUPED_THREADS;
            if (at >= values) break;
            for (int split = 0; split < splits; split++) {
                const float2 weight = split_weights[split][at / Cache::DIM];
                total[k].update(weight.x);
                weights[k] = total[k].merge(weights[k], weight.y);
                sums[k] = total[k].merge(sums[k], split_sums[split * values + at]);
            }
        }
    }

    __device__ __forceinline__ void store(float *out, float *rows) const {
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            const int at = threadIdx.x + k * GROUPED_THREADS;
            if (at >= values) break;
            const float value = __fdiv_rn(sums[k], weights[k]);
            out[at] = value;
            rows[at] = value;
        }
    }
};

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
        raw.finish(kv, queries, query_rows);
    } else {
        wait_for_previous_kernel();
        launch_next_kernel();
        load_first();
        load_queries<Cache>(query_rows, queries, query_tile, kv_head, queries.group, 16);
    }
    __syncthreads();
}

template <class Cache>
__device__ void attention_grouped_kv(const KvLayerAddress &kv, const AttentionQueries &queries,
                                     const uint32_t *tables, const KvSplits *splits,
                                     const uint32_t *split_count, const NormRopeKvParams &raw_params,
                                     float *out, int quantizer, const QuantizedRows &quantized) {
    constexpr int DIM = Cache::DIM;
    extern __shared__ __align__(16) uint8_t shared_stages[];
    __half *const query_rows = reinterpret_cast<__half *>(shared_stages + GROUPS * Cache::STAGE_BYTES);
    __half *const weight_tiles = query_rows + 16 * Cache::PITCH;
    float *const split_sums = reinterpret_cast<float *>(weight_tiles + GROUPS * 16 * WEIGHT_PITCH);
    __shared__ GroupedShared<Cache> shared;
    static_assert(sizeof(shared) <= ATTENTION_GROUPED_BYTES);

    // The host sent plans and tables before this part of the step, and what fetches them lets
    // nothing start early. So this kernel may read them before the previous one has ended.
    const uint32_t count = *split_count;
    const QueryTile query_tile = splits[blockIdx.y].queries;
    if (blockIdx.y >= count) return;
    const uint32_t kv_head = blockIdx.x, last = query_tile.position;
    const int tiles = last / TILE + 1, pairs = queries.group, values = pairs * DIM;
    const int group = threadIdx.x / THREADS, warp = threadIdx.x % THREADS / 32;
    const GroupBarrier barrier{group};
    const bool is_raw = Cache::TAKES_RAW_HEADS && raw_params.queries != nullptr;
    const bool has_own_key = is_raw && (tiles - 1) % GROUPS == group;
    uint8_t *const stage = shared_stages + group * Cache::STAGE_BYTES;

    // The tiles of this group. Their numbers begin with that of the group.
    const KeyAddresses<Cache> keys{
        kv, tables + query_tile.table, kv_head, uint32_t(group * TILE), 0, last, has_own_key};
    typename Cache::KeyAddress *const addresses = shared.addresses[group];
    const uint32_t first_block = keys.block(0);
    uint32_t next_block = keys.block(GROUPS);
    RawHeads<Cache> raw{raw_params, shared.raw, query_tile.row, kv_head, is_raw};
    // While the entries of the block table arrive.
    if (is_raw) raw.prefetch();
    keys.store(addresses, 0, first_block);
    barrier();
    auto load_tile = [&](int tile) {
        Cache::load(stage, addresses, kv.head_bytes, keys.copied(tile));
        commit_copies();
    };

    fill_query_rows<Cache>(is_raw, raw, kv, queries, query_tile, kv_head, query_rows, [&]() {
        if (group < tiles) load_tile(0);
    });
    SplitTiles<Cache, false> state(query_tile, queries, query_rows, weight_tiles + group * 16 * WEIGHT_PITCH,
                                   shared.largest_by_warp[group]);
    MergedValues<Cache> merged{values};

    for (int round = 0; round < tiles; round += GROUPS) {
        const int tile = round + group;
        if (tile < tiles) {
            wait_copies<0>();
            barrier();
            if (has_own_key && tile + 1 == tiles) {
                raw.put(stage, last % TILE);
                barrier();
            }
            state.add_tile(stage, tile * TILE, warp, barrier);
            store_split<Cache>(state, pairs, warp, shared.split_weights[group], split_sums + group * values);
            // The stage, the weights and the warps' maxima are free.
            barrier();
            if (tile + GROUPS < tiles) {
                keys.store(addresses, round + GROUPS, next_block);
                next_block = keys.block(round + 2 * GROUPS);
                barrier();
                load_tile(round + GROUPS);
                state.reset();
            }
        }
        __syncthreads();
        merged.merge(split_sums, shared.split_weights, min(GROUPS, tiles - round));
        // The next round, or the merged rows, overwrite the results.
        __syncthreads();
    }
    merged.store(out + (size_t(query_tile.row) * queries.heads + kv_head * pairs) * DIM, split_sums);
    quantize_merged<Cache>(query_tile, queries, kv_head, split_sums, ActivationFormat(quantizer), quantized);
}

}  // namespace

#define GROUPED_KV_KERNEL(DIM, CACHE)                                                                    \
    extern "C" __global__ void __launch_bounds__(GROUPED_THREADS) attention_grouped_kv_##DIM(            \
        const __grid_constant__ KvLayerAddress kv, const __grid_constant__ AttentionQueries queries,     \
        const uint32_t *tables, const KvSplits *splits, const uint32_t *split_count,                     \
        const __grid_constant__ NormRopeKvParams raw_heads, float *out, int quantizer,                   \
        const __grid_constant__ QuantizedRows quantized) {                                               \
        attention_grouped_kv<CACHE>(kv, queries, tables, splits, split_count, raw_heads, out, quantizer, \
                                    quantized);                                                          \
    }                                                                                                    \
    CHECK_SIGNATURE(attention_grouped_kv_##DIM, AttentionGroupedKv);
