// SPDX-License-Identifier: Apache-2.0

//! The interface of weight tiles and of activation tiles.

abi! {
    header "tiles.cuh";

    constants {
        /// Rows of a weight tile. Equal to quant::layout.
        const TILE_ROWS: usize = 16;
        /// Columns of a weight tile and of an activation tile. Equal to quant::layout.
        const TILE_COLS: usize = 256;
        /// Tokens of an activation tile: the columns of the B operand of an m16n8 MMA.
        const ACT_TILE_TOKENS: usize = 8;
        /// Bytes of the f16 sums (linear/tile.cuh) and scales of 8 tokens by 256 columns, and where
        /// the scales begin.
        const F16_SUMS_BYTES: usize = 288;
        const F16_SUMS_SCALES: usize = 256;
        /// Marks a slot of experts that has no pair: behind an expert's last pair, up to the end of
        /// that pair's activation tile, or behind the last expert.
        const NO_PAIR: u32 = u32::MAX;
        /// The largest number of planes of a tile.
        const PLANES_MAX: usize = 4;
    }
    structs {
        /// The planes of quant::layout as numbers: where a tile holds the bytes of a quantized
        /// block.
        struct TilePlanes [76 bytes] {
            /// The first byte of the block that the plane holds.
            offset: [i32; PLANES_MAX],
            /// The number of a block's bytes that the plane holds.
            len: [i32; PLANES_MAX],
            /// Blocks of a tile row.
            blocks: [i32; PLANES_MAX],
            /// The offset of the plane in the tile.
            base: [i32; PLANES_MAX],
            planes: i32,
            block_bytes: i32,
            tile_bytes: i32,
        }
        /// Where a kernel writes quantized rows.
        struct QuantizedRows [24 bytes] {
            act_tiles: u64 as "uint8_t *",
            /// F16 sums, or null.
            f16_sums: u64 as "uint8_t *",
            /// Groups of 8 tokens that f16 sums are of.
            f16_groups: i32,
        }
        /// F16 sums that a kernel reads.
        struct F16Sums [16 bytes] {
            data: u64 as "const uint8_t *",
            groups: i32,
        }
    }
    kernels {}
}
