// Five tokens and more: tensor cores, WM x WN x WK warps of MT row tiles by NT panels each.
//
// A stage brings WK tiles of MT * WM row tiles and WK panels of NT * WN token groups; blocks walk the stages of all their
// items without a gap. The WK warps of one place compute the values of WK successive runs of 256 columns, which are then
// added in ascending order: the order of matvec.cuh, whatever the numbers are.
//
// Limit: weight bytes over memory bandwidth up to about 64 tokens, then the operations around the tensor cores: per 16 x 8
// x 32 step of 4,096 products, four multiply-adds of sub-scales (k-quants, half rate) or twelve f32 operations (legacy).
// Measured on an H200, whose mma.sync makes 1,240 TOPS of 8-bit products: at 512 tokens Q4_K 265 to 290, Q8_0 220 to 235,
// Q6_K 190 to 200 TOPS; instructions are issued in 60% of cycles, tensor cores busy in 25%. At 8 tokens Q8_0 3.4 and Q4_K
// 2.5 TB/s of weights, at 32 tokens 2.1 and 1.3. BF16 at 8 tokens: 4.0 TB/s, and 1.8 while one warp started all copies, which
// its lanes do one by one, at some 50 ns each.
// Tried: warps of 32 x 64 (8 a block, 255 registers) and two blocks of 128 x 64 an SM were within 5% of 16 warps of 32 x 32.

#pragma once

#include "async_copy.cuh"
#include "work.cuh"

