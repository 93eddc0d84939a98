// SPDX-License-Identifier: Apache-2.0

//! Converts the planes of `quant::layout` to the numbers that kernels take.

use quant::layout::{Tiles, planes};

use super::abi::tiles::{ACT_TILE_TOKENS, PLANES_MAX, TILE_COLS, TILE_ROWS, TilePlanes};

const _: () = assert!(TILE_ROWS == quant::layout::TILE_ROWS && TILE_COLS == quant::layout::TILE_COLS);
const _: () = assert!(ACT_TILE_TOKENS == 8, "an MMA multiplies with 8 tokens");

pub(super) fn tile_planes(shape: &Tiles) -> TilePlanes {
    let mut out = TilePlanes {
        offset: [0; PLANES_MAX],
        len: [1; PLANES_MAX],
        blocks: [1; PLANES_MAX],
        base: [0; PLANES_MAX],
        planes: 0,
        block_bytes: shape.dtype().block_bytes() as i32,
        tile_bytes: shape.tile_bytes() as i32,
    };
    let mut base = 0;
    let planes = planes(shape.dtype()).unwrap_or_default();
    assert!(planes.len() <= PLANES_MAX, "{} has {} planes", shape.dtype(), planes.len());
    for (at, plane) in planes.iter().enumerate() {
        out.offset[at] = plane.offset as i32;
        out.len[at] = plane.len as i32;
        out.blocks[at] = plane.blocks as i32;
        out.base[at] = base as i32;
        out.planes += 1;
        base += TILE_ROWS * plane.row_bytes();
    }
    out
}
