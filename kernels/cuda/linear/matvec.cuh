// One to four tokens: a lane computes the value of one row's 256 columns, 16 rows by two tiles per warp.
//
// Each warp has a ring of slots of two tiles, which bulk copies keep full without any instruction of the other lanes; its
// first slots are on their way before the predecessor kernel has ended. Values of a row are added in ascending order of
// columns once all of them stand in shared memory: the order that matmul.cuh has too.
//
// Limit: weight bytes over memory bandwidth (an H200 copies at 4.3 TB/s). Arithmetic is about 0.8 (Q4_K) instructions a
// weight and token, where the bandwidth leaves time for 3.9.
// Measured, one token, weights not in L2, in a graph: 4096 x 151936 93% (Q4_K 4.1, Q8_0 4.4, Q6_K 4.2 TB/s); 4096 x 12288
// 71% (Q4_K 9.2 us) to 85% (Q8_0 14.6 us); 4096 x 4096 44% (5.0 us) to 68% (6.1 us): about 2.5 us of each launch are
// its start, the activations and the last sums.

#pragma once

#include "async_copy.cuh"
#include "work.cuh"

namespace matvec {

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int TILES_PER_UNIT = 2;

// Row tiles whose values are collected before they are added: enough that every warp has a unit.
__device__ inline int tiles_per_batch(int units_per_tile) { return units_per_tile >= WARPS ? 1 : (WARPS + units_per_tile - 1) / units_per_tile; }

template <class Format, int M>
__device__ void run(const Work &work, int depth) {
    extern __shared__ __align__(128) uint8_t shared[];
    constexpr int RECORD = record_bytes(Format::SCALING);
    constexpr int SLOT = TILES_PER_UNIT * Format::TILE_BYTES;
    int col_tiles = work.col_tiles;
    int units_per_tile = (col_tiles + TILES_PER_UNIT - 1) / TILES_PER_UNIT;
    int batch_tiles = tiles_per_batch(units_per_tile);
    uint8_t *ring = shared;
    uint8_t *records = ring + WARPS * depth * SLOT;
    float *values = reinterpret_cast<float *>(records + M * col_tiles * RECORD);
    int values_per_batch = batch_tiles * col_tiles * TILE_ROWS * M;
    uint64_t *barriers = reinterpret_cast<uint64_t *>(values + 2 * values_per_batch);

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    ring += warp * depth * SLOT;
    barriers += warp * depth;
    int total = groups_of_all<1>(work);
    int first_tile = static_cast<int64_t>(blockIdx.x) * total / gridDim.x;
    int tiles = static_cast<int64_t>(blockIdx.x + 1) * total / gridDim.x - first_tile;
    int units = tiles * units_per_tile;

    auto issue = [&](int unit, int slot) {
        Place place = place_of_group<1>(work, first_tile + unit / units_per_tile);
        int col = unit % units_per_tile * TILES_PER_UNIT;
        uint32_t bytes = min(TILES_PER_UNIT, col_tiles - col) * Format::TILE_BYTES;
        const uint8_t *from = work.weights[place.matrix] + (static_cast<size_t>(place.first) * col_tiles + col) * Format::TILE_BYTES;
        barrier_expect(barriers + slot, bytes);
        bulk_copy(ring + slot * SLOT, from, bytes, barriers + slot);
    };
    if (lane == 0) {
        for (int slot = 0; slot < depth; slot++) barrier_init(barriers + slot);
        barrier_init_done();
        for (int slot = 0; slot < depth && warp + slot * WARPS < units; slot++) issue(warp + slot * WARPS, slot);
    }
    let_successor_start();
    wait_for_predecessor();

    // Records of the tokens, out of the panels.
    for (int at = threadIdx.x; at < M * col_tiles * (RECORD / 16); at += THREADS) {
        int p = at % (RECORD / 16), record = at / (RECORD / 16), col = record % col_tiles, m = record / col_tiles;
        const uint8_t *panel = work.panels + static_cast<size_t>(col) * panel_bytes(Format::SCALING);
        uint4 v;
        if (p < 16) {
            v = load16(panel + panel_piece(m, p));
        } else if constexpr (Format::SCALING == Scaling::PER_256) {
            if (p == 16) {
                v = {reinterpret_cast<const uint32_t *>(panel + PANEL_QUANTS)[m], 0, 0, 0};
            } else {
                v = load16(panel + PANEL_QUANTS + 32 + m * 32 + (p - 17) * 16);
            }
        } else {
            // Four blocks' scales or sums, eight tokens apart.
            const uint32_t *scales = reinterpret_cast<const uint32_t *>(panel + PANEL_QUANTS) + (p - 16) * 32 + m;
            v = {scales[0], scales[8], scales[16], scales[24]};
        }
        *reinterpret_cast<uint4 *>(records + record * RECORD + p * 16) = v;
    }
    __syncthreads();

    int row = lane % TILE_ROWS, second = lane / TILE_ROWS;
    int unit = warp, slot = 0, phase = 0;
    for (int batch = 0, parity = 0; batch < tiles; batch += batch_tiles, parity ^= 1) {
        int batch_end = min(batch + batch_tiles, tiles);
        float *batch_values = values + parity * values_per_batch;
        for (; unit < batch_end * units_per_tile; unit += WARPS) {
            int tile = unit / units_per_tile - batch, col = unit % units_per_tile * TILES_PER_UNIT + second;
            barrier_wait(barriers + slot, phase);
            if (col < col_tiles) {
                float value[M];
                Format::template dot<M>(ring + slot * SLOT + second * Format::TILE_BYTES, row, records + col * RECORD, col_tiles * RECORD, value);
#pragma unroll
                for (int m = 0; m < M; m++) batch_values[((tile * col_tiles + col) * M + m) * TILE_ROWS + row] = value[m];
            }
            __syncwarp();
            if (lane == 0 && unit + depth * WARPS < units) issue(unit + depth * WARPS, slot);
            if (++slot == depth) slot = 0, phase ^= 1;
        }
        // One barrier a batch is enough: a buffer is written again after the next one, which everybody reaches only when
        // the sums below are done.
        __syncthreads();
        for (int at = threadIdx.x; at < (batch_end - batch) * TILE_ROWS * M; at += THREADS) {
            int r = at % TILE_ROWS, m = at / TILE_ROWS % M, tile = at / TILE_ROWS / M;
            const float *from = batch_values + (tile * col_tiles * M + m) * TILE_ROWS + r;
            float sum = 0;
#pragma unroll 8
            for (int col = 0; col < col_tiles; col++) sum += from[col * M * TILE_ROWS];
            Place place = place_of_group<1>(work, first_tile + batch + tile);
            store(work, place.matrix, place.first * TILE_ROWS + r, m, sum);
        }
    }
}

}  // namespace matvec
