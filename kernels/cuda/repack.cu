// Layout 0 (block bytes row after row) to layout 1 (tiles of 16 rows by 256 values) and back: quant::layout on the device.
//
// A block of threads makes one tile, two bytes at a time, of which every field is made. Limit: memory bandwidth, bytes read
// and written once; far above what the loader's copies from the host bring (55 GB/s).

#include <cstdint>

#include "linear/tile.cuh"

constexpr int PLANES_MAX = 4;

// As `TilePlanes` in repack.rs: quant::layout::Plane, and where the plane begins in the tile.
struct TilePlanes {
    int offset[PLANES_MAX];
    int len[PLANES_MAX];
    int blocks[PLANES_MAX];
    int base[PLANES_MAX];
    int planes;
    int block_bytes;
    int tile_bytes;
};

namespace {

// Raw byte of the tile's byte `at`: block of the tile's columns, byte of the block; and the row.
struct Source {
    int row, block, byte;
};

__device__ Source source_of(const TilePlanes &p, int at) {
    int plane = 0;
    while (plane + 1 < p.planes && at >= p.base[plane + 1]) plane++;
    int row_bytes = p.len[plane] * p.blocks[plane];
    int in_plane = at - p.base[plane], row = in_plane / row_bytes, byte = in_plane % row_bytes;
    int pieces = row_bytes / 16;
    if (pieces >= 2) {
        int group = pieces >= 8 ? 1 : 8 / pieces, turns = min(pieces, 8);
        byte = ((byte / 16) ^ (row / group % turns)) * 16 + byte % 16;
    }
    return {row, byte / p.len[plane], p.offset[plane] + byte % p.len[plane]};
}

}  // namespace

// Grid: (tiles of a row, row tiles). `raw` begins at the first row; rows are `row_bytes` long, `rows` of them.
extern "C" __global__ void repack_tiles(const __grid_constant__ TilePlanes planes, const uint8_t *__restrict__ raw, int64_t row_bytes, int rows,
                                        uint8_t *__restrict__ tiles) {
    int blocks_per_tile = planes.blocks[0];
    int64_t tile = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
    uint16_t *out = reinterpret_cast<uint16_t *>(tiles + tile * planes.tile_bytes);
    for (int at = threadIdx.x; at < planes.tile_bytes / 2; at += blockDim.x) {
        Source s = source_of(planes, 2 * at);
        int64_t row = static_cast<int64_t>(blockIdx.y) * TILE_ROWS + s.row;
        int64_t in_row = (static_cast<int64_t>(blockIdx.x) * blocks_per_tile + s.block) * planes.block_bytes + s.byte;
        out[at] = row < rows && in_row < row_bytes ? *reinterpret_cast<const uint16_t *>(raw + row * row_bytes + in_row) : 0;
    }
}

extern "C" __global__ void restore_rows(const __grid_constant__ TilePlanes planes, uint8_t *__restrict__ raw, int64_t row_bytes, int rows,
                                        const uint8_t *__restrict__ tiles) {
    int blocks_per_tile = planes.blocks[0];
    int64_t tile = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
    const uint16_t *in = reinterpret_cast<const uint16_t *>(tiles + tile * planes.tile_bytes);
    for (int at = threadIdx.x; at < planes.tile_bytes / 2; at += blockDim.x) {
        Source s = source_of(planes, 2 * at);
        int64_t row = static_cast<int64_t>(blockIdx.y) * TILE_ROWS + s.row;
        int64_t in_row = (static_cast<int64_t>(blockIdx.x) * blocks_per_tile + s.block) * planes.block_bytes + s.byte;
        if (row < rows && in_row < row_bytes) *reinterpret_cast<uint16_t *>(raw + row * row_bytes + in_row) = in[at];
    }
}
