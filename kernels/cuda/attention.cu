// Causal attention over a paged cache of keys and values: out = sum_p softmax_p(scale * query . key_p) * value_p.
//
// Order of a row's sums, whatever kernel computes it and whatever shares the step (invariant I5). Keys are visited in
// position order in tiles of 64. Tiles are grouped into splits of S keys at absolute multiples of S, where S depends on
// the row's own position alone: 64 below 2,048, twice that for every doubling, so that a row has at most 32 splits. Inside
// a split: an online softmax over tiles, sums by m16n8k16 products, queries and weights rounded to f16, sums in f32; the
// sum of weights is one more column of the product. Splits are merged in ascending order by `Total::take`.
//
//   attention_split_*  decode rows and short chunks: a block is (rows of one sequence, kv head, split). Its four warps share
//                      the 16 x 64 scores by keys and the output by dimensions, so no sum is cut. Writes partials.
//   attention_merge    merges the partials of a row and head; *_q8_0 and its like also round the row into panels, as
//                      quantize.cu does.
//   attention_chunk_*  long chunks: a block is 64 (row, head) pairs of one kv head and visits all their keys; a warp has 16
//                      pairs. Merges in registers.
//   attention_plain_*  f32 caches and shapes without a tile kernel: a block is (row, head), no tensor cores.
//
// Query heads of a kv head stand in one tile: pair i is token i / group, head i % group. Keys beyond a tile's last token
// are not loaded (zeros instead): what stands there may be unmapped or not finite.
// Limit: decode, bytes of the cache; chunks, tensor cores and the f32 work between two products. Measured on an H200 with 32
// heads on 8 of 128: one row at 16,000 keys 2.7 TB/s, 64 rows 3.8 (of 4.3); a chunk of 2,048 at 16,384 235 TFLOP/s.

#include "attention/tiles.cuh"
#include "linear/quantize.cuh"

