// SPDX-License-Identifier: Apache-2.0

// out[t][r] = sum_k weights[r][k] * x[t][k] + bias[r] with Q4_K weights on wgmma (sm_90a), for many
// tokens. The bits are those of matmul.cuh, which computes the same integers with 8-bit products.
//
// Integers as floats: f16 holds integers up to 2,048, and f32 sums of integers are exact below
// 2^24. A tensor core adds the products of one chain exactly, so nothing is rounded before the end:
//
//   X = sum (q - 8) scale a         256 columns of one row and token, 16 steps of 16 columns;
//                                   at most 504 * 127 * 256 = 16.4 million, and 2^24 is 16.8
//   Y = sum scale * (sum of 16 a)   one step over the 16 sums of a
//   N = sum minimum * (sum of 16 a) one step
//   P = 8 Y + X                     rounded once, as the conversion of the integer is
//   value = (da d) P - (da dmin) N  the order of kquants.cuh; values of 256 columns are then added
//                                   in ascending order of columns
//
// A block computes 128 weight rows by TOKENS tokens at a time: 128, as drawn, or 64. Where that
// leaves multiprocessors idle, the SPLIT blocks of a cluster divide the columns of an output tile
// (cluster_values.cuh).
//
//                 128 tokens                  warps 0 to 3, 4 to 7  expand weights to A fragments
//              +---------------+                                    in registers, and multiply
//    64 rows   | warpgroup 0   |              warp 8                copies weight tiles
//              +---------------+              warps 9, 10           copy units, and sums
//    64 rows   | warpgroup 1   |              warp 11               unpacks scales and minimums of
//              +---------------+                                    the block's rows
//
//   A operand: 64 weight rows in registers. Lane 4 g + t of warp w has rows 16 w + g and + 8.
//   B operand: tokens in shared memory, units of 64 columns by 8 tokens (tile.cuh, f16 quants).
//   C: lane 4 g + t holds X[4 j + 0, 1] = row g,     tokens 8 j + 2 t, 8 j + 2 t + 1
//                         X[4 j + 2, 3] = row g + 8, the same tokens
//
//   Stages of 256 columns (weights, sums, scales) and of 64 columns (quants), each a ring:
//
//     copies      |weights, sums c   |c + 1             |            quants 4 c ... |
//     warp 11     |                  |scales of c       |c + 1            |
//     warpgroups  |                                     |16 steps of X | Y, N, value | c + 1
//
// Limit: instructions beside the tensor cores. Per 256 columns, those of a multiprocessor are busy
// for 2,300 of 3,600 clocks. A warp issues some 300 instructions that expand weights and 520 for
// its 64 values, seven operations each. Both share the register file with the tensor cores.
// Measured on an H200: 450 to 485 TFLOP/s for 512 tokens (matmul.cuh: 265 to 290).
//
// Tried, with the same bits: warpgroups that multiply by turns (within 1%), Y and N by mma.sync (5%
// slower), -72 scale from shared memory (3% slower), constants of the expansion as immediates (3%
// slower), two stages of weights (2% slower).

#pragma once

#include "async_copy.cuh"
#include "cluster_values.cuh"
#include "kquants.cuh"
#include "params.cuh"
#include "stream_order.cuh"
#include "wgmma.cuh"

#if HAS_WGMMA

