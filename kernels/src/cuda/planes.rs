//! quant::layout's planes as numbers, as kernels take them.

use quant::layout::{TILE_ROWS, Tiles, planes};

const PLANES_MAX: usize = 4;

/// As in linear/planes.cuh.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct TilePlanes {
    offset: [i32; PLANES_MAX],
    len: [i32; PLANES_MAX],
    blocks: [i32; PLANES_MAX],
    base: [i32; PLANES_MAX],
    planes: i32,
    block_bytes: i32,
    tile_bytes: i32,
}

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
    for (at, plane) in planes(shape.dtype()).unwrap_or_default().iter().enumerate().take(PLANES_MAX) {
        out.offset[at] = plane.offset as i32;
        out.len[at] = plane.len as i32;
        out.blocks[at] = plane.blocks as i32;
        out.base[at] = base as i32;
        out.planes += 1;
        base += TILE_ROWS * plane.row_bytes();
    }
    out
}
