// SPDX-License-Identifier: Apache-2.0

// Converts a matrix between layout 0 (block bytes, row after row) and layout 1 (tiles of 16 rows by
// 256 values). This is quant::layout on the device; linear/planes.cuh has the map of bytes.
//
// A thread block converts one tile, two bytes at a time: every field of a block is a multiple of
// two bytes long. Limit: memory bandwidth, each byte is read and written once. Measured on an H200:
// 300 GB/s, bound by the instructions that find each byte. The loader's copies from the host bring
// 55.

#include "abi/elementwise.cuh"
#include "linear/planes.cuh"

// Grid: (tiles of a row, row tiles). `raw` is the first of `rows` rows of `row_bytes` each. Bytes
// of a tile beyond the matrix become zero.
extern "C" __global__ void repack_rows_to_tiles(const __grid_constant__ TilePlanes planes,
                                                const uint8_t *__restrict__ raw, int64_t row_bytes, int rows,
                                                uint8_t *__restrict__ tiles) {
    int blocks_per_tile = planes.blocks[0];
    int64_t tile = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
    uint16_t *out = reinterpret_cast<uint16_t *>(tiles + tile * planes.tile_bytes);
    for (int at = threadIdx.x; at < planes.tile_bytes / 2; at += blockDim.x) {
        BlockByte s = find_block_byte(planes, 2 * at);
        int64_t row = static_cast<int64_t>(blockIdx.y) * TILE_ROWS + s.row;
        int64_t in_row =
            (static_cast<int64_t>(blockIdx.x) * blocks_per_tile + s.block) * planes.block_bytes + s.byte;
        out[at] = row < rows && in_row < row_bytes
                      ? *reinterpret_cast<const uint16_t *>(raw + row * row_bytes + in_row)
                      : 0;
    }
}
CHECK_SIGNATURE(repack_rows_to_tiles, RepackRowsToTiles);

extern "C" __global__ void unpack_tiles_to_rows(const __grid_constant__ TilePlanes planes,
                                                uint8_t *__restrict__ raw, int64_t row_bytes, int rows,
                                                const uint8_t *__restrict__ tiles) {
    int blocks_per_tile = planes.blocks[0];
    int64_t tile = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
    const uint16_t *in = reinterpret_cast<const uint16_t *>(tiles + tile * planes.tile_bytes);
    for (int at = threadIdx.x; at < planes.tile_bytes / 2; at += blockDim.x) {
        BlockByte s = find_block_byte(planes, 2 * at);
        int64_t row = static_cast<int64_t>(blockIdx.y) * TILE_ROWS + s.row;
        int64_t in_row =
            (static_cast<int64_t>(blockIdx.x) * blocks_per_tile + s.block) * planes.block_bytes + s.byte;
        if (row < rows && in_row < row_bytes)
            *reinterpret_cast<uint16_t *>(raw + row * row_bytes + in_row) = in[at];
    }
}
CHECK_SIGNATURE(unpack_tiles_to_rows, UnpackTilesToRows);