namespace q4_k_wgmma {

constexpr int WARPGROUPS = 2;
constexpr int MULTIPLYING_WARPS = 4 * WARPGROUPS;
constexpr int COPY_WEIGHTS = MULTIPLYING_WARPS, COPY_UNITS = COPY_WEIGHTS + 1, COPY_SUMS = COPY_UNITS + 1,
              UNPACK = COPY_SUMS + 1;
static_assert(32 * (UNPACK + 1) == Q4K_WGMMA_THREADS);
constexpr int ROW_TILES = Q4K_WGMMA_ROWS / TILE_ROWS, ROWS = Q4K_WGMMA_ROWS;
static_assert(ROWS == 64 * WARPGROUPS);
// 64 sums of X and 64 of the result are live at once. A block has 64,512 registers: 384 threads of
// 168, which the warps then share out anew.
constexpr int MULTIPLYING_REGISTERS = 232, OTHER_REGISTERS = 40;
static_assert(MULTIPLYING_WARPS * MULTIPLYING_REGISTERS + 4 * OTHER_REGISTERS <= 12 * 168);

constexpr int TILE = Q4_K::TILE_BYTES, SCALE_HEADERS = Q4_K::SCALE_HEADERS;
constexpr int WEIGHT_BYTES = ROW_TILES * TILE;
constexpr int UNITS = TILE_COLS / F16_UNIT_COLS;
// Unpacked scales: {minimum, scale} of 8 sub-blocks, each as two equal halves. Padding keeps rows
// in different banks.
constexpr int UNPACKED_ROW = 72, UNPACKED = ROWS * UNPACKED_ROW;

// Shared memory, in this order.
template <int TOKENS, int SPLIT>
struct Shared {
    static constexpr int GROUPS = TOKENS / ACT_TILE_TOKENS, UNIT_STAGE = GROUPS * F16_UNIT_BYTES;
    // As many bytes of units for any number of tokens, less those for the other blocks' values.
    static constexpr int UNIT_STAGES =
        (Q4K_WGMMA_UNIT_STAGES - (SPLIT > 1 ? 3 : 0)) * (Q4K_WGMMA_TOKENS / TOKENS);
    using Values = ClusterValues<GROUPS, SPLIT, MULTIPLYING_WARPS>;
    uint8_t units[UNIT_STAGES][UNIT_STAGE];
    uint8_t weights[Q4K_WGMMA_STAGES][WEIGHT_BYTES];
    uint8_t sums[Q4K_WGMMA_STAGES][GROUPS * F16_SUMS_BYTES];
    uint8_t unpacked[Q4K_WGMMA_STAGES][UNPACKED];
    typename Values::Buffers values;
    uint64_t weights_full[Q4K_WGMMA_STAGES], weights_empty[Q4K_WGMMA_STAGES], scales_full[Q4K_WGMMA_STAGES];
    uint64_t units_full[UNIT_STAGES], units_empty[UNIT_STAGES];
};
// The swizzle is a function of address bits 4 to 9, so `Shared` begins at a multiple of 1,024.
template <int TOKENS, int SPLIT>
constexpr bool FITS = sizeof(Shared<TOKENS, SPLIT>) + 1024 - 128 <= Q4K_WGMMA_SHARED_BYTES;

// A position in a ring of STAGES. A reader waits for `phase`, a writer for the opposite one.
template <int STAGES>
struct RingPosition {
    int stage = 0, phase = 0;

