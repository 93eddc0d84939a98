// SPDX-License-Identifier: Apache-2.0

// The KV pipeline: tiles of keys and values come into shared memory through two stages, one tile
// ahead of the products.

#pragma once

#include "tiles.cuh"

namespace {

// Where the keys of tiles stand: a thread for each of 64 keys looks it up, its block two tiles
// before it is asked for and the keys one, so that nobody waits for the table.
template <class Cache>
struct KeyAddresses {
    const KvLayerAddress &kv;
    const uint32_t *table;
    uint32_t head, first, last;

    // The block of this thread's key of tile `tile`. Keys beyond the last have the last one's keys.
    __device__ __forceinline__ uint32_t block(int tile) const {
        return threadIdx.x < TILE ? table[position(tile) / kv.block_tokens] : 0;
    }

    __device__ __forceinline__ void store(typename Cache::KeyAddress *addresses, int tile,
                                          uint32_t block) const {
        if (threadIdx.x < TILE)
            addresses[threadIdx.x] = Cache::key_address(kv, block, head, position(tile) % kv.block_tokens);
    }

    // Keys of a tile that there are.
    __device__ __forceinline__ int valid(int tile) const { return last - first - tile * TILE + 1; }

    __device__ __forceinline__ uint32_t position(int tile) const {
        return min(first + tile * TILE + threadIdx.x, last);
    }
};

template <class Cache>
struct KvPipeline {
    static constexpr int STAGES = ATTENTION_STAGES;
    using AddressBuffer = typename Cache::KeyAddress[STAGES][TILE];

    const KeyAddresses<Cache> keys;
    AddressBuffer &addresses;
    // Where a block has one tile at most, there is memory for one.
    uint8_t *stages;
    int tiles;
    // Of the tile behind those that have addresses.
    uint32_t block;

    // Finds the addresses of the first tiles. The block's threads meet before the first `load`.
    __device__ __forceinline__ void prefetch() {
        uint32_t blocks[STAGES];
#pragma unroll
        for (int tile = 0; tile < STAGES; tile++) blocks[tile] = keys.block(tile);
        block = keys.block(STAGES);
#pragma unroll
        for (int tile = 0; tile < STAGES; tile++) keys.store(addresses[tile], tile, blocks[tile]);
    }

    // The stage of `tile`, once it is there. The threads have met since they used the tile before.
    __device__ __forceinline__ const uint8_t *wait(int tile) {
        const int next = tile + 1;
        if (next < tiles) {
            load_tile(next);
            wait_copies<1>();
        } else {
            wait_copies<0>();
        }
        __syncthreads();
        if (next < tiles) {
            keys.store(addresses[tile % STAGES], next + 1, block);
            block = keys.block(next + 2);
        }
        return stages + tile % STAGES * Cache::STAGE_BYTES;
    }

    // Starts the copies of a tile.
    __device__ __forceinline__ void load_tile(int tile) {
        Cache::load(stages + tile % STAGES * Cache::STAGE_BYTES, addresses[tile % STAGES], keys.kv.head_bytes,
                    keys.valid(tile));
        commit_copies();
    }
};

}  // namespace
