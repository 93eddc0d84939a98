// How a block's tiles of keys and values come into shared memory: through two stages, one tile ahead.

#pragma once

#include "tiles.cuh"

namespace {

// Where the keys of tiles stand: a thread for each of 64 keys looks it up, its block two tiles
// before it is asked for and the place one, so that nobody waits for the table.
template <class Cache>
struct Places {
    const KvLayer &kv;
    const uint32_t *table;
    uint32_t head, first, last;

    // The block of this thread's key of tile `tile`. Keys beyond the last have the last one's place.
    __device__ __forceinline__ uint32_t block(int tile) const { return threadIdx.x < TILE ? table[position(tile) / kv.block_tokens] : 0; }

    __device__ __forceinline__ void put(typename Cache::Place *places, int tile, uint32_t block) const {
        if (threadIdx.x < TILE) places[threadIdx.x] = Cache::place(kv, block, head, position(tile) % kv.block_tokens);
    }

    // Keys of a tile that there are.
    __device__ __forceinline__ int valid(int tile) const { return last - first - tile * TILE + 1; }

    __device__ __forceinline__ uint32_t position(int tile) const { return min(first + tile * TILE + threadIdx.x, last); }
};

template <class Cache>
struct Ring {
    static constexpr int STAGES = 2;
    using Look = typename Cache::Place[STAGES][TILE];

    const Places<Cache> place;
    Look &places;
    // Where a block has one tile at most, there is memory for one.
    uint8_t *stages;
    int tiles;
    // Of the tile behind those that have places.
    uint32_t block;

    // Finds the places of the first tiles. The block's threads meet before the first `load`.
    __device__ __forceinline__ void look_up() {
        uint32_t blocks[STAGES];
#pragma unroll
        for (int tile = 0; tile < STAGES; tile++) blocks[tile] = place.block(tile);
        block = place.block(STAGES);
#pragma unroll
        for (int tile = 0; tile < STAGES; tile++) place.put(places[tile], tile, blocks[tile]);
    }

    // The stage of `tile`, once it is there. The threads have met since they used the tile before.
    __device__ __forceinline__ const uint8_t *take(int tile) {
        const int next = tile + 1;
        if (next < tiles) {
            load(next);
            wait_copies<1>();
        } else {
            wait_copies<0>();
        }
        __syncthreads();
        if (next < tiles) {
            place.put(places[tile % STAGES], next + 1, block);
            block = place.block(next + 2);
        }
        return stages + tile % STAGES * Cache::STAGE_BYTES;
    }

    // Starts the copies of a tile.
    __device__ __forceinline__ void load(int tile) {
        Cache::load(stages + tile % STAGES * Cache::STAGE_BYTES, places[tile % STAGES], place.kv.head_bytes, place.valid(tile));
        end_copy_group();
    }
};

}  // namespace
