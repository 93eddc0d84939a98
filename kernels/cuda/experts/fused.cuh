// SPDX-License-Identifier: Apache-2.0

// The experts of 2 to 8 rows in one launch: routing, gate and up, activation, and down. The bits
// are those of expert_route, expert_matmul_* and silu_and_mul_*.
//
//   copying warp          | gate and up, row tile by row tile     | down ...                 |
//   multiplying warps     route |  gate and up                    | quantize |  down
//   adding warps                |    sums of gate and up          | quantize |    sums of down
//   weighing warp         weights of pairs (block r: those of row r)
//
// Each block routes all rows itself. Only expert_combine reads the weights of pairs, so a warp of
// its own computes them. The rows are one activation tile, which serves all experts: a
// group is an expert with the rows that have chosen it, and the others of its 8 sums are dropped.
// The row tiles of all groups are divided among the blocks, those of gate and up and then those of
// down. linear/skinny_pipeline.cuh has the work of the warps.
//
// The down product of a group needs its gate and up from all blocks that have row tiles of them. So
// `finished` counts the row tiles of each group that are in memory. When a block has stored its
// own, a lane waits for each group of the block's down product, at most two, and the warps quantize
// the activations into shared memory. Meanwhile the ring fills with weights of down.
//
// Blocks wait for each other, so all must be resident. The launcher starts one for each
// multiprocessor, and does not use this kernel if other processes may have some of them (MPS). A
// process has one stream that computes. expert_combine sets `finished` to 0 again.
//
// Limit: weight bytes over memory bandwidth. With 8 rows of qwen3-30b-a3b and 49 to 57 groups on
// an H200, a block took 23 to 29 us for gate and up, 1 to 4 until it had quantized, and 12 to 15
// (Q4_K) or 17 to 20 (Q6_K) for down (decision 0077). Routing takes 5,200 cycles.

#pragma once

#include "../activation.cuh"
#include "../linear/quantize.cuh"
#include "../linear/skinny_pipeline.cuh"
#include "abi/experts.cuh"
#include "routing.cuh"

namespace expert_fused {

using skinny::ADDING_WARPS, skinny::COPYING_WARP, skinny::TILES, skinny::WARPS;

constexpr int ROWS = EXPERT_FUSED_ROWS, PAIRS_MAX = EXPERT_FUSED_PAIRS_MAX;
static_assert(ROWS == ACT_TILE_TOKENS && ROWS <= WARPS,
              "a warp routes a row, a token of the activation tile");
// The warps of skinny_pipeline.cuh, and one that computes the weights of pairs.
constexpr int PIPELINE_THREADS = skinny::THREADS, WEIGHING_WARP = PIPELINE_THREADS / 32;
constexpr int THREADS = PIPELINE_THREADS + 32;
static_assert(THREADS == EXPERT_FUSED_THREADS);
// Gate and up.
constexpr int STACKS = 2;
// Groups of the down product that a block has row tiles of.
constexpr int DOWN_GROUPS = EXPERT_FUSED_DOWN_GROUPS;
static_assert(DOWN_GROUPS == 2);

// A rank for each row, or NO_RANK if the row has not chosen the expert.
using Ranks = uint64_t;
static_assert(sizeof(Ranks) == ROWS);
constexpr Ranks NO_RANKS = ~Ranks(0);
constexpr uint32_t NO_RANK = 255;

// The choices of all rows, in shared memory.
struct Routing {
    Ranks ranks_of[EXPERTS_MAX];
    // In the order of experts.
    Ranks ranks[PAIRS_MAX];
    uint16_t experts[PAIRS_MAX];
    uint32_t groups;

    // All threads of the block, before the first row chooses.
    __device__ void clear() {
        for (int e = threadIdx.x; e < EXPERTS_MAX; e += THREADS) ranks_of[e] = NO_RANKS;
    }

    __device__ void choose(int row, int rank, uint32_t expert) {
        reinterpret_cast<uint8_t *>(ranks_of + expert)[row] = uint8_t(rank);
    }

