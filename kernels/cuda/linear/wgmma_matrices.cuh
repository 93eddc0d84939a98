// SPDX-License-Identifier: Apache-2.0

// Output tiles of wgmma_product.cuh for linear layers: up to four matrices times all tokens.

#pragma once

#include "params.cuh"
#include "wgmma_product.cuh"

#if HAS_WGMMA

namespace wgmma_product {

template <class Shape>
struct MatrixTiles {
    static constexpr int GROUPS = Shape::GROUPS, TOKENS = Shape::TOKENS;
    // With one column group, the last tokens are a tile of a multiple of TOKENS_STEP tokens, at
    // least TOKENS_MIN. So the time of a product grows with its tokens.
    static constexpr bool FITS_TOKENS = Shape::COLUMN_GROUPS == 1;
    static constexpr int TOKENS_STEP = WGMMA_TOKENS_STEP, TOKENS_MIN = FITS_TOKENS ? TOKENS_STEP : TOKENS;

    struct OutputTile {
        // `group` is the first group of 8 tokens.
        int matrix, row_tile, group;
    };

    const LinearParams &params;
    // Tiles of a group of weight rows, without a smaller one, and of all rows, without and with it.
    int whole_of_rows, whole_tiles, output_tiles;

    __device__ explicit MatrixTiles(const LinearParams &params) : params(params) {
        int row_blocks = count_row_tile_groups<Shape::ROW_TILES>(params);
        int all_of_rows = (params.tokens + TOKENS - 1) / TOKENS;
        whole_of_rows = FITS_TOKENS ? params.tokens / TOKENS : all_of_rows;
        whole_tiles = row_blocks * whole_of_rows, output_tiles = row_blocks * all_of_rows;
    }

    __device__ bool find(int index, OutputTile &tile) const {
        if (index >= output_tiles) return false;
        tile = output_tile(index);
        return true;
    }

    // Tiles of one group of weight rows are neighbours, so that blocks that run at the same time
    // read the same weights. Smaller tiles come last, so that the blocks end at nearly the same
    // time.
    __device__ OutputTile output_tile(int index) const {
        bool is_whole = index < whole_tiles;
        int row_block = is_whole ? index / whole_of_rows : index - whole_tiles;
        int token_tile = is_whole ? index % whole_of_rows : whole_of_rows;
        RowTile rows = find_row_tile<Shape::ROW_TILES>(params, row_block);
        return {rows.matrix, rows.first, token_tile * GROUPS};
    }

    __device__ void wait_for_input() const { ::wait_for_input(params); }
    __device__ void end() const { wait_for_products_beside(params); }

    __device__ int col_tiles() const { return params.col_tiles; }
    __device__ int row_tiles(const OutputTile &tile) const { return ::row_tiles(params, tile.matrix); }
    __device__ const uint8_t *weights(const OutputTile &tile) const { return params.weights[tile.matrix]; }
    __device__ const uint8_t *act_tiles() const { return params.act_tiles; }

    // Tokens that a block computes.
    __device__ int block_tokens(const OutputTile &tile) const {
        if (!FITS_TOKENS) return TOKENS;
        int rest = params.tokens - tile.group * ACT_TILE_TOKENS;
        return min(TOKENS, (rest + TOKENS_STEP - 1) / TOKENS_STEP * TOKENS_STEP);
    }

    // Groups that the tokens have. What is computed from other ones is not stored.
    __device__ int groups(const OutputTile &tile) const {
        return min(GROUPS, (params.tokens + ACT_TILE_TOKENS - 1) / ACT_TILE_TOKENS - tile.group);
    }

    // Stores the sums of a warp's 16 rows for N tokens. With store_output() for each element, which
    // was 27 instructions, an output tile of Q4_K and 64 tokens took 1.2 us longer (H200).
    template <int N>
    __device__ void store_tile(const OutputTile &tile, int row_tile, const float (&total)[N / 2]) const {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const int rows = params.rows[tile.matrix], row = (tile.row_tile + row_tile) * TILE_ROWS + g;
        const int token = tile.group * ACT_TILE_TOKENS + 2 * t, tokens_left = params.tokens - token;
        const bool has_row[2] = {row < rows, row + 8 < rows};
        const float *bias = params.bias[tile.matrix];
        float bias_values[2] = {};
        if (bias != nullptr)
#pragma unroll
            for (int r = 0; r < 2; r++) bias_values[r] = has_row[r] ? bias[row + 8 * r] : 0;
        float *to = params.out[tile.matrix] + static_cast<size_t>(token) * rows + row;
#pragma unroll
        for (int group = 0; group < N / ACT_TILE_TOKENS; group++, to += size_t(ACT_TILE_TOKENS) * rows)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float sum = total[4 * group + i];
                const bool has_token = group * ACT_TILE_TOKENS + i % 2 < tokens_left;
                store_if(has_token && has_row[i / 2], to + i % 2 * size_t(rows) + i / 2 * 8,
                         bias != nullptr ? sum + bias_values[i / 2] : sum);
            }
    }
};

template <class Format, class Shape>
__device__ inline void multiply(const LinearParams &params, const F16Sums &sums) {
    using Product = Kernel<Format, Shape, MatrixTiles<Shape>>;
    auto &shared = shared_memory<Format, Shape>();
    Product::init_barriers(shared);
    MatrixTiles<Shape> tiles(params);
    Product{tiles, sums, shared}.run();
}

}  // namespace wgmma_product

#endif