namespace matmul {

template <class Format, int MT, int NT, int WM, int WN, int WK>
struct Shape {
    static constexpr int THREADS = 32 * WM * WN * WK;
    static constexpr int ROW_TILES = MT * WM;
    static constexpr int PANELS = NT * WN;
    static constexpr int PANEL = panel_bytes(Format::SCALING);
    // Rows as in the file are brought one by one; 16 bytes more between them spread them over the banks.
    static constexpr bool ROWS = parts_of(Format::SCALING) > 0;
    static constexpr int ROW_STRIDE = WK * Format::TILE_BYTES + 16;
    static constexpr int TILE_STRIDE = ROWS ? TILE_ROWS * ROW_STRIDE : WK * Format::TILE_BYTES;
    static constexpr int PANEL_STRIDE = WK * PANEL;
    static constexpr int STAGE = ROW_TILES * TILE_STRIDE + PANELS * PANEL_STRIDE;
    // Values that wait for their sum, where more than one warp adds to an element.
    static constexpr int VALUES = ROW_TILES * PANELS * 128;
    static constexpr int EXCHANGE = WK > 1 ? 2 * WK * VALUES * 4 : 0;
};

template <class Format, int MT, int NT, int WM, int WN, int WK>
__device__ void run(const Work &work, int stages) {
    using S = Shape<Format, MT, NT, WM, WN, WK>;
    extern __shared__ __align__(128) uint8_t shared[];
    float *exchange = reinterpret_cast<float *>(shared + stages * S::STAGE);
    uint64_t *barriers = reinterpret_cast<uint64_t *>(shared + stages * S::STAGE + S::EXCHANGE);

    int col_tiles = work.col_tiles;
    int panels = (work.tokens + PANEL_TOKENS - 1) / PANEL_TOKENS;
    int token_groups = (panels + S::PANELS - 1) / S::PANELS;
    int items = groups_of_all<S::ROW_TILES>(work) * token_groups;
    int steps = (col_tiles + WK - 1) / WK;
    int first_item = static_cast<int64_t>(blockIdx.x) * items / gridDim.x;
    int last_item = static_cast<int64_t>(blockIdx.x + 1) * items / gridDim.x;

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    // A thread brings one run of bytes of each stage: a row of floats or a tile of quants, WK * 256 columns of it, or a panel.
    // Runs go to the warps in turn: the copies of a warp's lanes start one after the other. Tiles and panels beyond the
    // matrix or the tokens are left as they are, and what is computed of them is not stored.
    constexpr int WARPS = WM * WN * WK, RUNS = S::ROWS ? S::ROW_TILES * TILE_ROWS : S::ROW_TILES;
    static_assert(RUNS + S::PANELS <= S::THREADS);
    int own_run = lane * WARPS + warp;
    int next_item = first_item, next_step = 0, next_slot = 0, runs_there = 0, panels_there = 0;
    const uint8_t *from = nullptr;
    auto bring = [&] {
        if (own_run >= RUNS + S::PANELS || next_item >= last_item) return;
        if (next_step == 0) {
            Place place = place_of_group<S::ROW_TILES>(work, next_item / token_groups);
            int panel = next_item % token_groups * S::PANELS, run = own_run;
            panels_there = min(S::PANELS, panels - panel);
            if constexpr (S::ROWS) {
                runs_there = min(RUNS, work.rows[place.matrix] - place.first * TILE_ROWS);
                from = work.weights[place.matrix] + (static_cast<size_t>(place.first) * TILE_ROWS + run) * work.cols * 2;
            } else {
                runs_there = min(RUNS, row_tiles(work, place.matrix) - place.first);
                from = work.weights[place.matrix] + static_cast<size_t>(place.first + run) * col_tiles * Format::TILE_BYTES;
            }
            if (own_run >= RUNS) from = work.panels + static_cast<size_t>(panel + run - RUNS) * col_tiles * S::PANEL;
        }
        int cols = min(WK, col_tiles - next_step * WK);
        int run_bytes = S::ROWS ? min(WK * TILE_COLS, work.cols - next_step * WK * TILE_COLS) * 2 : cols * Format::TILE_BYTES;
        uint64_t *barrier = barriers + next_slot;
        uint8_t *stage = shared + next_slot * S::STAGE;
        if (own_run == 0) barrier_expect(barrier, runs_there * run_bytes + panels_there * cols * S::PANEL);
        if (own_run < RUNS) {
            if (own_run < runs_there) bulk_copy(stage + own_run * (S::ROWS ? S::ROW_STRIDE : S::TILE_STRIDE), from, run_bytes, barrier);
            from += WK * (S::ROWS ? TILE_COLS * 2 : Format::TILE_BYTES);
        } else {
            int panel = own_run - RUNS;
            if (panel < panels_there) bulk_copy(stage + S::ROW_TILES * S::TILE_STRIDE + panel * S::PANEL_STRIDE, from, cols * S::PANEL, barrier);
            from += WK * S::PANEL;
        }
        if (++next_step == steps) next_step = 0, next_item++;
        if (++next_slot == stages) next_slot = 0;
    };

    if (threadIdx.x == 0) {
        for (int slot = 0; slot < stages; slot++) barrier_init(barriers + slot);
        barrier_init_done();
    }
    __syncthreads();
    // The weights of the first stages need not wait for the predecessor, the activations do.
    if (own_run < RUNS)
        for (int slot = 0; slot < stages; slot++) bring();
    let_successor_start();
    wait_for_predecessor();
    if (own_run >= RUNS)
        for (int slot = 0; slot < stages; slot++) bring();
    __syncwarp();

    int wk = warp % WK, wn = warp / WK % WN, wm = warp / WK / WN;
    int slot = 0, phase = 0, parity = 0;
    for (int item = first_item; item < last_item; item++) {
        constexpr int SUMS = WK > 1 ? (S::VALUES + S::THREADS - 1) / S::THREADS : 1;
        float sums[SUMS] = {};
        float own[WK == 1 ? MT : 1][NT][4] = {};
        for (int step = 0; step < steps; step++) {
            int cols = min(WK, col_tiles - step * WK);
            float *values = exchange + parity * WK * S::VALUES;
            barrier_wait(barriers + slot, phase);
            if (wk < cols) {
                const uint8_t *stage = shared + slot * S::STAGE;
                const uint8_t *tile = stage + wm * MT * S::TILE_STRIDE + wk * Format::TILE_BYTES;
                const uint8_t *panel = stage + S::ROW_TILES * S::TILE_STRIDE + wn * NT * S::PANEL_STRIDE + wk * S::PANEL;
                auto take = [&](int mt, int nt, int i, float value) {
                    if constexpr (WK == 1) {
                        own[mt][nt][i] += value;
                    } else {
                        values[wk * S::VALUES + (((wm * MT + mt) * S::PANELS + wn * NT + nt) * 4 + i) * 32 + lane] = value;
                    }
                };
                if constexpr (S::ROWS) {
                    int valid = work.cols - (step * WK + wk) * TILE_COLS;
                    Format::template products<MT, NT>(tile, S::TILE_STRIDE, panel, S::PANEL_STRIDE, valid, take);
                } else {
                    Format::template products<MT, NT>(tile, S::TILE_STRIDE, panel, S::PANEL_STRIDE, take);
                }
            }
            __syncthreads();
            bring();
            if constexpr (WK > 1) {
                for (int k = 0; k < cols; k++)
#pragma unroll
                    for (int j = 0; j < SUMS; j++) {
                        int at = j * S::THREADS + threadIdx.x;
                        if (at < S::VALUES) sums[j] += values[k * S::VALUES + at];
                    }
                parity ^= 1;
            }
            if (++slot == stages) slot = 0, phase ^= 1;
        }
        Place place = place_of_group<S::ROW_TILES>(work, item / token_groups);
        int first_row = place.first * TILE_ROWS, first_token = item % token_groups * S::PANELS * PANEL_TOKENS;
        auto put = [&](int tile, int panel, int i, int l, float value) {
            int row = tile * TILE_ROWS + l / 4 + i / 2 * 8, token = panel * PANEL_TOKENS + l % 4 * 2 + i % 2;
            // Row tiles of a group never reach into the next matrix: its rows are checked, not the group's.
            store(work, place.matrix, first_row + row, first_token + token, value);
        };
        if constexpr (WK > 1) {
#pragma unroll
            for (int j = 0; j < SUMS; j++) {
                int at = j * S::THREADS + threadIdx.x, element = at / 32;
                if (at < S::VALUES) put(element / 4 / S::PANELS, element / 4 % S::PANELS, element % 4, at % 32, sums[j]);
            }
        } else {
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
#pragma unroll
                for (int nt = 0; nt < NT; nt++)
#pragma unroll
                    for (int i = 0; i < 4; i++) put(wm * MT + mt, wn * NT + nt, i, lane, own[mt][nt][i]);
        }
    }
}

}  // namespace matmul
