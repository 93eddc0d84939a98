// SPDX-License-Identifier: Apache-2.0

// out[t][r] = sum_k weights[r][k] * x[t][k] + bias[r] with F16 and BF16 weights, for any number of
// tokens. Weights are rows as in the file; `x` is activation tiles of values rounded to the
// weights' type (tile.cuh); `out` is f32 [tokens][rows].
//
//   value = one chain of f32 sums from zero over k16 steps, columns ascending; then the bias
//
// wgmma (sm_90a) and mma.sync give the same bits for a k16 step, whatever the tile and the place in
// it, so neither the number of tokens nor the tile shape changes a result. Columns beyond the row
// are zeros up to a multiple of 64, and every kernel adds them.
//
//   A operand: tokens, 64 per warpgroup        a pipeline stage: UNITS units of 64 columns
//   B operand: weight rows, BN per block
//                                                tokens  [8 tokens][unit][8 rows of 128 bytes]
//             BN weight rows                     weights [unit][BN rows of 128 bytes]
//           +----------------+
//   64      | warpgroup 0    |                 Both are K-major with the 128-byte swizzle: vector p
//   tokens  +----------------+                 of row r is at place p ^ (r % 8). The copy engine
//   64      | warpgroup 1    |                 swizzles weights; activation tiles are written so.
//   tokens  +----------------+
//
//   One warp copies weights and one copies activations, each by one lane. The copies of weights do
//   not wait for the previous kernel.
//
// Limit: weight bytes over memory bandwidth up to 64 tokens, then tensor cores.

#pragma once

#include "async_copy.cuh"
#include "mma.cuh"
#include "params.cuh"
#include "stream_order.cuh"
#include "tensor_copy.cuh"
#include "wgmma.cuh"

namespace float_matmul {

// Columns of a unit: 128 bytes of a row.
constexpr int UNIT_COLS = FLOAT_UNIT_COLS;
constexpr int UNIT_ROW_BYTES = 128;
// Eight rows of a unit.
constexpr int UNIT_TILE_BYTES = 1024;
constexpr int COPY_WARPS = FLOAT_COPY_WARPS;

constexpr int threads(int warpgroups) { return warpgroups * 128 + COPY_WARPS * 32; }

struct Tile {
    int matrix, first_row, first_token;
};

template <class Float, int WARPGROUPS, int BN, int UNITS>
struct Kernel {
    static constexpr int BLOCK_TOKENS = WARPGROUPS * 64;
    static_assert(BN % 16 == 0 && TILE_COLS % (UNITS * UNIT_COLS) == 0);

    const LinearParams &params;
    const FloatMaps &maps;
    int stages, token_rows, row_groups, token_tiles, steps, stage_bytes, weights_at;
    uint8_t *shared;
    uint64_t *full, *empty;

