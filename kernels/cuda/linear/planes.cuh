// SPDX-License-Identifier: Apache-2.0

// Where the bytes of a block are in a tile: quant::layout's planes and swizzle, as numbers.

#pragma once

#include "tile.cuh"

// Origin of a tile's byte: row of the tile, block of that row, byte of that block.
struct BlockByte {
    int row, block, byte;
};

__device__ inline BlockByte find_block_byte(const TilePlanes &p, int at) {
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
