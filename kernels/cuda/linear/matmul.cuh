// SPDX-License-Identifier: Apache-2.0

// out[t][r] = sum_k weights[r][k] * x[t][k] + bias[r] on the tensor cores. Used for more tokens
// than matvec.cuh takes. `out` is f32 [tokens][rows]. Weights are tiles; `x` is activation tiles
// (tile.cuh). A block has WM x WN x WK warps; each computes MT row tiles by NT activation tiles.
//
//                    activation tiles
//                    (8 tokens x 256 columns)
//                      NT        NT
//                    +-----+   +-----+       An output tile of a block is ROW_TILES x ACT_TILES
//                    | wn0 |   | wn1 |       tiles:
//   weight tiles     +-----+   +-----+         ROW_TILES = MT * WM row tiles of 16 rows
//   (16 rows x 256                             ACT_TILES = NT * WN activation tiles of 8 tokens
//    columns)                                WK warps share each place of this grid of warps:
//   +----------+     +---------+---------+   warp wk computes column tile WK * step + wk.
//   | MT  wm0  |     | wm0 wn0 | wm0 wn1 |
//   +----------+     +---------+---------+   mma.m16n8k32 or m16n8k16 (s8).
//   | MT  wm1  |     | wm1 wn0 | wm1 wn1 |   A fragments are weights, B fragments activations,
//   +----------+     +---------+---------+   both by ldmatrix. Lane 4 g + t holds C[g][2t],
//                                            C[g][2t+1], C[g+8][2t] and C[g+8][2t+1].
//
//   Pipeline: a stage holds WK column tiles of ROW_TILES row tiles and ACT_TILES activation tiles.
//     bulk copies  step 0 -> stage 0 | step 1 -> stage 1 | step 2 -> stage 2 | step 3 -> stage 0
//     MMA                            | step 0            | step 1            | step 2
//     epilogue     adds the WK values of an element in ascending order of columns (by way of shared
//                  memory if WK > 1), and stores the output tile after its last step
//   A block walks over the steps of all its output tiles without a gap.
//
// Values of 256 columns are added in ascending order of columns. This is the order of matvec.cuh,
// whatever MT, NT, WM, WN and WK are.
//
// Limit: weight bytes over memory bandwidth up to about 64 tokens; above that the operations around
// the tensor cores. Per 16 x 8 x 32 step of 4,096 products, these are four multiply-adds of
// sub-scales (k-quants, half rate) or twelve f32 operations (legacy).
//
// Measured on an H200, whose mma.sync makes 1,240 TOPS of 8-bit products:
//
//   512 tokens   Q4_K 265 to 290, Q8_0 241 to 260, Q6_K 196 to 210 TOPS; instructions are issued in
//                60% of cycles, tensor cores are busy in 25%
//   32 tokens    Q8_0 2.1, Q4_K 1.3 TB/s of weights
//   8 tokens     Q8_0 3.4, Q4_K 2.5 TB/s of weights
//
// One warp that starts all copies is slower: the copies of a warp's lanes start one after the
// other, some 50 ns each. Tried, and within 5% of 16 warps of 32 x 32: warps of 32 x 64 (8 a block,
// 255 registers), and two blocks of 128 x 64 a multiprocessor.

#pragma once

#include "async_copy.cuh"
#include "params.cuh"