    // The calling warp makes groups. Each lane has successive experts.
    __device__ void make_groups(int count) {
        const int lane = threadIdx.x % 32, each = (count + 31) / 32;
        const int first = min(lane * each, count), last = min(first + each, count);
        uint32_t own = 0;
        for (int e = first; e < last; e++) own += ranks_of[e] != NO_RANKS;
        uint32_t sum = own;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            uint32_t lower = __shfl_up_sync(~0u, sum, distance);
            if (lane >= distance) sum += lower;
        }
        if (lane == 31) groups = sum;
        uint32_t at = sum - own;
        for (int e = first; e < last; e++)
            if (ranks_of[e] != NO_RANKS) ranks[at] = ranks_of[e], experts[at++] = uint16_t(e);
    }
};
static_assert(sizeof(Routing) <= EXPERT_FUSED_ROUTING_BYTES);

// As activation::multiply, in one copy: see experts::exp_of.
static __noinline__ __device__ float silu_and_multiply(float gate, float up) {
    return activation::multiply<activation::Silu>(gate, up);
}

// A count is in a cache line of its own: blocks read it again and again.
constexpr int COUNT_STRIDE = EXPERT_FUSED_COUNT_STRIDE;

// Barriers of some of the warps.
constexpr int SUMS_BARRIER = 1, ROUTING_BARRIER = 2;

template <int BARRIER, int COUNT>
__device__ inline void sync_threads() {
    asm volatile("barrier.sync %0, %1;" ::"n"(BARRIER), "n"(COUNT) : "memory");
}

// Adds to a count of stored row tiles. All adding warps call it, and their stores come first.
__device__ inline void finish_row_tiles(uint32_t *count, int row_tiles) {
    delay_at_random();
    sync_threads<SUMS_BARRIER, 32 * ADDING_WARPS>();
    if (threadIdx.x == 32 * WARPS) {
        __threadfence();
        atomicAdd(count, row_tiles);
    }
}

// Waits until all row tiles have been stored.
__device__ inline void wait_for_row_tiles(const uint32_t *count, uint32_t row_tiles) {
    uint32_t found;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(count) : "memory");
    } while (found < row_tiles);
}

template <class In, class Down>
struct Layer {
    static constexpr int STAGE_BYTES =
        TILES * (In::TILE_BYTES > Down::TILE_BYTES ? In::TILE_BYTES : Down::TILE_BYTES);
    using InPipeline = skinny::Pipeline<In, 1, STAGE_BYTES>;
    using DownPipeline = skinny::Pipeline<Down, 1, STAGE_BYTES>;
    using DownQuantizer = typename QuantizerOf<Down::ACTIVATION>::Type;

    const ExpertFusedParams &params;
    Routing &routing;
    // Row tiles and column tiles of an expert's matrix: gate and up, and down.
    const int in_row_tiles, in_col_tiles, down_row_tiles, down_col_tiles;
    // The same memory, barriers and warps.
    InPipeline in;
    DownPipeline down;
    // Barriers of the groups of the block's down product, behind in.act_full[0], which is for the
    // rows. The first ones complete when activations are quantized, the others when gate and up
    // are in memory.
    uint64_t *const down_act_full;
    uint64_t *const down_ready;
    // Row tiles of the block, counted over all groups.
    skinny::Run in_run, down_run;

    __device__ Layer(const ExpertFusedParams &params, uint8_t *shared)
        : params(params),
          routing(*reinterpret_cast<Routing *>(shared)),
          in_row_tiles(params.hidden / TILE_ROWS),
          in_col_tiles((params.width + TILE_COLS - 1) / TILE_COLS),
          down_row_tiles(params.width / TILE_ROWS),
          down_col_tiles((params.hidden + TILE_COLS - 1) / TILE_COLS),
          in(params.stages, in_col_tiles, act_bytes(), shared + EXPERT_FUSED_ROUTING_BYTES),
          down(params.stages, down_col_tiles, act_bytes(), shared + EXPERT_FUSED_ROUTING_BYTES),
          down_act_full(in.act_full + 1),
          down_ready(down_act_full + DOWN_GROUPS) {
        down.act_tiles += in_act_bytes();
    }