    __device__ void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};
using Stage = RingPosition<Q4K_WGMMA_STAGES>;

struct OutputTile {
    int matrix, row_tile, group;
};

// a * b + c, and the operations alone, on two halves.
__device__ __forceinline__ uint32_t fma_halves(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
__device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ uint32_t subtract_halves(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// Byte `i` of `word` as two equal halves: 0x6400 is 1,024, whose last place is 1.
__device__ __forceinline__ uint32_t byte_to_halves(uint32_t word, int i) {
    return subtract_halves(__byte_perm(word, 0x64646464, 0x4040 | i | i << 8), 0x64006400);
}

// Bits 4 to 7 of both halves, and 64 as a half, whose last place is 1/16: a nibble at these bits
// counts ones.
constexpr uint32_t NIBBLES = 0x00F000F0, HALVES_64 = 0x54005400;

// (w & mask) | bias: 64 plus a nibble in both halves.
__device__ __forceinline__ uint32_t nibbles(uint32_t w, uint32_t mask, uint32_t bias) {
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(w), "r"(mask), "r"(bias));
    return d;
}

// (64 + q) scale - 72 scale = (q - 8) scale, exactly. -72 in both halves:
constexpr uint32_t MINUS_72 = 0xD480D480;

// Rows of 16 bytes without a swizzle: the sums of 8 tokens, as two matrices of 8 by 8.
__device__ __forceinline__ uint64_t sums_descriptor(const uint8_t *sums) {
    return (shared_address(sums) & 0x3FFFF) >> 4 | uint64_t(128 >> 4) << 16 |
           uint64_t(F16_SUMS_BYTES >> 4) << 32;
}

template <int N>
__device__ __forceinline__ void pin_registers(float (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(values[i])::"memory");
}

template <int TOKENS, int SPLIT>
struct Kernel {
    static_assert(FITS<TOKENS, SPLIT>);
    using SharedMemory = Shared<TOKENS, SPLIT>;
    using Values = typename SharedMemory::Values;
    using UnitStage = RingPosition<SharedMemory::UNIT_STAGES>;
    static constexpr int GROUPS = SharedMemory::GROUPS, UNIT_STAGE = SharedMemory::UNIT_STAGE;
    // Elements of a thread: those it computes for 256 columns, and those it adds up.
    static constexpr int VALUES = TOKENS / 2, TOTALS = VALUES / SPLIT;

    const LinearParams &params;
    const F16Quants &quants;
    SharedMemory &shared;
    int token_tiles, output_tiles;
    // This block's number in its cluster. It computes column tiles rank, rank + SPLIT, ...
    int rank;

    __device__ bool find_tile(int index, OutputTile &tile) const {
        if (index >= output_tiles) return false;
        RowTile rows = find_row_tile<ROW_TILES>(params, index / token_tiles);
        tile = {rows.matrix, rows.first, index % token_tiles * GROUPS};
        return true;
    }

    // Calls `work(tile)` for the block's output tiles. Tiles of one group of weight rows are
    // neighbours, so that blocks that run at the same time read the same weights.
    template <class Work>
    __device__ void for_each_tile(Work work) const {
        OutputTile tile;
        for (int index = blockIdx.x / SPLIT; find_tile(index, tile); index += gridDim.x / SPLIT) work(tile);
    }

    // Rows beyond the matrix are not copied. What is computed from them is not stored.
    __device__ void copy_weights() const {
        Stage at;
        int lane = threadIdx.x % 32;
        for_each_tile([&](const OutputTile &tile) {
            int tiles = min(ROW_TILES, row_tiles(params, tile.matrix) - tile.row_tile);
            const uint8_t *from = params.weights[tile.matrix] +
                                  static_cast<size_t>(tile.row_tile + lane) * params.col_tiles * TILE;
            for (int col = rank; col < params.col_tiles; col += SPLIT, at.advance()) {
                uint64_t *full = shared.weights_full + at.stage;
                barrier_wait(shared.weights_empty + at.stage, at.phase ^ 1);
                if (lane == 0) barrier_expect(full, tiles * TILE);
                __syncwarp();
                if (lane < tiles)
                    bulk_copy(shared.weights[at.stage] + lane * TILE, from + size_t(col) * TILE, TILE, full);
            }
        });
    }

    __device__ void copy_sums() const {
        Stage at;
        size_t groups = quants.groups;
        for_each_tile([&](const OutputTile &tile) {
            for (int col = rank; col < params.col_tiles; col += SPLIT, at.advance()) {
                uint64_t *full = shared.weights_full + at.stage;
                barrier_wait(shared.weights_empty + at.stage, at.phase ^ 1);
                barrier_expect(full, GROUPS * F16_SUMS_BYTES);
                bulk_copy(shared.sums[at.stage], quants.sums + (col * groups + tile.group) * F16_SUMS_BYTES,
                          GROUPS * F16_SUMS_BYTES, full);
            }
        });
    }

    __device__ void copy_units() const {
        UnitStage at;
        size_t groups = quants.groups;
        for_each_tile([&](const OutputTile &tile) {
            int units = (params.col_tiles - rank + SPLIT - 1) / SPLIT * UNITS;
            for (int i = 0; i < units; i++, at.advance()) {
                int unit = (i / UNITS * SPLIT + rank) * UNITS + i % UNITS;
                uint64_t *full = shared.units_full + at.stage;
                barrier_wait(shared.units_empty + at.stage, at.phase ^ 1);
                barrier_expect(full, UNIT_STAGE);
                bulk_copy(shared.units[at.stage],
                          quants.units + (unit * groups + tile.group) * F16_UNIT_BYTES, UNIT_STAGE, full);
            }
        });
    }

    __device__ void unpack_row(const uint8_t *weights, uint8_t *unpacked, int row) const {
        auto header = Q4_K::header(weights + row / TILE_ROWS * TILE, row % TILE_ROWS);
#pragma unroll
        for (int s = 0; s < 8; s++) {
            uint32_t scale = byte_to_halves(header.scales[s / 4], s % 4);
            uint32_t minimum = byte_to_halves(header.minimums[s / 4], s % 4);
            uint8_t *to = unpacked + row * UNPACKED_ROW + s * 8;
            *reinterpret_cast<uint2 *>(to) = make_uint2(minimum, scale);
        }
    }

    __device__ void unpack_scales() const {
        Stage at;
        int lane = threadIdx.x % 32;
        for_each_tile([&](const OutputTile &) {
            for (int col = rank; col < params.col_tiles; col += SPLIT, at.advance()) {
                barrier_wait(shared.weights_full + at.stage, at.phase);
#pragma unroll 1
                for (int row = lane; row < ROWS; row += 32)
                    unpack_row(shared.weights[at.stage], shared.unpacked[at.stage], row);
                __syncwarp();
                if (lane == 0) barrier_arrive(shared.scales_full + at.stage);
            }
        });
    }

    __device__ static void release(uint64_t *empty) {
        if (threadIdx.x % 32 == 0) barrier_arrive(empty);
    }

    // X over the 256 columns of a stage. The last unit is still in use at the end; the result is
    // its stage.
    __device__ int multiply_columns(float (&X)[VALUES], const uint8_t *tile, const uint8_t *scales,
                                    uint64_t *scales_full, int phase, UnitStage &unit_at) const {
        int lane = threadIdx.x % 32;
        uint32_t q[2][4];
        load_matrices(q[0], tile + plane_offset<128>(lane % 16, lane / 16));
        barrier_wait(scales_full, phase);
        // Scales of rows g and g + 8, a sub-block ahead.
        uint32_t sub_scales[2][2];
        auto load_scales = [&](int s) {
            sub_scales[s % 2][0] = *reinterpret_cast<const uint32_t *>(scales + s * 8 + 4);
            sub_scales[s % 2][1] = *reinterpret_cast<const uint32_t *>(scales + s * 8 + 4 + 8 * UNPACKED_ROW);
        };
        load_scales(0);
        uint32_t mask = NIBBLES, bias = HALVES_64;
        // In registers, they are operands of one instruction; as constants, of two.
        asm volatile("" : "+r"(mask), "+r"(bias));
        uint32_t a[2][2][4];
        int used = -1;
#pragma unroll
        for (int s = 0; s < 8; s++) {
            int pair = s / 2, k = s % 2;
            if (k == 0 && pair < 3)
                load_matrices(q[(pair + 1) % 2],
                              tile + plane_offset<128>(lane % 16, 2 * (pair + 1) + lane / 16));
            if (s < 7) load_scales(s + 1);
#pragma unroll
            for (int v = 0; v < 2; v++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    uint32_t w = q[pair % 2][2 * v + r], scale = sub_scales[s % 2][r];
                    uint32_t offset = multiply_halves(scale, MINUS_72);
                    // Columns of 16 are even ones first, as in the units.
                    a[s % 2][v][r] = fma_halves(nibbles(k ? w : w << 4, mask, bias), scale, offset);
                    a[s % 2][v][2 + r] = fma_halves(nibbles(k ? w >> 8 : w >> 4, mask, bias), scale, offset);
                }
            if (k == 0) barrier_wait(shared.units_full + unit_at.stage, unit_at.phase);
            uint64_t b = operand_descriptor(shared.units[unit_at.stage], F16_UNIT_BYTES) + 4 * k;
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            if (s == 0)
                WgmmaFromRegisters<TOKENS>::template run<0>(X, a[0][0], b);
            else
                WgmmaFromRegisters<TOKENS>::template run<1>(X, a[s % 2][0], b);
            WgmmaFromRegisters<TOKENS>::template run<1>(X, a[s % 2][1], b + 2);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            // The products of the sub-block before have ended: their fragments may be overwritten.
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (used >= 0) release(shared.units_empty + used);
            used = -1;
            if (k == 1) {
                used = unit_at.stage;
                unit_at.advance();
            }
        }
        return used;
    }

    // Computes the values of 256 columns. Calls `take(group, values)` for each group of 8 tokens,
    // with two tokens of row g and of row g + 8. Y and N are computed for 32 tokens at a time, the
    // next ones while values are taken.
    template <class Take>
    __device__ void finish_values(float (&X)[VALUES], const uint8_t *tile, const uint8_t *scales,
                                  const uint8_t *sums, uint64_t *last_unit_empty, Take take) const {
        int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        // Columns are the 16 sums. Sub-block s has sums 2 s and 2 s + 1.
        uint32_t minimums[4], factors[4];
        const uint8_t *corrections = scales + t * 8;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint2 both =
                *reinterpret_cast<const uint2 *>(corrections + i / 2 * 32 + i % 2 * 8 * UNPACKED_ROW);
            minimums[i] = both.x, factors[i] = both.y;
        }
        float d[2], dmin[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            uint32_t bits = *reinterpret_cast<const uint32_t *>(tile + SCALE_HEADERS + (g + 8 * r) * 16);
            d[r] = half_to_float(bits & 0xFFFF), dmin[r] = half_to_float(bits >> 16);
        }
        constexpr int SLICE = 32, SLICES = TOKENS / SLICE;
        float Y[2][SLICE / 2], N[2][SLICE / 2];
        auto multiply_sums = [&](int slice) {
            uint64_t b = sums_descriptor(sums + slice * (SLICE / ACT_TILE_TOKENS) * F16_SUMS_BYTES);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            WgmmaFromRegisters<SLICE>::run<0>(Y[slice % 2], factors, b);
            WgmmaFromRegisters<SLICE>::run<0>(N[slice % 2], minimums, b);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        };
        multiply_sums(0);
#pragma unroll
        for (int slice = 0; slice < SLICES; slice++) {
            if (slice + 1 < SLICES) {
                multiply_sums(slice + 1);
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            } else {
                asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            }
            if (slice == 0) {
                pin_registers(X);
                release(last_unit_empty);
            }
            pin_registers(Y[slice % 2]);
            pin_registers(N[slice % 2]);
#pragma unroll
            for (int group = 0; group < SLICE / ACT_TILE_TOKENS; group++) {
                int j = slice * (SLICE / ACT_TILE_TOKENS) + group;
                float2 da =
                    *reinterpret_cast<const float2 *>(sums + j * F16_SUMS_BYTES + F16_SUMS_SCALES + t * 8);
                float values[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float a = i % 2 ? da.y : da.x;
                    float P = fmaf(8.0f, Y[slice % 2][4 * group + i], X[4 * j + i]);
                    values[i] = __fsub_rn(__fmul_rn(__fmul_rn(a, d[i / 2]), P),
                                          __fmul_rn(__fmul_rn(a, dmin[i / 2]), N[slice % 2][4 * group + i]));
                }
                take(j, values);
            }
        }
    }

    __device__ void multiply() const {
        Stage at;
        UnitStage unit_at;
        Values cluster_values(shared.values, rank);
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        for_each_tile([&](const OutputTile &output) {
            float total[TOTALS];
#pragma unroll
            for (int i = 0; i < TOTALS; i++) total[i] = 0.0f;
            for (int first = 0; first < params.col_tiles; first += SPLIT) {
                // The values of the columns before have arrived while this block multiplied.
                auto add_arrived = [&]() {
                    if (SPLIT > 1 && first > 0) cluster_values.add(total, SPLIT);
                };
                if (first + rank >= params.col_tiles) {
                    add_arrived();
                    cluster_values.send_nothing();
                    continue;
                }
                const uint8_t *tile = shared.weights[at.stage] + warp * TILE;
                const uint8_t *scales = shared.unpacked[at.stage] + (warp * TILE_ROWS + g) * UNPACKED_ROW;
                float X[VALUES];
                barrier_wait(shared.weights_full + at.stage, at.phase);
                int last =
                    multiply_columns(X, tile, scales, shared.scales_full + at.stage, at.phase, unit_at);
                add_arrived();
                cluster_values.begin_round();
                finish_values(X, tile, scales, shared.sums[at.stage], shared.units_empty + last,
                              [&](int group, const float(&values)[4]) {
                                  if constexpr (SPLIT > 1) {
                                      cluster_values.send(group, values);
                                  } else {
#pragma unroll
                                      for (int i = 0; i < 4; i++) total[4 * group + i] += values[i];
                                  }
                              });
                release(shared.weights_empty + at.stage);
                at.advance();
            }
            if constexpr (SPLIT > 1) {
                int rest = params.col_tiles % SPLIT;
                cluster_values.add(total, rest == 0 ? SPLIT : rest);
            }
#pragma unroll
            for (int i = 0; i < TOTALS; i++) {
                int row = (output.row_tile + warp) * TILE_ROWS + g + i % 4 / 2 * 8;
                int group = output.group + rank * (GROUPS / SPLIT) + i / 4;
                store_output(params, output.matrix, row, group * ACT_TILE_TOKENS + 2 * t + i % 2, total[i]);
            }
        });
    }

    __device__ void run() const {
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (threadIdx.x == 0) {
            for (int i = 0; i < Q4K_WGMMA_STAGES; i++) {
                barrier_init(shared.weights_full + i, 2);
                barrier_init(shared.weights_empty + i, MULTIPLYING_WARPS);
                barrier_init(shared.scales_full + i);
            }
            for (int i = 0; i < SharedMemory::UNIT_STAGES; i++) {
                barrier_init(shared.units_full + i);
                barrier_init(shared.units_empty + i, MULTIPLYING_WARPS);
            }
            Values::init(shared.values);
            barrier_init_done();
        }
        Values::wait_for_cluster();
        launch_next_kernel();
        if (warp < MULTIPLYING_WARPS) {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLYING_REGISTERS));
            multiply();
        } else {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(OTHER_REGISTERS));
            if (warp == COPY_WEIGHTS) {
                copy_weights();
            } else if (warp == COPY_UNITS) {
                wait_for_previous_kernel();
                if (lane == 0) copy_units();
            } else if (warp == COPY_SUMS) {
                wait_for_previous_kernel();
                if (lane == 0) copy_sums();
            } else {
                unpack_scales();
            }
        }
        // Other blocks may still write to this block's shared memory.
        if constexpr (SPLIT > 1) Values::wait_for_cluster();
    }
};

template <int TOKENS, int SPLIT>
__device__ inline void multiply(const LinearParams &params, const F16Quants &quants) {
    extern __shared__ __align__(128) uint8_t memory[];
    uint8_t *aligned = memory + ((1024 - shared_address(memory) % 1024) & 1023);
    int token_tiles = (params.tokens + TOKENS - 1) / TOKENS;
    int output_tiles = count_row_tile_groups<ROW_TILES>(params) * token_tiles;
    int rank = SPLIT > 1 ? blockIdx.x % SPLIT : 0;
    auto &shared = *reinterpret_cast<Shared<TOKENS, SPLIT> *>(aligned);
    Kernel<TOKENS, SPLIT>{params, quants, shared, token_tiles, output_tiles, rank}.run();
}

}  // namespace q4_k_wgmma

#endif
