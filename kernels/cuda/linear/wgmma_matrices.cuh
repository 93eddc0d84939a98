// SPDX-License-Identifier: Apache-2.0

// Output tiles of wgmma_product.cuh for linear layers: up to four matrices times all tokens.

#pragma once

#include "params.cuh"
#include "wgmma_product.cuh"

#if HAS_WGMMA

namespace wgmma_product {

template <class Shape>
struct MatrixTiles {
    static constexpr int GROUPS = Shape::GROUPS, TOKENS_MIN = Shape::TOKENS;

    struct OutputTile {
        // `group` is the first group of 8 tokens.
        int matrix, row_tile, group;
    };

    const LinearParams &params;
    int token_tiles, output_tiles;

    __device__ explicit MatrixTiles(const LinearParams &params) : params(params) {
        token_tiles = (params.tokens + Shape::TOKENS - 1) / Shape::TOKENS;
        output_tiles = count_row_tile_groups<Shape::ROW_TILES>(params) * token_tiles;
    }

    // Tiles of one group of weight rows are neighbours, so that blocks that run at the same time
    // read the same weights.
    __device__ bool find(int index, OutputTile &tile) const {
        if (index >= output_tiles) return false;
        RowTile rows = find_row_tile<Shape::ROW_TILES>(params, index / token_tiles);
        tile = {rows.matrix, rows.first, index % token_tiles * GROUPS};
        return true;
    }

    __device__ int col_tiles() const { return params.col_tiles; }
    __device__ int row_tiles(const OutputTile &tile) const { return ::row_tiles(params, tile.matrix); }
    __device__ const uint8_t *weights(const OutputTile &tile) const { return params.weights[tile.matrix]; }
    __device__ const uint8_t *act_tiles() const { return params.act_tiles; }

    // Tokens that a block computes.
    __device__ int block_tokens(const OutputTile &) const { return Shape::TOKENS; }
    __device__ int uniform_block_tokens(const OutputTile &) const { return Shape::TOKENS; }

    // Groups that activation tiles have.
    __device__ int groups(const OutputTile &tile) const {
        return min(GROUPS, (params.tokens + ACT_TILE_TOKENS - 1) / ACT_TILE_TOKENS - tile.group);
    }

    // F16 quants have room for whole blocks.
    __device__ int f16_groups(const OutputTile &) const { return GROUPS; }

    __device__ void store(const OutputTile &tile, int row_tile, int group, const float (&four)[4]) const {
        int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < 4; i++)
            store_output(params, tile.matrix, (tile.row_tile + row_tile) * TILE_ROWS + g + i / 2 * 8,
                         (tile.group + group) * ACT_TILE_TOKENS + 2 * t + i % 2, four[i]);
    }

    // The sums of a warp's 16 rows for N tokens.
    template <int N>
    __device__ void store_tile(const OutputTile &tile, int row_tile, const float (&total)[N / 2]) const {
#pragma unroll
        for (int group = 0; group < N / ACT_TILE_TOKENS; group++) {
            float four[4] = {total[4 * group], total[4 * group + 1], total[4 * group + 2],
                             total[4 * group + 3]};
            store(tile, row_tile, group, four);
        }
    }
};

template <class Format, class Shape>
__device__ inline void multiply(const LinearParams &params, const F16Quants &quants) {
    using Product = Kernel<Format, Shape, MatrixTiles<Shape>>;
    auto &shared = shared_memory<Format, Shape>();
    Product::init_barriers(shared);
    launch_next_kernel();
    MatrixTiles<Shape> tiles(params);
    Product{tiles, quants, shared}.run();
}

}  // namespace wgmma_product

#endif
