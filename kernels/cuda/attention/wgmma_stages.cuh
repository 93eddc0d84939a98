// SPDX-License-Identifier: Apache-2.0

// Shared memory of attention/prefill_wgmma.cuh, and the copies of keys and values to it. Operands
// are units of 64 rows by 64 columns: rows of 128 bytes with the 128-byte swizzle.
//
//   stage     | keys: DIM / 64 units | values: DIM / 64 units | ones: 1 unit |
//
// The ones are a column of V, whose product with the weights is their sum.

#pragma once

#include "../linear/async_copy.cuh"
#include "../linear/wgmma.cuh"
#include "tiles.cuh"

#if HAS_WGMMA

namespace {

namespace prefill_wgmma {

constexpr int GROUPS = PREFILL_WGMMA_GROUPS;
constexpr int GROUP_PAIRS = 64;
constexpr int STAGES = 4;
// Eight rows of 128 bytes. The swizzle repeats after them.
constexpr int ATOM_BYTES = 1024;
constexpr int UNIT_BYTES = TILE / 8 * ATOM_BYTES;
// A multiprocessor has 65,536 registers, and a thread starts with 168. The copying warps give up
// registers for the multiplying ones, which hold 64 sums, 64 merged sums, 32 scores and 16 weights.
constexpr int COPYING_REGISTERS = 40, MULTIPLYING_REGISTERS = 232;

template <int DIM>
struct Stage {
    uint8_t keys[DIM / 64][UNIT_BYTES];
    uint8_t values[DIM / 64][UNIT_BYTES];
    uint8_t ones[UNIT_BYTES];
};

template <int DIM>
struct Shared {
    Stage<DIM> stages[STAGES];
    uint8_t queries[GROUPS][DIM / 64][UNIT_BYTES];
    uint64_t full[STAGES], empty[STAGES];
};

// Offset of 16-byte vector `vector` of a row.
__device__ __forceinline__ int swizzled_offset(int row, int vector) {
    return vector / 8 * UNIT_BYTES + row * 128 + (vector % 8 ^ row % 8) * 16;
}

// Makes this thread's stores and finished copies visible to wgmma, which reads shared memory
// through another proxy of PTX. Call it before the barrier for which the multiplying warps wait.
__device__ __forceinline__ void publish_to_wgmma() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Copies the tiles. Warp w copies keys 16 w to 16 w + 15 of each tile: lane l finds the address of
// key l % 16. The block table is read a tile ahead. Keys before `lowest` and after `last` become
// zeros; the first tile is that of `lowest`.
template <int DIM>
__device__ __forceinline__ void copy_tiles(Shared<DIM> &shared, const KvLayerAddress &kv,
                                           const uint32_t *table, uint32_t kv_head, uint32_t lowest,
                                           uint32_t last) {
    // 16-byte vectors of a key, and keys that a warp copies at a time.
    constexpr int VECTORS = DIM / 8, KEYS = 32 / VECTORS;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int first_tile = lowest / TILE, tiles = last / TILE + 1 - first_tile, vector = lane % VECTORS;
    auto position = [&](int tile) {
        return max(min(uint32_t((first_tile + tile) * TILE + 16 * warp + lane % 16), last), lowest);
    };
    uint32_t block = table[position(0) / kv.block_tokens];
    for (int tile = 0; tile < tiles; tile++) {
        const uint8_t *address =
            head_keys(kv, block, kv_head) + size_t(position(tile) % kv.block_tokens) * (DIM * sizeof(__half));
        block = table[position(tile + 1) / kv.block_tokens];
        const int index = tile % STAGES;
        if (tile >= STAGES) barrier_wait(shared.empty + index, (tile / STAGES - 1) % 2);
        Stage<DIM> &stage = shared.stages[index];
        const uint32_t from_lowest = (first_tile + tile) * TILE - lowest;
#pragma unroll
        for (int round = 0; round < 16 / KEYS; round++) {
            const int key = KEYS * round + lane / VECTORS, row = 16 * warp + key;
            const uint8_t *from = reinterpret_cast<const uint8_t *>(
                                      __shfl_sync(~0u, reinterpret_cast<uint64_t>(address), key)) +
                                  vector * 16;
            const int offset = swizzled_offset(row, vector);
            const bool is_valid = from_lowest + row <= last - lowest;
            copy_async_16(stage.keys[0] + offset, from, is_valid);
            copy_async_16(stage.values[0] + offset, from + kv.head_bytes, is_valid);
        }
        commit_copies();
        // Two tiles are in flight. More would make the last ones wait for an empty stage.
        if (tile == 0) continue;
        wait_copies<1>();
        publish_to_wgmma();
        barrier_arrive(shared.full + (tile - 1) % STAGES);
    }
    wait_copies<0>();
    publish_to_wgmma();
    barrier_arrive(shared.full + (tiles - 1) % STAGES);
}

}  // namespace prefill_wgmma

}  // namespace

#endif