namespace {

template <int DIM>
__device__ void split_rows(const KvLayer &kv, const Queries &queries, const uint32_t *tables, const Work *work, const uint32_t *work_count, int stage_count, float *partial_sums, float2 *partial_weights) {
    using T = Tiles<DIM>;
    constexpr int PITCH = T::PITCH;
    constexpr int P_PITCH = TILE + PAD;
    // Column tiles of the output that a warp has.
    constexpr int COLS = DIM / 8 / WARPS;
    extern __shared__ __align__(16) __half shared[];
    // Stages of keys and values: one where no split has more than a tile, else two.
    __half *const stages = shared;
    __half *const query_tile = shared + stage_count * 2 * TILE * PITCH;
    __half *const weight_tile = query_tile + 16 * PITCH;
    __shared__ float largest_by_warp[WARPS][16];
    __shared__ const uint8_t *places[2][TILE];

    // Plans and tables were sent before the step's first kernel: they may be read before the predecessor has ended.
    const uint32_t count = *work_count;
    const Work job = work[blockIdx.x];
    if (blockIdx.x >= count) return;
    const Item &item = job.item;
    const uint32_t kv_head = blockIdx.y;
    const int pairs = item.tokens * queries.group;
    const uint32_t first = job.split * (TILE << item.split_shift), last = item.position + item.tokens - 1;
    // The last split ends at the last token.
    const int tiles = min(1u << item.split_shift, (last - first) / TILE + 1);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Places place{kv, tables + item.table, kv_head, first, last, DIM * sizeof(__half)};
    uint32_t block = place.block(0), next_block = place.block(1);
    place.put(places[0], 0, block);
    place.put(places[1], 1, next_block);
    __syncthreads();

    wait_for_predecessor();
    let_successor_start();
    T::load(stages, stages + TILE * PITCH, places[0], kv.head_bytes, place.valid(0));
    T::load_queries(query_tile, queries, item, kv_head, pairs, 16);
    __syncthreads();
    uint32_t query[DIM / 16][4];
#pragma unroll
    for (int k = 0; k < DIM / 16; k++) load_matrices(query[k], down_then_right(query_tile + 16 * k, PITCH));

    // A thread has rows lane / 4 and lane / 4 + 8 of the tile.
    uint32_t position[2];
    Softmax softmax[2];
#pragma unroll
    for (int half = 0; half < 2; half++) position[half] = item.position + min((lane / 4 + 8 * half) / queries.group, int(item.tokens) - 1);
    float sums[COLS][4] = {};
    float weight_sum[4] = {};

    for (int tile = 0; tile < tiles; tile++) {
        __half *keys = stages + tile % 2 * 2 * TILE * PITCH, *values = keys + TILE * PITCH;
        if (tile + 1 < tiles) {
            __half *next = stages + (tile + 1) % 2 * 2 * TILE * PITCH;
            T::load(next, next + TILE * PITCH, places[(tile + 1) % 2], kv.head_bytes, place.valid(tile + 1));
            block = place.block(tile + 2);
            wait_copies<1>();
        } else {
            wait_copies<0>();
        }
        __syncthreads();
        if (tile + 1 < tiles) place.put(places[tile % 2], tile + 2, block);

        // Scores of this warp's 16 keys.
        float scores[2][4] = {};
#pragma unroll
        for (int k = 0; k < DIM / 16; k++) {
            uint32_t key[4];
            load_matrices(key, right_then_down(keys + warp * 16 * PITCH + 16 * k, PITCH));
            multiply(scores[0], query[k], key[0], key[1]);
            multiply(scores[1], query[k], key[2], key[3]);
        }
        float largest[2] = {NONE, NONE};
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t key = first + tile * TILE + warp * 16 + n * 8 + lane % 4 * 2 + i % 2;
                if (key > position[i / 2]) scores[n][i] = NONE;
                largest[i / 2] = fmaxf(largest[i / 2], scores[n][i]);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 1));
            largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 2));
            if (lane % 4 == 0) largest_by_warp[warp][lane / 4 + 8 * half] = largest[half];
        }
        __syncthreads();
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = lane / 4 + 8 * half;
            float of_tile = largest_by_warp[0][row];
#pragma unroll
            for (int w = 1; w < WARPS; w++) of_tile = fmaxf(of_tile, largest_by_warp[w][row]);
            factor[half] = softmax[half].raise(of_tile);
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint32_t both = pack(softmax[half].weight(scores[n][2 * half]), softmax[half].weight(scores[n][2 * half + 1]));
                __half *to = weight_tile + (lane / 4 + 8 * half) * P_PITCH + warp * 16 + n * 8 + lane % 4 * 2;
                *reinterpret_cast<uint32_t *>(to) = both;
            }
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            weight_sum[i] *= factor[i / 2];
#pragma unroll
            for (int n = 0; n < COLS; n++) sums[n][i] *= factor[i / 2];
        }
#pragma unroll
        for (int k = 0; k < TILE / 16; k++) {
            uint32_t weights[4];
            load_matrices(weights, down_then_right(weight_tile + 16 * k, P_PITCH));
            multiply(weight_sum, weights, ONES, ONES);
            const __half *corner = values + 16 * k * PITCH + warp * COLS * 8;
#pragma unroll
            for (int n = 0; n < COLS; n += 2) {
                // An odd last column tile is loaded with its left neighbour.
                constexpr int BACK = COLS % 2;
                const int at = n + 1 < COLS ? n : n - BACK;
                uint32_t value[4];
                load_matrices_transposed(value, down_then_right(corner + at * 8, PITCH));
                if (n + 1 < COLS) {
                    multiply(sums[n], weights, value[0], value[1]);
                    multiply(sums[n + 1], weights, value[2], value[3]);
                } else {
                    multiply(sums[n], weights, value[2 * BACK], value[2 * BACK + 1]);
                }
            }
        }
        // The next round overwrites the other stage, the weights and the warps' maxima.
        __syncthreads();
    }

