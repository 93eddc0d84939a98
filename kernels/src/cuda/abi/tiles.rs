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
        /// Columns of a unit of f16 quants (linear/tile.cuh): 128 bytes of a token.
        const F16_UNIT_COLS: usize = 64;
        /// Bytes of a unit: 8 tokens.
        const F16_UNIT_BYTES: usize = 1024;
        /// Bytes of the sums and scales of 8 tokens by 256 columns, and where the scales begin.
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
        struct QuantizedRows [32 bytes] {
            act_tiles: u64 as "uint8_t *",
            /// F16 quants, or null.
            f16_units: u64 as "uint8_t *",
            f16_sums: u64 as "uint8_t *",
            /// Groups of 8 tokens for which there is room.
            f16_groups: i32,
        }
        /// F16 quants that a kernel reads.
        struct F16Quants [24 bytes] {
            units: u64 as "const uint8_t *",
            sums: u64 as "const uint8_t *",
            groups: i32,
        }
    }
    kernels {}
}
