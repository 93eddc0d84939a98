// SPDX-License-Identifier: Apache-2.0

// Decode rows whose heads have no norm and rotation yet. A block of split_kv.cuh or grouped_kv.cuh
// then does what norm_rope_kv.cu does, for the heads that it reads: norm and rotation of its query
// heads; and if its splits are the last of the row, norm and rotation of the key head, and both
// writes to the cache. This saves a launch a layer, some 2 us on an H200.
//
// A row must be the only one of the step that writes keys which the row reads. So the block reads
// all other keys of the row before the previous kernel has ended, and puts the row's own key into
// the stage itself.

#pragma once

#include "../kv_store.cuh"
#include "../norm_rope.cuh"
#include "tiles.cuh"

namespace {

template <class Cache, bool = Cache::TAKES_RAW_HEADS>
struct RawHeads {
    static constexpr int DIM = Cache::DIM, PITCH = Cache::PITCH;
    using Mma = typename Cache::Mma;
    using Value = typename Cache::Value;

    struct Shared {
        float cosines[DIM / 2], sines[DIM / 2];
        float query_weight[DIM], key_weight[DIM];
        Value key[DIM], value[DIM];
    };

    const NormRopeKvParams &params;
    Shared &shared;
    uint32_t row, kv_head;
    // Whether the block has the row's own key.
    bool has_key;
    uint32_t slot = 0;

    // Loads and computes what does not depend on the previous kernel.
    __device__ __forceinline__ void prefetch() {
        slot = params.slots[row];
        if (params.query_weight != nullptr) {
            for (int i = threadIdx.x; i < DIM; i += blockDim.x) {
                shared.query_weight[i] = params.query_weight[i];
                shared.key_weight[i] = params.key_weight[i];
            }
        }
        for (int pair = threadIdx.x; pair < DIM / 2; pair += blockDim.x) {
            rope_angle(params.positions[row], params.inverse_frequencies[pair], params.magnitude,
                       &shared.cosines[pair], &shared.sines[pair]);
        }
    }

    // Fills the 16 query rows of the block, and stores key and value. A barrier of the thread block
    // must be between `prefetch` and this, and after it. A warp loads ROUND heads before it uses
    // the first of them.
    template <int ROUND>
    __device__ __forceinline__ void finish(const KvLayerAddress &kv, const AttentionQueries &queries,
                                           __half *query_rows) const {
        constexpr int VALUES = DIM / 32;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, query_heads = queries.group;
        const int warps = blockDim.x / 32;
        const int items = query_heads + (has_key ? 2 : 0);
        for (int first = warp; first < items; first += ROUND * warps) {
            float v[ROUND][VALUES];
#pragma unroll
            for (int k = 0; k < ROUND; k++) {
                const int item = first + k * warps;
                if (item >= items) break;
                const float *from = item < query_heads    ? params.queries + head_at(params.heads, item)
                                    : item == query_heads ? params.keys + head_at(params.kv_heads, 0)
                                                          : params.values + head_at(params.kv_heads, 0);
#pragma unroll
                for (int i = 0; i < VALUES; i++) v[k][i] = from[lane + 32 * i];
            }
#pragma unroll
            for (int k = 0; k < ROUND; k++) {
                const int item = first + k * warps;
                if (item >= items) break;
                const bool is_query = item < query_heads;
                const bool is_value = item > query_heads;
                if (!is_value) {
                    const float *weight = is_query ? shared.query_weight : shared.key_weight;
                    turn_head(v[k], params.query_weight == nullptr ? nullptr : weight, params.eps,
                              params.adjacent, shared.cosines, shared.sines);
                }
                if (is_query) {
                    uint16_t *to = reinterpret_cast<uint16_t *>(query_rows + item * PITCH);
#pragma unroll
                    for (int i = 0; i < VALUES; i++)
                        to[lane + 32 * i] = uint16_t(Mma::pack(v[k][i] * queries.scale, 0.0f));
                } else {
                    store_in_cache(kv, v[k], is_value);
                }
            }
        }
    }

    // Puts the row's own key and value into the stage of their tile, where they are number `key`.
    __device__ __forceinline__ void put(uint8_t *stage, int key) const {
        Cache::put(stage, key, shared.key, shared.value);
    }

private:
    // Offset of head `head` of those of this KV head, of which there are `heads` a row.
    __device__ __forceinline__ size_t head_at(int heads, int head) const {
        return (size_t(row) * heads + kv_head * (heads / params.kv_heads) + head) * DIM;
    }

    template <int VALUES>
    __device__ __forceinline__ void store_in_cache(const KvLayerAddress &kv, const float (&v)[VALUES],
                                                   bool is_value) const {
        const uint32_t block = slot / kv.block_tokens, token = slot % kv.block_tokens;
        Value *cache =
            reinterpret_cast<Value *>(head_keys(kv, block, kv_head) + (is_value ? kv.head_bytes : 0)) +
            size_t(token) * DIM;
        Value *own = is_value ? shared.value : shared.key;
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            Value stored;
            store(v[i], &stored);
            own[lane + 32 * i] = stored;
            cache[lane + 32 * i] = stored;
        }
    }
};

// For caches whose heads other kernels prepare. Nothing calls these functions at run time.
template <class Cache>
struct RawHeads<Cache, false> {
    struct Shared {};

    const NormRopeKvParams &params;
    Shared &shared;
    uint32_t row, kv_head;
    bool has_key;

    __device__ __forceinline__ void prefetch() const {}
    template <int>
    __device__ __forceinline__ void finish(const KvLayerAddress &, const AttentionQueries &, __half *) const {
    }
    __device__ __forceinline__ void put(uint8_t *, int) const {}
};

}  // namespace