#pragma unroll
    for (int half = 0; half < 2; half++) {
        int pair = lane / 4 + 8 * half;
        if (pair >= pairs) continue;
        size_t number = job.partial + pair / queries.group;
        size_t index = number * queries.heads + kv_head * queries.group + pair % queries.group;
        if (warp == 0 && lane % 4 == 0) partial_weights[index] = make_float2(softmax[half].largest, weight_sum[2 * half]);
        float *to = partial_sums + index * DIM + warp * COLS * 8 + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < COLS; n++) *reinterpret_cast<float2 *>(to + n * 8) = make_float2(sums[n][2 * half], sums[n][2 * half + 1]);
    }
}

// One column tile of eight values is 4 registers of a thread; two sets of DIM / 8 of them are most of what it has.
template <int DIM>
__device__ void chunk_rows(const KvLayer &kv, const Queries &queries, const uint32_t *tables, const Item *items, const uint32_t *item_count, float *out) {
    using T = Tiles<DIM>;
    constexpr int PITCH = T::PITCH;
    constexpr int COLS = DIM / 8;
    extern __shared__ __align__(16) __half shared[];
    __half *const stages = shared;
    __half *const query_tile = shared + 4 * TILE * PITCH;
    __shared__ const uint8_t *places[2][TILE];

    const uint32_t count = *item_count;
    if (blockIdx.x >= count) return;
    // Late chunks have the most keys: they go first.
    const Item item = items[count - 1 - blockIdx.x];
    const uint32_t kv_head = blockIdx.y;
    const int pairs = item.tokens * queries.group;
    const uint32_t last = item.position + item.tokens - 1;
    const int tiles = last / TILE + 1;
    const int split_tiles = 1 << item.split_shift;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Places place{kv, tables + item.table, kv_head, 0, last, DIM * sizeof(__half)};
    uint32_t block = place.block(0), next_block = place.block(1);
    place.put(places[0], 0, block);
    place.put(places[1], 1, next_block);
    __syncthreads();

    wait_for_predecessor();
    let_successor_start();
    T::load(stages, stages + TILE * PITCH, places[0], kv.head_bytes, place.valid(0));
    T::load_queries(query_tile, queries, item, kv_head, pairs, 16 * WARPS);

    uint32_t position[2];
    Softmax softmax[2];
    Total total[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int pair = warp * 16 + lane / 4 + 8 * half;
        position[half] = item.position + min(pair / queries.group, int(item.tokens) - 1);
    }
    float sums[COLS][4] = {}, total_sums[COLS][4] = {};
    float weight_sum[4] = {}, total_weights[2] = {};

    for (int tile = 0; tile < tiles; tile++) {
        __half *keys = stages + tile % 2 * 2 * TILE * PITCH, *values = keys + TILE * PITCH;
        if (tile + 1 < tiles) {
            __half *next = stages + (tile + 1) % 2 * 2 * TILE * PITCH;
            T::load(next, next + TILE * PITCH, places[(tile + 1) % 2], kv.head_bytes, place.valid(tile + 1));
            block = place.block(tile + 2);
            wait_copies<1>();
        } else {
            wait_copies<0>();
        }
        __syncthreads();
        if (tile + 1 < tiles) place.put(places[tile % 2], tile + 2, block);

        float scores[TILE / 8][4] = {};
#pragma unroll
        for (int k = 0; k < DIM / 16; k++) {
            uint32_t query[4];
            load_matrices(query, down_then_right(query_tile + warp * 16 * PITCH + 16 * k, PITCH));
#pragma unroll
            for (int n = 0; n < TILE / 8; n += 2) {
                uint32_t key[4];
                load_matrices(key, right_then_down(keys + n * 8 * PITCH + 16 * k, PITCH));
                multiply(scores[n], query, key[0], key[1]);
                multiply(scores[n + 1], query, key[2], key[3]);
            }
        }
        float largest[2] = {NONE, NONE};
#pragma unroll
        for (int n = 0; n < TILE / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t key = tile * TILE + n * 8 + lane % 4 * 2 + i % 2;
                if (key > position[i / 2]) scores[n][i] = NONE;
                largest[i / 2] = fmaxf(largest[i / 2], scores[n][i]);
            }
        }
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 1));
            largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 2));
            factor[half] = softmax[half].raise(largest[half]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            weight_sum[i] *= factor[i / 2];
#pragma unroll
            for (int n = 0; n < COLS; n++) sums[n][i] *= factor[i / 2];
        }
