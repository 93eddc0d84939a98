// out = matrix of a slot's expert times the activations of the slot, many slots at a time: the products of linear/matmul.cuh,
// bit for bit, with the matrix picked on the device.
//
// Slots are pairs in order of experts, each expert's begun with a panel of its own (experts.cu: expert_group). An item is one
// group of at most 64 slots of an expert, ROW_TILES tiles of 16 rows, and one of up to two stacks of matrices; block b takes
// items b, b + blocks, ... Stages of 256 columns come through a ring; a warp has one tile of rows and all panels of the group,
// so that weights are made operands once for up to 64 slots, and a group takes as long as it has panels. Values of 256 columns
// are added in ascending order.
// Limit: weight bytes over memory bandwidth up to about 8 slots an expert, then the operations around the tensor cores, as in
// linear/matmul.cuh. Measured on an H200, 128 experts, gate and up of 2048 x 768 in Q4_K: 4 slots an expert 2.6 TB/s of
// weights, 8 2.4, 32 187 TOPS, 128 236. Blocks of 16 tiles, one a multiprocessor, were 8% slower.
#pragma once

#include "../linear/async_copy.cuh"
#include "../linear/tile.cuh"
#include "work.cuh"

// As `TileWork` in experts.rs. Panels are those of slots; without `order`, outputs are those of slots too.
struct ExpertTileWork : ExpertWork {
    int stacks;
    // Stages of the ring.
    int stages;
};

namespace experts {

// Warps of a block, of which a multiprocessor has two.
constexpr int ROW_TILES = 8;
constexpr int GROUP_PANELS = 8;

// Code of its own for each number of panels: branches between panels would keep their operations apart (a fifth slower).
template <class Format, int NT, class Take>
__device__ void products_of(int panels, const uint8_t *tile, const uint8_t *panel, Take take) {
    if constexpr (NT > 1) {
        if (panels < NT) return products_of<Format, NT - 1>(panels, tile, panel, take);
    }
    Format::template products<1, NT>(tile, 0, panel, panel_bytes(Format::SCALING), take);
}

template <class Format>
__device__ void tiles(const ExpertTileWork &work) {
    extern __shared__ __align__(16) uint8_t shared[];
    constexpr int PANEL = panel_bytes(Format::SCALING);
    constexpr int PANELS_AT = ROW_TILES * Format::TILE_BYTES, STAGE = PANELS_AT + GROUP_PANELS * PANEL;
    static_assert(ROW_TILES >= GROUP_PANELS);
    const int col_tiles = work.col_tiles, stages = work.stages;
    const int row_tiles = work.rows / TILE_ROWS, runs = (row_tiles + ROW_TILES - 1) / ROW_TILES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint64_t *const full = reinterpret_cast<uint64_t *>(shared + stages * STAGE), *const empty = full + stages;
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < stages; slot++) {
            barrier_init(full + slot, ROW_TILES);
            barrier_init(empty + slot, ROW_TILES);
        }
        barrier_init_done();
    }
    __syncthreads();
    wait_for_predecessor();
    let_successor_start();

    const int items = *work.group_count * runs * work.stacks;
    // Of each warp's first lane: the next stage, of which it brings the warp's own tile and one panel. A warp's copies start
    // one after the other, so every warp starts some.
    int next_item = blockIdx.x, next_col = 0, next_slot = 0, next_phase = 0;
    const uint8_t *tile_from = nullptr, *panel_from = nullptr;
    auto bring = [&] {
        if (next_item >= items) return;
        if (next_col == 0) {
            const Group group = work.groups[next_item / (runs * work.stacks)];
            const int stack = next_item / runs % work.stacks, tile = next_item % runs * ROW_TILES + warp;
            tile_from = tile < row_tiles ? work.weights[stack] + (size_t(group.expert) * row_tiles + tile) * col_tiles * Format::TILE_BYTES : nullptr;
            panel_from = warp * PANEL_TOKENS < int(group.pairs) ? work.panels + (size_t(group.first / PANEL_TOKENS) + warp) * col_tiles * PANEL : nullptr;
        }
        // The first time, nobody has to have been there.
        barrier_wait(empty + next_slot, next_phase ^ 1);
        uint8_t *stage = shared + next_slot * STAGE;
        barrier_expect(full + next_slot, (tile_from ? Format::TILE_BYTES : 0) + (panel_from ? PANEL : 0));
        if (tile_from) bulk_copy(stage + warp * Format::TILE_BYTES, tile_from + size_t(next_col) * Format::TILE_BYTES, Format::TILE_BYTES, full + next_slot);
        if (panel_from) bulk_copy(stage + PANELS_AT + warp * PANEL, panel_from + size_t(next_col) * PANEL, PANEL, full + next_slot);
        if (++next_col == col_tiles) next_col = 0, next_item += gridDim.x;
        if (++next_slot == stages) next_slot = 0, next_phase ^= 1;
    };
    if (lane == 0)
        for (int slot = 0; slot < stages; slot++) bring();
    __syncwarp();

    // A stage is brought anew when the next one is done, so that a warp seldom waits for the others.
    int slot = 0, phase = 0, behind = stages > 2 ? 1 : 0;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const Group group = work.groups[item / (runs * work.stacks)];
        const int stack = item / runs % work.stacks, first = item % runs * ROW_TILES;
        const int row_tiles_here = min(ROW_TILES, row_tiles - first), panels = (group.pairs + PANEL_TOKENS - 1) / PANEL_TOKENS;
        float own[GROUP_PANELS][4] = {};
        for (int col = 0; col < col_tiles; col++) {
            barrier_wait(full + slot, phase);
            const uint8_t *stage = shared + slot * STAGE;
            auto take = [&](int, int panel, int i, float value) { own[panel][i] += value; };
            if (warp < row_tiles_here) products_of<Format, GROUP_PANELS>(panels, stage + warp * Format::TILE_BYTES, stage + PANELS_AT, take);
            __syncwarp();
            if (lane == 0) {
                barrier_arrive(empty + slot);
                if (behind-- <= 0) bring();
            }
            __syncwarp();
            if (++slot == stages) slot = 0, phase ^= 1;
        }
        if (warp >= row_tiles_here) continue;
        float *const out = work.out[stack] + (first + warp) * TILE_ROWS;
#pragma unroll
        for (int panel = 0; panel < GROUP_PANELS; panel++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int row = lane / 4 + i / 2 * 8, at = panel * PANEL_TOKENS + lane % 4 * 2 + i % 2;
                if (at >= int(group.pairs)) continue;
                uint32_t to = group.first + at;
                if (work.order != nullptr) to = work.order[to];
                out[size_t(to) * work.rows + row] = own[panel][i];
            }
    }
}

}  // namespace experts
