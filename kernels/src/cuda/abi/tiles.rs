// SPDX-License-Identifier: Apache-2.0

//! Tiles of weights and of quantised activations.

abi! {
    header "tiles.cuh";

    constants {
        /// Rows of a weight tile, as quant::layout has it.
        const TILE_ROWS: usize = 16;
        /// Columns of a weight tile and of an activation tile, as quant::layout has it.
        const TILE_COLS: usize = 256;
        /// Tokens of an activation tile: the columns of the B operand of an m16n8 MMA.
        const ACT_TILE_TOKENS: usize = 8;
        /// Planes of a tile at most.
        const PLANES_MAX: usize = 4;
    }
    structs {
        /// quant::layout's planes as numbers: where the bytes of a quantised block stand in a tile.
        struct TilePlanes [76 bytes] {
            /// First byte of the block that the plane holds.
            offset: [i32; PLANES_MAX],
            /// Bytes of a block that the plane holds.
            len: [i32; PLANES_MAX],
            /// Blocks of a tile row.
            blocks: [i32; PLANES_MAX],
            /// Where the plane begins in the tile.
            base: [i32; PLANES_MAX],
            planes: i32,
            block_bytes: i32,
            tile_bytes: i32,
        }
    }
    kernels {}
}