    __device__ int in_act_bytes() const { return in_col_tiles * InPipeline::ACT_TILE_BYTES; }
    __device__ int act_bytes() const {
        return in_act_bytes() + DOWN_GROUPS * down_col_tiles * DownPipeline::ACT_TILE_BYTES;
    }

    __device__ void init_barriers() const {
        in.init_barriers(1);
        if (in.warp == 0) {
            for (int slot = 0; slot < DOWN_GROUPS; slot++) {
                barrier_init(down_act_full + slot, 32 * (WARPS + ADDING_WARPS));
                barrier_init(down_ready + slot);
            }
            barrier_init_done();
        }
    }

    // Warp r chooses the experts of row r.
    __device__ void route() {
        if (in.warp < params.rows)
            experts::choose_experts(
                params.logits, in.warp, params.expert_count, params.used,
                [&](int rank, uint32_t expert) { routing.choose(in.warp, rank, expert); });
        sync_threads<ROUTING_BARRIER, PIPELINE_THREADS>();
        if (in.warp == 0) routing.make_groups(params.expert_count);
        sync_threads<ROUTING_BARRIER, PIPELINE_THREADS>();
        const int groups = int(routing.groups);
        in_run = skinny::divide(groups * STACKS * in_row_tiles, blockIdx.x, gridDim.x);
        down_run = skinny::divide(groups * down_row_tiles, blockIdx.x, gridDim.x);
        in.tiles = in_run.count * in_col_tiles, down.tiles = down_run.count * down_col_tiles;
    }

    // The tiles that are left are those of matrix `index`. Matrices are counted group by group.
    struct Cursor : skinny::WeightCursor {
        int index;
    };

    template <class Pipeline>
    __device__ void begin_matrix(Cursor &cursor, int stacks, const uint8_t *const *weights, int row_tiles,
                                 int col_tiles, int first) const {
        const size_t expert = routing.experts[cursor.index / stacks];
        cursor.from =
            weights[cursor.index % stacks] + (expert * row_tiles + first) * col_tiles * Pipeline::TILE_BYTES;
        cursor.left = (row_tiles - first) * col_tiles;
    }

    // Copies the weights of a product.
    template <class Pipeline>
    __device__ void copy(const Pipeline &pipeline, int &stage, int &phase, int stacks,
                         const uint8_t *const *weights, int row_tiles, int first_row_tile) const {
        if (pipeline.tiles == 0) return;
        Cursor cursor = {};
        cursor.index = first_row_tile / row_tiles;
        auto begin = [&](int first) {
            begin_matrix<Pipeline>(cursor, stacks, weights, row_tiles, pipeline.col_tiles, first);
        };
        begin(first_row_tile % row_tiles);
#pragma unroll 1
        while (cursor.copied < pipeline.tiles) {
            if (stage == pipeline.stages) stage = 0, phase ^= 1;
            barrier_wait(pipeline.empty + stage, phase);
            pipeline.copy_stage(cursor, stage++, [&] { cursor.index++, begin(0); });
        }
    }

    // The copying lane. The block must not end before a copy has. Stages without tiles are full at
    // once, so that the down product begins with a round.
    __device__ void copy() const {
        int stage = 0, phase = 1;
        if (in.tiles == 0) barrier_wait(in.act_full, 0);
        copy(in, stage, phase, STACKS, params.weights, in_row_tiles, in_run.first);
#pragma unroll 1
        for (; stage % skinny::ROUND_STAGES != 0; stage++) {
            barrier_wait(in.empty + stage, phase);
            barrier_arrive(in.full + stage);
        }
        copy(down, stage, phase, 1, params.weights + STACKS, down_row_tiles, down_run.first);
    }

