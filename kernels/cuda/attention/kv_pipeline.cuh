// SPDX-License-Identifier: Apache-2.0

// The KV pipeline. It copies tiles of keys and values to shared memory by cp.async, through two
// stages, one tile ahead of the products. attention.cu has a drawing. With one stage, a tile is
// copied after the products of the tile before: then more blocks share a multiprocessor, and they
// hide each other's copies.

#pragma once

#include "tiles.cuh"

namespace {

// Finds the addresses of a tile's keys: thread t looks up key t, for 64 keys. The thread reads the
// block table two tiles before the copies start, and computes the address one tile before. So no
// copy waits for the table.
template <class Cache>
struct KeyAddresses {
    const KvLayerAddress &kv;
    const uint32_t *table;
    uint32_t head;
    // The first position of tile 0, and those of the first and the last key.
    uint32_t start, lowest, last;
    // 1 if the block puts the last key into its stage itself.
    uint32_t own = 0;

    // The block of this thread's key in `tile`. Beyond the last key, it is the last key's block,
    // and before the first key, the first key's.
    __device__ __forceinline__ uint32_t block(int tile) const {
        return tile_thread() < TILE ? table[position(tile) / kv.block_tokens] : 0;
    }

    __device__ __forceinline__ void store(typename Cache::KeyAddress *addresses, int tile,
                                          uint32_t block) const {
        if (tile_thread() < TILE)
            addresses[tile_thread()] = Cache::key_address(kv, block, head, position(tile) % kv.block_tokens);
    }

    __device__ __forceinline__ KeyRange copied(int tile) const {
        return {int(lowest - start) - tile * TILE, last - lowest + 1 - own};
    }

    __device__ __forceinline__ uint32_t position(int tile) const {
        return max(min(start + tile * TILE + tile_thread(), last), lowest);
    }
};

template <class Cache>
struct KvPipeline {
    static constexpr int STAGES = ATTENTION_STAGES;
    using AddressBuffer = typename Cache::KeyAddress[STAGES][TILE];

    const KeyAddresses<Cache> keys;
    AddressBuffer &addresses;
    // Shared memory of `stage_count` stages.
    uint8_t *stages;
    int stage_count, tiles;
    // This thread's block in the first tile that has no addresses yet.
    uint32_t block;

    // Finds the addresses of the first tiles. A barrier of the thread block must follow before the
    // first `load_tile`.
    __device__ __forceinline__ void prefetch() {
        uint32_t blocks[STAGES];
#pragma unroll
        for (int tile = 0; tile < STAGES; tile++) blocks[tile] = keys.block(tile);
        block = keys.block(STAGES);
#pragma unroll
        for (int tile = 0; tile < STAGES; tile++) keys.store(addresses[tile], tile, blocks[tile]);
    }

    // Waits for the copies of `tile`, starts those of the next tile if there are two stages, and
    // returns the stage. The next tile overwrites the stage of the tile before, so a barrier must
    // have followed the last use of that tile.
    __device__ __forceinline__ uint8_t *wait(int tile) {
        const int next = tile + 1;
        if (next < tiles && stage_count > 1) {
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
        return stage(tile);
    }

    // Starts the copies of the tile after `tile` if there is one stage. A barrier must have
    // followed the last use of `tile`.
    __device__ __forceinline__ void release(int tile) {
        if (stage_count == 1 && tile + 1 < tiles) load_tile(tile + 1);
    }

    // Starts the copies of a tile.
    __device__ __forceinline__ void load_tile(int tile) {
        Cache::load(stage(tile), addresses[tile % STAGES], keys.kv.head_bytes, keys.copied(tile));
        commit_copies();
    }

    __device__ __forceinline__ uint8_t *stage(int tile) const {
        return stages + (stage_count > 1 ? tile % STAGES * Cache::STAGE_BYTES : 0);
    }
};

}  // namespace