#pragma unroll
        for (int k = 0; k < TILE / 16; k++) {
            // What a product leaves in a thread is what the next one takes from it.
            uint32_t weights[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float(&s)[4] = scores[2 * k + i / 2];
                weights[i] = pack(softmax[i % 2].weight(s[i % 2 * 2]), softmax[i % 2].weight(s[i % 2 * 2 + 1]));
            }
            multiply(weight_sum, weights, ONES, ONES);
#pragma unroll
            for (int n = 0; n < COLS; n += 2) {
                uint32_t value[4];
                load_matrices_transposed(value, down_then_right(values + 16 * k * PITCH + n * 8, PITCH));
                multiply(sums[n], weights, value[0], value[1]);
                multiply(sums[n + 1], weights, value[2], value[3]);
            }
        }
        if ((tile + 1) % split_tiles == 0 || tile + 1 == tiles) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                total[half].take(softmax[half].largest);
                total_weights[half] = total[half].merge(total_weights[half], weight_sum[2 * half]);
                softmax[half] = Softmax();
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                weight_sum[i] = 0.0f;
#pragma unroll
                for (int n = 0; n < COLS; n++) {
                    total_sums[n][i] = total[i / 2].merge(total_sums[n][i], sums[n][i]);
                    sums[n][i] = 0.0f;
                }
            }
        }
        // The next round overwrites the other stage.
        __syncthreads();
    }

#pragma unroll
    for (int half = 0; half < 2; half++) {
        int pair = warp * 16 + lane / 4 + 8 * half;
        if (pair >= pairs) continue;
        size_t row = item.row + pair / queries.group, head = kv_head * queries.group + pair % queries.group;
        float *to = out + (row * queries.heads + head) * DIM + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < COLS; n++) {
            float a = __fdiv_rn(total_sums[n][2 * half], total_weights[half]);
            float b = __fdiv_rn(total_sums[n][2 * half + 1], total_weights[half]);
            *reinterpret_cast<float2 *>(to + n * 8) = make_float2(a, b);
        }
    }
}

__device__ float stored(float value) { return value; }
__device__ float stored(__half value) { return __half2float(value); }

