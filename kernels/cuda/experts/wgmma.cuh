// SPDX-License-Identifier: Apache-2.0

// Output tiles of linear/wgmma_product.cuh for experts with many slots. The products are those of
// matmul.cuh, bit for bit.
//
// An output tile is one group of slots of an expert by 128 rows of one of up to two stacks. Tiles
// of one group are neighbours: blocks that run at the same time read the same activations.
//
//   tile          0     1   ...   5     6   ...  11  |  12   ...
//   rows          0   128 ... 640       0 ... 640    |   0   ...        768 rows a matrix
//   stack        gate gate ... gate    up ...  up    | gate  ...
//   group         0     0  ...  0       0 ...   0    |   1   ...
//
// A group has at most TOKENS slots. A block computes a multiple of 32 of them, so its time grows
// with the group. Converting weights to fragments takes as long as the products of 64 slots. So
// groups of 160 slots are faster than those of 128 where experts have about 128 pairs: two groups
// of an expert convert its weights twice. Sums of 160 slots of Q8_0, Q4_0 and Q5_0 do not fit the
// registers.
//
// The sort deals groups of experts with many pairs first. The last output tiles of all blocks are
// then small, and the blocks end at nearly the same time.
//
// Groups come from the kernel before, so no warp reads anything before that kernel has ended.
//
// Limit: as in linear/affine_k_wgmma.cuh, q6_k_wgmma.cuh and legacy_wgmma.cuh. While a block
// stores, its tensor cores are idle: 20 of 254 us for gate and up, 30 of 155 us for down. Measured
// on an H200 with 128 experts of qwen3-30b-a3b, us on wgmma and in parentheses by matmul.cuh:
//
//   pairs an expert             16          32          64          128
//   Q4_K gate and up       110  (84)   125 (137)   171 (233)   252 (417)     128 pairs: 406 TOPS
//        down               70  (55)    80  (87)   104 (145)   154 (267)                332
//   Q6_K gate and up       125 (130)   144 (211)   181 (346)   258 (618)                399
//        down               77  (82)    88 (129)   111 (214)   157 (389)                327
//   Q8_0 gate and up       114 (118)   139 (170)   209 (270)   373 (481)                276
//        down               71  (70)    85  (98)   121 (160)   212 (288)                240
//
// Tried: multiples of 16 slots (no faster for groups of 128, and the code of Q4_K for 160 becomes
// too large to be inlined), a load of each slot's pair before its store (60 us slower for down).

#pragma once

#include "../linear/wgmma_product.cuh"
#include "abi/experts.cuh"

#if HAS_WGMMA

namespace experts {

// A value that is equal in all lanes, which the compiler cannot know of a load. With it, the
// compiler knows that branches do not divide the warp, and computes descriptors once for all lanes.
__device__ __forceinline__ int uniform(uint32_t value) { return int(__reduce_max_sync(~0u, value)); }

template <int TILE_BYTES, class Shape>
struct ExpertTiles {
    // Blocks compute a multiple of TOKENS_STEP tokens, at least TOKENS_MIN.
    static constexpr int TOKENS_STEP = WGMMA_TOKENS_STEP, TOKENS_MIN = TOKENS_STEP;

    struct OutputTile {
        // `group` is the first group of 8 slots.
        int stack, row_tile, group, expert, pairs;
    };

    const ExpertParams &params;
    int stacks, row_blocks, output_tiles;

    // All lanes call it, after the previous kernel has ended.
    __device__ ExpertTiles(const ExpertParams &params, int stacks) : params(params), stacks(stacks) {
        row_blocks = (params.rows + Shape::ROWS - 1) / Shape::ROWS;
        output_tiles = uniform(*params.group_count) * row_blocks * stacks;
    }

