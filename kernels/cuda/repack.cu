// SPDX-License-Identifier: Apache-2.0

// Layout 0 (block bytes row after row) to layout 1 (tiles of 16 rows by 256 values) and back:
// quant::layout on the device.
//
// A block of threads makes one tile, two bytes at a time, of which every field is made. Limit:
// memory bandwidth, bytes read and written once. Measured on an H200: 300 GB/s, bound by the
// instructions of finding each byte; the loader's copies from the host bring 55.

#include "abi/elementwise.cuh"
#include "linear/planes.cuh"

// Grid: (tiles of a row, row tiles). `raw` begins at the first row; rows are `row_bytes` long,
// `rows` of them.
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