template <typename T>
__device__ void plain_row(KvLayer kv, Queries queries, int dim, const uint32_t *tables, const uint32_t *table_starts, const uint32_t *positions, float *out) {
    // The query, then the sums.
    extern __shared__ __align__(16) float values[];
    __shared__ float weights[TILE];
    wait_for_predecessor();
    let_successor_start();
    const uint32_t row = blockIdx.x, head = blockIdx.y, kv_head = head / queries.group;
    const uint32_t position = positions[row];
    const uint32_t *table = tables + table_starts[row];
    const float *query = queries.values + (size_t(row) * queries.heads + head) * dim;
    float *sums = values + dim;
    for (int i = threadIdx.x; i < dim; i += THREADS) {
        values[i] = query[i] * queries.scale;
        sums[i] = 0.0f;
    }
    __syncthreads();
    Total total;
    float total_weight = 0.0f;
    for (uint32_t first = 0; first <= position; first += TILE) {
        int keys = min(position - first + 1, uint32_t(TILE));
        // Two threads share a key.
        uint32_t key = threadIdx.x / 2;
        float score = 0.0f;
        if (int(key) < keys) {
            uint32_t at = first + key, block = table[at / kv.block_tokens];
            const T *from = reinterpret_cast<const T *>(kv.keys(block, kv_head)) + size_t(at % kv.block_tokens) * dim;
            for (int i = threadIdx.x % 2; i < dim; i += 2) score = fmaf(values[i], stored(from[i]), score);
        }
        score += __shfl_xor_sync(~0u, score, 1);
        if (threadIdx.x % 2 == 0) weights[key] = int(key) < keys ? score : NONE;
        __syncthreads();
        float largest = weights[0];
        for (int i = 1; i < TILE; i++) largest = fmaxf(largest, weights[i]);
        __syncthreads();
        if (threadIdx.x < TILE) weights[threadIdx.x] = int(threadIdx.x) < keys ? exp2_fast(weights[threadIdx.x] - largest) : 0.0f;
        __syncthreads();
        float tile_weight = 0.0f;
        for (int i = 0; i < TILE; i++) tile_weight += weights[i];
        total.take(largest);
        total_weight = total.merge(total_weight, tile_weight);
        for (int i = threadIdx.x; i < dim; i += THREADS) {
            float sum = 0.0f;
            for (int k = 0; k < keys; k++) {
                uint32_t at = first + k, block = table[at / kv.block_tokens];
                const uint8_t *values_at = kv.keys(block, kv_head) + kv.head_bytes;
                sum = fmaf(weights[k], stored(reinterpret_cast<const T *>(values_at)[size_t(at % kv.block_tokens) * dim + i]), sum);
            }
            sums[i] = total.merge(sums[i], sum);
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < dim; i += THREADS) out[(size_t(row) * queries.heads + head) * dim + i] = __fdiv_rn(sums[i], total_weight);
}

}  // namespace

#define SPLIT(DIM)                                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                                    \
        attention_split_##DIM(const __grid_constant__ KvLayer kv, const __grid_constant__ Queries queries,                   \
                              const uint32_t *tables, const Work *work, const uint32_t *work_count, int stage_count,         \
                              float *partial_sums, float2 *partial_weights) {                                                \
        split_rows<DIM>(kv, queries, tables, work, work_count, stage_count, partial_sums, partial_weights);                  \
    }
#define CHUNK(DIM)                                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                                 \
        attention_chunk_##DIM(const __grid_constant__ KvLayer kv, const __grid_constant__ Queries queries,                   \
                              const uint32_t *tables, const Item *items, const uint32_t *item_count, float *out) {           \
        chunk_rows<DIM>(kv, queries, tables, items, item_count, out);                                                        \
    }
SPLIT(64)
SPLIT(96)
SPLIT(128)
CHUNK(64)
CHUNK(96)
CHUNK(128)

namespace {

// The merged value of dimension `i` of a row and head, whose factors the lanes of a warp work out together: at most 32 splits,
// one a lane.
__device__ __forceinline__ float merged(const float *partial_sums, const float2 *partial_weights, const Merge &merge, size_t head, int heads, int dim, int i) {
    // Partials of a round, all asked for before the first is used.
    constexpr int ROUND = 16;
    const int lane = threadIdx.x % 32, splits = merge.splits;
    const size_t step = size_t(merge.stride) * heads * dim;
    const float *sums = partial_sums + (size_t(merge.partial) * heads + head) * dim + i;
    float part[ROUND];
    auto ask = [&](int round) {
#pragma unroll
        for (int k = 0; k < ROUND; k++) part[k] = round + k < splits && i < dim ? sums[(round + k) * step] : 0.0f;
    };
    ask(0);
    float2 own = make_float2(NONE, 0.0f);
    if (lane < splits) own = partial_weights[(merge.partial + lane * merge.stride) * heads + head];
    // The largest score up to and including this lane's split, then the factors of `Total::take`.
    float largest = own.x;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        float below = __shfl_up_sync(~0u, largest, distance);
        if (lane >= distance) largest = fmaxf(largest, below);
    }
    float before = __shfl_up_sync(~0u, largest, 1);
    if (lane == 0) before = NONE;
    float old_factor = exp2_fast(before - largest), new_factor = exp2_fast(own.x - largest);