namespace matmul {

template <class Format, int MT, int NT, int WM, int WN, int WK>
struct BlockShape {
    static constexpr int THREADS = 32 * WM * WN * WK;
    static constexpr int ROW_TILES = MT * WM;
    static constexpr int ACT_TILES = NT * WN;
    static constexpr int ACT_TILE_BYTES = act_tile_bytes(Format::ACTIVATION);
    static constexpr int TILE_STRIDE = WK * Format::TILE_BYTES;
    static constexpr int ACT_TILE_STRIDE = WK * ACT_TILE_BYTES;
    static constexpr int STAGE = ROW_TILES * TILE_STRIDE + ACT_TILES * ACT_TILE_STRIDE;
    // Values that wait to be added, if more than one warp contributes to an element.
    static constexpr int VALUES = ROW_TILES * ACT_TILES * 128;
    static constexpr int PARTIAL_SUM_BYTES = WK > 1 ? 2 * WK *VALUES * 4 : 0;
};

template <class Format, int MT, int NT, int WM, int WN, int WK>
__device__ void multiply(const LinearParams &params, int stages) {
    using Block = BlockShape<Format, MT, NT, WM, WN, WK>;
    extern __shared__ __align__(128) uint8_t shared[];
    float *partial_sums = reinterpret_cast<float *>(shared + stages * Block::STAGE);
    uint64_t *barriers =
        reinterpret_cast<uint64_t *>(shared + stages * Block::STAGE + Block::PARTIAL_SUM_BYTES);

    int col_tiles = params.col_tiles;
    int act_tiles = (params.tokens + ACT_TILE_TOKENS - 1) / ACT_TILE_TOKENS;
    int token_groups = (act_tiles + Block::ACT_TILES - 1) / Block::ACT_TILES;
    int output_tiles = count_row_tile_groups<Block::ROW_TILES>(params) * token_groups;
    int steps = (col_tiles + WK - 1) / WK;
    int first_output_tile = static_cast<int64_t>(blockIdx.x) * output_tiles / gridDim.x;
    int last_output_tile = static_cast<int64_t>(blockIdx.x + 1) * output_tiles / gridDim.x;

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    // A thread makes one copy per stage: WK * 256 columns of a row tile or of an activation tile.
    // Copies are dealt to the warps in turn, because the copies of a warp's lanes start one after
    // the other. Tiles beyond the matrix or the tokens are not copied; what is computed from them
    // is not stored.
    constexpr int WARPS = WM * WN * WK, WEIGHT_COPIES = Block::ROW_TILES;
    static_assert(WEIGHT_COPIES + Block::ACT_TILES <= Block::THREADS);
    int own_copy = lane * WARPS + warp;
    int next_output_tile = first_output_tile, next_step = 0, next_stage = 0, weight_copies_here = 0,
        act_tiles_here = 0;
    const uint8_t *from = nullptr;
    auto load_next_stage = [&] {
        if (own_copy >= WEIGHT_COPIES + Block::ACT_TILES || next_output_tile >= last_output_tile) return;
        if (next_step == 0) {
            RowTile row_tile = find_row_tile<Block::ROW_TILES>(params, next_output_tile / token_groups);
            int act_tile = next_output_tile % token_groups * Block::ACT_TILES, copy = own_copy;
            act_tiles_here = min(Block::ACT_TILES, act_tiles - act_tile);
            weight_copies_here = min(WEIGHT_COPIES, row_tiles(params, row_tile.matrix) - row_tile.first);
            from = params.weights[row_tile.matrix] +
                   static_cast<size_t>(row_tile.first + copy) * col_tiles * Format::TILE_BYTES;
            if (own_copy >= WEIGHT_COPIES)
                from = params.act_tiles + static_cast<size_t>(act_tile + copy - WEIGHT_COPIES) * col_tiles *
                                              Block::ACT_TILE_BYTES;
        }
        int cols = min(WK, col_tiles - next_step * WK);
        int weight_copy_bytes = cols * Format::TILE_BYTES;
        uint64_t *barrier = barriers + next_stage;
        uint8_t *stage = shared + next_stage * Block::STAGE;
        if (own_copy == 0)
            barrier_expect(barrier, weight_copies_here * weight_copy_bytes +
                                        act_tiles_here * cols * Block::ACT_TILE_BYTES);
        if (own_copy < WEIGHT_COPIES) {
            if (own_copy < weight_copies_here)
                bulk_copy(stage + own_copy * Block::TILE_STRIDE, from, weight_copy_bytes, barrier);
            from += WK * Format::TILE_BYTES;
        } else {
            int act_tile = own_copy - WEIGHT_COPIES;
            if (act_tile < act_tiles_here)
                bulk_copy(stage + Block::ROW_TILES * Block::TILE_STRIDE + act_tile * Block::ACT_TILE_STRIDE,
                          from, cols * Block::ACT_TILE_BYTES, barrier);
            from += WK * Block::ACT_TILE_BYTES;
        }
        if (++next_step == steps) next_step = 0, next_output_tile++;
        if (++next_stage == stages) next_stage = 0;
    };

    if (threadIdx.x == 0) {
        for (int stage_index = 0; stage_index < stages; stage_index++) barrier_init(barriers + stage_index);
        barrier_init_done();
    }
    __syncthreads();
    // The first stages' weights need not wait for the previous kernel; the activations must.
    if (own_copy < WEIGHT_COPIES)
        for (int stage_index = 0; stage_index < stages; stage_index++) load_next_stage();
    wait_for_input(params);
    launch_next_kernel();
    if (own_copy >= WEIGHT_COPIES)
        for (int stage_index = 0; stage_index < stages; stage_index++) load_next_stage();
    __syncwarp();

    int wk = warp % WK, wn = warp / WK % WN, wm = warp / WK / WN;
    int stage_index = 0, phase = 0, parity = 0;
    for (int output_tile = first_output_tile; output_tile < last_output_tile; output_tile++) {
        constexpr int SUMS = WK > 1 ? (Block::VALUES + Block::THREADS - 1) / Block::THREADS : 1;
        float sums[SUMS] = {};
        float own[WK == 1 ? MT : 1][NT][4] = {};
        for (int step = 0; step < steps; step++) {
            int cols = min(WK, col_tiles - step * WK);
            float *values = partial_sums + parity * WK * Block::VALUES;
            barrier_wait(barriers + stage_index, phase);
            if (wk < cols) {
                const uint8_t *stage = shared + stage_index * Block::STAGE;
                const uint8_t *tile = stage + wm * MT * Block::TILE_STRIDE + wk * Format::TILE_BYTES;
                const uint8_t *act_tile = stage + Block::ROW_TILES * Block::TILE_STRIDE +
                                          wn * NT * Block::ACT_TILE_STRIDE + wk * Block::ACT_TILE_BYTES;
                auto accumulate = [&](int mt, int nt, int i, float value) {
                    if constexpr (WK == 1) {
                        own[mt][nt][i] += value;
                    } else {
                        values[wk * Block::VALUES +
                               (((wm * MT + mt) * Block::ACT_TILES + wn * NT + nt) * 4 + i) * 32 + lane] =
                            value;
                    }
                };
                Format::template products<MT, NT>(tile, Block::TILE_STRIDE, act_tile, Block::ACT_TILE_STRIDE,
                                                  accumulate);
            }
            end_loads_before_copy();
            __syncthreads();
            load_next_stage();
            if constexpr (WK > 1) {
                for (int k = 0; k < cols; k++)
#pragma unroll
                    for (int j = 0; j < SUMS; j++) {
                        int at = j * Block::THREADS + threadIdx.x;
                        if (at < Block::VALUES) sums[j] += values[k * Block::VALUES + at];
                    }
                parity ^= 1;
            }
            if (++stage_index == stages) stage_index = 0, phase ^= 1;
        }
        RowTile row_tile = find_row_tile<Block::ROW_TILES>(params, output_tile / token_groups);
        int first_row = row_tile.first * TILE_ROWS,
            first_token = output_tile % token_groups * Block::ACT_TILES * ACT_TILE_TOKENS;
        auto store_element = [&](int tile, int act_tile, int i, int l, float value) {
            int row = tile * TILE_ROWS + l / 4 + i / 2 * 8,
                token = act_tile * ACT_TILE_TOKENS + l % 4 * 2 + i % 2;
            // A group of row tiles belongs to one matrix. It may reach beyond that matrix's rows,
            // which `store_output` checks.
            store_output(params, row_tile.matrix, first_row + row, first_token + token, value);
        };
        if constexpr (WK > 1) {
#pragma unroll
            for (int j = 0; j < SUMS; j++) {
                int at = j * Block::THREADS + threadIdx.x, element = at / 32;
                if (at < Block::VALUES)
                    store_element(element / 4 / Block::ACT_TILES, element / 4 % Block::ACT_TILES, element % 4,
                                  at % 32, sums[j]);
            }
        } else {
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
#pragma unroll
                for (int nt = 0; nt < NT; nt++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        store_element(wm * MT + mt, wn * NT + nt, i, lane, own[mt][nt][i]);
        }
    }
    wait_for_products_beside(params);
}

}  // namespace matmul