    // The groups of the block's down product.
    __device__ int groups_of_down() const {
        return down.tiles == 0 ? 0 : down.tiles > tiles_of_first_group() ? 2 : 1;
    }

    // Weight tiles of the down product that belong to the block's first group.
    __device__ int tiles_of_first_group() const {
        return (down_row_tiles - down_run.first % down_row_tiles) * down_col_tiles;
    }

    // In the last round, warps without a tile multiply what is in the ring. Nothing adds it.
    __device__ void multiply_in(skinny::MultiplyingPlace &place) const {
        InPipeline whole = in;
        whole.tiles = (in.tiles + WARPS - 1) / WARPS * WARPS;
        whole.multiply(place, 0, [&](int, int col) {
            barrier_wait(in.act_full, 0);
            return col;
        });
    }

    __device__ void multiply_down(skinny::MultiplyingPlace &place) const {
        const int end = tiles_of_first_group();
        down.multiply(place, 0, [&](int at, int col) {
            const int slot = at < end ? 0 : 1;
            barrier_wait(down_act_full + slot, 0);
            return slot * down_col_tiles + col;
        });
    }

    __device__ uint32_t *count_of(int group) const { return params.finished + group * COUNT_STRIDE; }

    __device__ uint32_t rank(int group, int row) const {
        return uint32_t(routing.ranks[group] >> 8 * row) & 255;
    }

    // Where a lane of an adding warp stores its value of the next row tile, and where it goes on
    // when the `left` row tiles of the matrix are done. `index` counts matrices, group by group. A
    // matrix has at least as many weight tiles as a round, so a round ends at most one of them.
    template <int MATRICES, bool COUNTS>
    struct Output {
        static constexpr bool STORES_ANY_TILE = true;
        const Layer &layer;
        float *const *out;
        const int rows, row_tiles;
        int index, left;
        // Row tiles of the matrix that were not counted yet.
        int uncounted = 0;
        float *to, *next_to;

        __device__ void store(const float (&sums)[1]) {
            if (to != nullptr) *to = sums[0], to += TILE_ROWS;
            if (--left == 0) to = next_to;
        }

        __device__ void end_round() {
            if (left > 0) return;
            if (COUNTS) finish_row_tiles(layer.count_of(index / MATRICES), uncounted);
            left += row_tiles, uncounted = row_tiles, index++;
            next_to = layer.find_output<MATRICES>(*this, index + 1);
        }
    };

    // Returns where the lane's value of a matrix' first row goes. Null if its row has not chosen
    // the expert.
    template <int MATRICES, class Output>
    __device__ float *find_output(const Output &output, int index) const {
        const int group = index / MATRICES, token = in.lane_token();
        if (group >= int(routing.groups)) return nullptr;
        const uint32_t of_token = rank(group, token);
        if (of_token == NO_RANK) return nullptr;
        const size_t pair = token * params.used + of_token;
        return output.out[index % MATRICES] + pair * output.rows + in.lane_row();
    }

    template <int MATRICES, bool COUNTS, class Pipeline>
    __device__ void add(const Pipeline &pipeline, skinny::AddingPlace &place, float *const *out,
                        int row_tiles, skinny::Run run) const {
        const int first = run.first % row_tiles;
        Output<MATRICES, COUNTS> output{
            *this, out, row_tiles * TILE_ROWS, row_tiles, run.first / row_tiles, row_tiles - first};
        output.to = find_output<MATRICES>(output, output.index);
        output.next_to = find_output<MATRICES>(output, output.index + 1);
        if (output.to != nullptr) output.to += first * TILE_ROWS;
        output.uncounted = output.left;
        pipeline.add(place, output);
        const int stored = output.uncounted - output.left;
        if (COUNTS && stored > 0) finish_row_tiles(count_of(output.index / MATRICES), stored);
    }