    float sum = 0.0f, weight = 0.0f;
    for (int round = 0; round < splits; round += ROUND) {
#pragma unroll
        for (int k = 0; k < ROUND; k++) {
            if (round + k < splits) {
                Total total;
                total.old_factor = __shfl_sync(~0u, old_factor, round + k);
                total.new_factor = __shfl_sync(~0u, new_factor, round + k);
                weight = total.merge(weight, __shfl_sync(~0u, own.y, round + k));
                sum = total.merge(sum, part[k]);
            }
        }
        if (round + ROUND < splits) ask(round + ROUND);
    }
    return __fdiv_rn(sum, weight);
}

// A block per row and 256 columns of the output, which are whole heads; all rows of the step are merged.
template <class Rounding>
__device__ void merge_and_round(const float *partial_sums, const float2 *partial_weights, const Merge *merges, const uint32_t *count, int heads, int dim,
                                float *out, uint8_t *panels) {
    __shared__ float made[TILE_COLS];
    const uint32_t rows = *count;
    const Merge merge = merges[blockIdx.x];
    if (blockIdx.x >= rows) return;
    wait_for_predecessor();
    let_successor_start();
    const int col = blockIdx.y * TILE_COLS + threadIdx.x;
    float value = merged(partial_sums, partial_weights, merge, col / dim, heads, dim, col % dim);
    out[size_t(merge.row) * heads * dim + col] = value;
    made[threadIdx.x] = value;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = made[threadIdx.x * 8 + i];
    Rounding::put(v, panel_place(panels, panel_bytes(Rounding::SCALING), heads * dim / TILE_COLS, merge.row, blockIdx.y));
}

}  // namespace

// One block per row and head, a thread per dimension.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_merge(const float *partial_sums, const float2 *partial_weights, const Merge *merges, const uint32_t *count, int heads, int dim, float *out) {
    const uint32_t rows = *count;
    const Merge merge = merges[blockIdx.x];
    if (blockIdx.x >= rows) return;
    wait_for_predecessor();
    let_successor_start();
    const size_t head = blockIdx.y;
    const int i = threadIdx.x;
    float value = merged(partial_sums, partial_weights, merge, head, heads, dim, i);
    if (i < dim) out[(size_t(merge.row) * heads + head) * dim + i] = value;
}

#define MERGE(SUFFIX, ROUNDING)                                                                                                \
    extern "C" __global__ void __launch_bounds__(TILE_COLS)                                                                    \
        attention_merge##SUFFIX(const float *partial_sums, const float2 *partial_weights, const Merge *merges,                 \
                                const uint32_t *count, int heads, int dim, float *out, uint8_t *panels) {                      \
        merge_and_round<ROUNDING>(partial_sums, partial_weights, merges, count, heads, dim, out, panels);                      \
    }
MERGE(_q8_0, RoundPer32<Scaling::PER_32>)
MERGE(_q8_1, RoundPer32<Scaling::PER_32_SUMS>)
MERGE(_q8_k, RoundPer256)

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_plain_f16(KvLayer kv, Queries queries, int dim, const uint32_t *tables, const uint32_t *table_starts, const uint32_t *positions, float *out) {
    plain_row<__half>(kv, queries, dim, tables, table_starts, positions, out);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_plain_f32(KvLayer kv, Queries queries, int dim, const uint32_t *tables, const uint32_t *table_starts, const uint32_t *positions, float *out) {
    plain_row<float>(kv, queries, dim, tables, table_starts, positions, out);
}