    __device__ bool find(int index, OutputTile &tile) const {
        if (index >= output_tiles) return false;
        const ExpertGroup group = params.groups[index / (row_blocks * stacks)];
        tile = {index / row_blocks % stacks, index % row_blocks * Shape::ROW_TILES,
                int(group.first / ACT_TILE_TOKENS), int(group.expert), int(group.pairs)};
        return true;
    }

    __device__ int col_tiles() const { return params.col_tiles; }
    __device__ int row_tiles(const OutputTile &) const { return params.rows / TILE_ROWS; }
    __device__ const uint8_t *weights(const OutputTile &tile) const {
        return params.weights[tile.stack] + size_t(tile.expert) * row_tiles(tile) * col_tiles() * TILE_BYTES;
    }
    __device__ const uint8_t *act_tiles() const { return params.act_tiles; }

    __device__ int groups(const OutputTile &tile) const {
        return (tile.pairs + ACT_TILE_TOKENS - 1) / ACT_TILE_TOKENS;
    }
    // All lanes call it.
    __device__ int block_tokens(const OutputTile &tile) const {
        return uniform((tile.pairs + TOKENS_STEP - 1) / TOKENS_STEP * TOKENS_STEP);
    }

    // Stores the sums of a warp's 16 rows for N slots.
    template <int N>
    __device__ void store_tile(const OutputTile &tile, int row_tile, const float (&total)[N / 2]) const {
        if (tile.row_tile + row_tile >= row_tiles(tile)) return;
        int first = tile.group * ACT_TILE_TOKENS;
        if (params.sorted_pairs == nullptr) {
            store_rows<N>(tile, row_tile, total, [&](int, int at) { return uint32_t(first + at); });
            return;
        }
        // A lane loads the pairs of slots lane, lane + 32, ... before the first of them is needed.
        uint32_t pairs[N / 32];
#pragma unroll
        for (int i = 0; i < N / 32; i++) {
            int at = 32 * i + threadIdx.x % 32;
            pairs[i] = at < tile.pairs ? params.sorted_pairs[first + at] : 0;
        }
        store_rows<N>(tile, row_tile, total,
                      [&](int group, int at) { return __shfl_sync(~0u, pairs[group / 4], at % 32); });
    }

    // The kernel waits before it looks for output tiles.
    __device__ void wait_for_input() const {}
    __device__ void end() const {}

    // `find_row(group, at)` is the row of the output for slot `at` of the tile. The slot is in the
    // tile's group `group` of 8 slots.
    template <int N, class FindRow>
    __device__ void store_rows(const OutputTile &tile, int row_tile, const float (&total)[N / 2],
                               FindRow find_row) const {
        int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        float *out = params.out[tile.stack] + (tile.row_tile + row_tile) * TILE_ROWS + g;
#pragma unroll
        for (int group = 0; group < N / ACT_TILE_TOKENS; group++)
#pragma unroll
            for (int token = 0; token < 2; token++) {
                int at = group * ACT_TILE_TOKENS + 2 * t + token;
                float *to = out + size_t(find_row(group, at)) * params.rows;
                wgmma_product::store_if(at < tile.pairs, to, total[4 * group + token]);
                wgmma_product::store_if(at < tile.pairs, to + 8, total[4 * group + 2 + token]);
            }
    }
};

template <class Format, int TOKENS>
__device__ inline void multiply_on_wgmma(const ExpertParams &params, int stacks, const F16Sums &sums) {
    using Shape = wgmma_product::Shape<TOKENS, EXPERT_WGMMA_ROW_GROUPS, 1, 1, EXPERT_WGMMA_STAGES>;
    using Tiles = ExpertTiles<Format::TILE_BYTES, Shape>;
    using Product = wgmma_product::Kernel<Format, Shape, Tiles>;
    auto &shared = wgmma_product::shared_memory<Format, Shape>();
    Product::init_barriers(shared);
    wait_for_previous_kernel();
    Tiles tiles(params, stacks);
    Product{tiles, sums, shared}.run();
}

}  // namespace experts

#endif