    __device__ Kernel(const LinearParams &p, const FloatMaps &maps, int stages, int token_rows)
        : params(p), maps(maps), stages(stages), token_rows(token_rows) {
        extern __shared__ __align__(128) uint8_t memory[];
        row_groups = 0;
        for (int m = 0; m < p.matrices; m++) row_groups += (p.rows[m] + BN - 1) / BN;
        token_tiles = (p.tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
        steps = (p.cols + UNITS * UNIT_COLS - 1) / (UNITS * UNIT_COLS);
        weights_at = UNITS * token_rows * UNIT_ROW_BYTES;
        stage_bytes = weights_at + UNITS * BN * UNIT_ROW_BYTES;
        full = reinterpret_cast<uint64_t *>(memory);
        empty = full + stages;
        // The swizzle is a function of address bits 4 to 9.
        uint32_t address = shared_address(memory) + 2 * stages * 8;
        shared = memory + 2 * stages * 8 + ((1024 - address % 1024) & 1023);
    }

    // Tiles of one group of weight rows are neighbours, so that blocks that run at the same time
    // read the same weights.
    __device__ bool find_tile(int index, Tile &tile) const {
        if (index >= row_groups * token_tiles) return false;
        int group = index / token_tiles, token_tile = index % token_tiles;
        tile.matrix = 0;
        while (tile.matrix + 1 < params.matrices) {
            int groups = (params.rows[tile.matrix] + BN - 1) / BN;
            if (group < groups) break;
            group -= groups;
            tile.matrix++;
        }
        tile.first_row = group * BN;
        tile.first_token = token_tile * BLOCK_TOKENS;
        return true;
    }

    // Calls `copy(tile, step, stage)` for every stage that is free.
    template <class Copy>
    __device__ void for_each_stage(Copy copy) const {
        int stage = 0, phase = 1;
        Tile tile;
        for (int index = blockIdx.x; find_tile(index, tile); index += gridDim.x)
            for (int step = 0; step < steps; step++) {
                barrier_wait(empty + stage, phase);
                copy(tile, step, stage);
                if (++stage == stages) stage = 0, phase ^= 1;
            }
    }

    // A tensor map of rows whose length is no multiple of 64 has one unit per box.
    __device__ void copy_weights() const {
        for_each_stage([&](const Tile &tile, int step, int stage) {
            const TensorMap *map = &maps.weights[tile.matrix];
            uint8_t *to = shared + stage * stage_bytes + weights_at;
            int unit = step * UNITS;
            barrier_expect(full + stage, UNITS * BN * UNIT_ROW_BYTES);
            if (params.cols % UNIT_COLS == 0) {
                tensor_copy(to, map, 0, tile.first_row, unit, full + stage);
            } else {
                for (int i = 0; i < UNITS; i++)
                    tensor_copy(to + i * BN * UNIT_ROW_BYTES, map, (unit + i) * (UNIT_COLS / 2),
                                tile.first_row, 0, full + stage);
            }
        });
    }

    __device__ void copy_tokens() const {
        for_each_stage([&](const Tile &tile, int step, int stage) {
            barrier_expect(full + stage, UNITS * token_rows * UNIT_ROW_BYTES);
            tensor_copy(shared + stage * stage_bytes, &maps.activations, 0, step * UNITS,
                        tile.first_token / ACT_TILE_TOKENS, full + stage);
        });
    }

    __device__ void store(const Tile &tile, const float (&sums)[BN / 2]) const {
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = params.rows[tile.matrix];
        const float *bias = params.bias[tile.matrix];
        bool pairs = rows % 2 == 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int token = tile.first_token + warp * 16 + half * 8 + lane / 4;
            if (token >= params.tokens) continue;
            float *out = params.out[tile.matrix] + static_cast<size_t>(token) * rows;
#pragma unroll
            for (int j = 0; j < BN / 8; j++) {
                int row = tile.first_row + 8 * j + lane % 4 * 2;
                float2 v = {sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]};
                if (bias != nullptr) {
                    if (row < rows) v.x += bias[row];
                    if (row + 1 < rows) v.y += bias[row + 1];
                }
                if (pairs) {
                    if (row < rows) *reinterpret_cast<float2 *>(out + row) = v;
                } else {
                    if (row < rows) out[row] = v.x;
                    if (row + 1 < rows) out[row + 1] = v.y;
                }
            }
        }
    }

    // Tells the copying warps that this warp no longer reads the stage.
    __device__ void release(int stage) const {
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + stage);
    }

    __device__ void multiply() const {
        int warpgroup = threadIdx.x / 128, stage = 0, phase = 0;
        Tile tile;
        for (int index = blockIdx.x; find_tile(index, tile); index += gridDim.x) {
            float sums[BN / 2];
#pragma unroll
            for (int i = 0; i < BN / 2; i++) sums[i] = 0.0f;
            int used = -1;
            for (int step = 0; step < steps; step++) {
                barrier_wait(full + stage, phase);
                const uint8_t *tokens =
                                  shared + stage * stage_bytes + warpgroup * 64 * UNITS * UNIT_ROW_BYTES,
                              *weights = shared + stage * stage_bytes + weights_at;
                begin_products(sums);
                // Without a branch: ptxas runs wgmma instructions of a branch one by one (C7520).
#pragma unroll
                for (int unit = 0; unit < UNITS; unit++)
                    multiply_unit<Float, BN, UNITS>(sums, tokens + unit * UNIT_TILE_BYTES,
                                                    weights + unit * BN * UNIT_ROW_BYTES);
                // The products of the step before have ended; those of this one may run on.
                end_products(sums);
                if (used >= 0) release(used);
                used = stage;
                if (++stage == stages) stage = 0, phase ^= 1;
            }
            wait_for_products(sums);
            if (used >= 0) release(used);
            store(tile, sums);
        }
    }

    __device__ void run() {
        if (threadIdx.x == 0) {
            for (int s = 0; s < stages; s++) {
                barrier_init(full + s, COPY_WARPS);
                barrier_init(empty + s, 4 * WARPGROUPS);
            }
            barrier_init_done();
        }
        __syncthreads();
        launch_next_kernel();
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (warp < 4 * WARPGROUPS) {
            multiply();
        } else if (warp == 4 * WARPGROUPS) {
            if (lane == 0) copy_weights();
        } else {
            wait_for_previous_kernel();
            if (lane == 0) copy_tokens();
        }
    }
};

}  // namespace float_matmul
