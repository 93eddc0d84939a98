// SPDX-License-Identifier: Apache-2.0

// XXH3-128 (seed 0, default secret) of each piece of a range. Pieces are PIECE_BYTES long; the last
// one may be shorter.
//
// XXH3 divides a piece into blocks of 1,024 bytes. Within a block, the eight accumulators only add
// products of the data, in any order. Between blocks, they are scrambled, which is sequential. So
// all threads sum blocks, 64 at a time; meanwhile eight lanes of the first warp scramble over the
// 64 sums before.
//
//   all groups of 8 lanes    sums of batch 0 | sums of batch 1      | sums of batch 2      | ...
//   group 0 also                             | scrambles of batch 0 | scrambles of batch 1 | ...
//
// Limit: memory bandwidth, each byte is read once; the arithmetic is one multiplication of 32 x 32
// bits per 8 bytes. The scrambles of a piece are a chain of 1,024 x ~50 cycles. So a range needs
// some hundred pieces to be read at full speed. Measured on an H200: 1 GiB at 3.7 TB/s, 64 MiB at
// 1.3 TB/s.

#include <cstdint>

#include "abi/elementwise.cuh"

namespace {

constexpr int BLOCK_BYTES = 1024;
constexpr int STRIPE_BYTES = 64;
constexpr int STRIPES = BLOCK_BYTES / STRIPE_BYTES;
constexpr int THREADS = CHECKSUM_THREADS;
// Eight lanes sum one block.
constexpr int BLOCKS_AT_ONCE = THREADS / 8;

constexpr uint64_t P32_1 = 0x9E3779B1, P32_2 = 0x85EBCA77, P32_3 = 0xC2B2AE3D;
constexpr uint64_t P64_1 = 0x9E3779B185EBCA87, P64_2 = 0xC2B2AE3D27D4EB4F, P64_3 = 0x165667B19E3779F9;
constexpr uint64_t P64_4 = 0x85EBCA77C2B2AE63, P64_5 = 0x27D4EB2F165667C5;

__constant__ uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

__device__ uint64_t bytes8(const uint8_t *p) {
    uint64_t value = 0;
    for (int i = 7; i >= 0; i--) value = value << 8 | p[i];
    return value;
}

// Copies the secret to shared memory, in words of 8 bytes. The lanes of a warp need different
// words, and constant memory would serve them one by one.
__device__ void load_keys(uint64_t *keys) {
    if (threadIdx.x < 24) keys[threadIdx.x] = bytes8(SECRET + 8 * threadIdx.x);
    __syncthreads();
}

// What a stripe adds to this lane's accumulator. `value` is the lane's 8 bytes of the stripe, `key`
// those of the secret. The two lanes of a pair exchange their values.
__device__ uint64_t stripe_term(uint64_t value, uint64_t key) {
    uint64_t mixed = value ^ key;
    uint64_t other = __shfl_xor_sync(~0u, value, 1);
    return other + (mixed & 0xffffffff) * (mixed >> 32);
}

__device__ uint64_t fold(uint64_t a, uint64_t b) { return a * b ^ __umul64hi(a, b); }

__device__ uint64_t merge(const uint64_t *acc, const uint8_t *secret, uint64_t start) {
    uint64_t sum = start;
    for (int i = 0; i < 4; i++)
        sum += fold(acc[2 * i] ^ bytes8(secret + 16 * i), acc[2 * i + 1] ^ bytes8(secret + 16 * i + 8));
    sum ^= sum >> 37;
    sum *= 0x165667919E3779F9;
    return sum ^ sum >> 32;
}

}  // namespace

// One thread block per piece. `out` has the low and the high 64 bits of each hash. `bytes` is
// aligned to 8. The host hashes pieces of at most 240 bytes, for which XXH3 has another algorithm.
extern "C" __global__ void __launch_bounds__(THREADS)
    checksum_pieces(const uint8_t *__restrict__ bytes, uint64_t total, uint64_t *__restrict__ out) {
    __shared__ uint64_t sums[2][BLOCKS_AT_ONCE][8];
    __shared__ uint64_t final_acc[8];
    __shared__ uint64_t keys[24];
    load_keys(keys);
    const uint8_t *plane_offset = bytes + blockIdx.x * uint64_t(PIECE_BYTES);
    uint64_t len = min(total - blockIdx.x * uint64_t(PIECE_BYTES), uint64_t(PIECE_BYTES));
    int lane = threadIdx.x % 8, group = threadIdx.x / 8;
    int whole_blocks = (len - 1) / BLOCK_BYTES;

    const uint64_t start[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    uint64_t acc = start[lane];
    uint64_t scramble_key = bytes8(SECRET + 128 + 8 * lane);
    int batches = (whole_blocks + BLOCKS_AT_ONCE - 1) / BLOCKS_AT_ONCE;
    for (int batch = 0; batch <= batches; batch++) {
        int block = batch * BLOCKS_AT_ONCE + group;
        if (batch < batches) {
            uint64_t values[STRIPES];
            const uint64_t *data =
                reinterpret_cast<const uint64_t *>(plane_offset + uint64_t(block) * BLOCK_BYTES);
#pragma unroll
            for (int s = 0; s < STRIPES; s++) values[s] = block < whole_blocks ? data[8 * s + lane] : 0;
            uint64_t sum = 0;
#pragma unroll
            for (int s = 0; s < STRIPES; s++) sum += stripe_term(values[s], keys[s + lane]);
            sums[batch % 2][group][lane] = sum;
        }
        // Group 0 scrambles over the sums of the previous batch. The other groups cannot overwrite
        // these sums before the barrier below.
        if (batch > 0 && group == 0) {
            int blocks = min(BLOCKS_AT_ONCE, whole_blocks - (batch - 1) * BLOCKS_AT_ONCE);
            for (int b = 0; b < blocks; b++) {
                acc += sums[(batch - 1) % 2][b][lane];
                acc = (acc ^ acc >> 47 ^ scramble_key) * P32_1;
            }
        }
        __syncthreads();
    }
    if (threadIdx.x >= 32) return;
    // All 32 lanes stay, because `stripe_term` exchanges values among them. Only the sums of group
    // 0 are used.
    const uint8_t *rest = plane_offset + uint64_t(whole_blocks) * BLOCK_BYTES;
    int stripes = (len - 1 - uint64_t(whole_blocks) * BLOCK_BYTES) / STRIPE_BYTES;
    for (int s = 0; s < stripes; s++)
        acc += stripe_term(bytes8(rest + STRIPE_BYTES * s + 8 * lane), bytes8(SECRET + 8 * (s + lane)));
    acc += stripe_term(bytes8(plane_offset + len - STRIPE_BYTES + 8 * lane), bytes8(SECRET + 121 + 8 * lane));
    if (group == 0) final_acc[lane] = acc;
    __syncwarp();
    if (threadIdx.x < 2) {
        bool high = threadIdx.x == 1;
        uint64_t start = high ? ~(len * P64_2) : len * P64_1;
        out[2 * blockIdx.x + threadIdx.x] = merge(final_acc, SECRET + (high ? 117 : 11), start);
    }
}
CHECK_SIGNATURE(checksum_pieces, ChecksumPieces);