    // The warps that multiply and those that add quantize the activations of a group, a row and 256
    // columns at a time.
    __device__ void quantize_group(int group, int slot) const {
        barrier_wait(down_ready + slot, 0);
        int task = in.warp;
        for (int row = 0; row < params.rows; row++) {
            const uint32_t of_row = rank(group, row);
            if (of_row == NO_RANK) continue;
            const size_t pair = row * params.used + of_row;
            for (; task < down_col_tiles; task += WARPS + ADDING_WARPS) {
                const int col = task * TILE_COLS + in.lane * 8;
                float v[8] = {};
                if (col < params.hidden) {
                    const size_t first = (pair * params.hidden + col) / 4;
                    const float4 *g = reinterpret_cast<const float4 *>(params.values[0]) + first;
                    const float4 *u = reinterpret_cast<const float4 *>(params.values[1]) + first;
                    const float4 g0 = __ldcg(g), u0 = __ldcg(u), g1 = __ldcg(g + 1), u1 = __ldcg(u + 1);
                    const float gates[8] = {g0.x, g0.y, g0.z, g0.w, g1.x, g1.y, g1.z, g1.w};
                    const float ups[8] = {u0.x, u0.y, u0.z, u0.w, u1.x, u1.y, u1.z, u1.w};
#pragma unroll
                    for (int i = 0; i < 8; i++) v[i] = silu_and_multiply(gates[i], ups[i]);
                }
                uint8_t *act_tile =
                    down.act_tiles + (slot * down_col_tiles + task) * DownPipeline::ACT_TILE_BYTES;
                DownQuantizer::store(v, ActTileRow{act_tile, row, nullptr});
            }
            task -= down_col_tiles;
        }
        barrier_arrive(down_act_full + slot);
    }

    // Quantizes the groups of the block's down product.
    __device__ void quantize() const {
        const int first = down_run.first / down_row_tiles, groups = groups_of_down();
        const int slot = in.warp - WARPS;
        if (in.lane == 0 && slot >= 0 && slot < groups) {
            wait_for_row_tiles(count_of(first + slot), STACKS * in_row_tiles);
            barrier_arrive(down_ready + slot);
        }
        __syncwarp();
#pragma unroll 1
        for (int at = 0; at < groups; at++) quantize_group(first + at, at);
    }

    __device__ void run() {
        // The barriers are those of the other warps, who divide them among themselves.
        const bool weighs = in.warp == WEIGHING_WARP;
        if (in.lane == 0 && !weighs) init_barriers();
        routing.clear();
        __syncthreads();
        wait_for_previous_kernel();
        launch_next_kernel();
        if (weighs) {
            // The weights of pairs take longer than the choice. There are more blocks than rows.
            const int row = blockIdx.x;
            if (row < params.rows)
                experts::choose_experts(params.logits, row, params.expert_count, params.used, nullptr,
                                        params.pair_weights);
            // Barriers of the whole block are behind this warp.
            return;
        }
        if (threadIdx.x == 32 * COPYING_WARP) {
            barrier_expect(in.act_full, in_act_bytes());
            bulk_copy(in.act_tiles, params.act_tiles, in_act_bytes(), in.act_full);
        }
        route();
        if (in.warp == COPYING_WARP) {
            if (in.lane == 0) copy();
            return;
        }
        const bool multiplies = in.warp < WARPS;
        skinny::MultiplyingPlace multiplying(in.warp);
        skinny::AddingPlace adding;
        if (multiplies)
            multiply_in(multiplying);
        else
            add<STACKS, true>(in, adding, params.values, in_row_tiles, in_run);
        quantize();
        if (multiplies)
            multiply_down(multiplying);
        else
            add<1, false>(down, adding, &params.out, down_row_tiles, down_run);
    }
};

template <class In, class Down>
__device__ void compute(const ExpertFusedParams &params) {
    extern __shared__ __align__(128) uint8_t shared[];
    Layer<In, Down>(params, shared).run();
}

}  // namespace expert_fused
