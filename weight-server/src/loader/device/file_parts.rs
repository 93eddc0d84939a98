// SPDX-License-Identifier: Apache-2.0

//! Splits a model into the parts that are transferred to a GPU: whole row tiles of one tensor each,
//! in file order.

use quant::layout::{TILE_ROWS, Tiles};

use crate::loader::checksum::CHUNK_BYTES;
use crate::loader::host_reader::TensorSource;

/// Some bytes of one tensor, and their position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FilePart {
    pub(super) tensor: usize,
    /// Offset from the tensor's start.
    pub(super) start: u64,
    pub(super) bytes: usize,
    /// Index into the open files.
    pub(super) file: usize,
    /// Offset from the file's start.
    pub(super) offset: u64,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "tensor {tensor}: {TILE_ROWS} of its rows are {bytes} bytes, at most {limit} can be transferred to a GPU at once"
)]
pub(super) struct RowsTooLong {
    pub(super) tensor: String,
    pub(super) bytes: usize,
    pub(super) limit: usize,
}

/// Returns parts of at most `limit` bytes (several MiB). The parts of a tensor are consecutive.
pub(super) fn split_into_parts(
    sources: &[TensorSource],
    tiles: &[Tiles],
    limit: usize,
) -> Result<Vec<FilePart>, RowsTooLong> {
    let mut order: Vec<usize> = (0..sources.len()).collect();
    order.sort_by_key(|&tensor| (sources[tensor].file, sources[tensor].offset));
    let mut parts = Vec::new();
    for tensor in order {
        let (source, tiles) = (&sources[tensor], &tiles[tensor]);
        // Types without tiles may be split anywhere. Splitting at whole checksum chunks carries no
        // bytes over.
        let step = match tiles.tile_bytes() {
            0 => CHUNK_BYTES,
            _ => TILE_ROWS * (tiles.raw_bytes() / tiles.rows().max(1)),
        };
        let step_bytes = step.min(tiles.raw_bytes());
        if step_bytes > limit {
            return Err(RowsTooLong { tensor: source.name.clone(), bytes: step_bytes, limit });
        }
        let part_bytes = (limit / step.max(1)).max(1) * step;
        let mut start = 0;
        while start < tiles.raw_bytes() {
            let bytes = part_bytes.min(tiles.raw_bytes() - start);
            let offset = source.offset + start as u64;
            parts.push(FilePart { tensor, start: start as u64, bytes, file: source.file, offset });
            start += bytes;
        }
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use quant::DType;

    use super::*;

    const LIMIT: usize = 8 << 20;

    fn source(index: usize, offset: u64, bytes: u64) -> TensorSource {
        TensorSource { name: format!("t{index}"), file: 0, offset, bytes }
    }

    proptest! {
        #[test]
        fn parts_are_whole_tiles_and_cover_every_tensor_once(
            shapes in prop::collection::vec((0usize..4, 1usize..40, 0usize..3000), 1..12),
        ) {
            let dtypes = [DType::Q4_K, DType::Q6_K, DType::Q8_0, DType::F32];
            let mut at = 100;
            let (mut sources, mut tiles) = (Vec::new(), Vec::new());
            for (index, (dtype, blocks, rows)) in shapes.into_iter().enumerate() {
                let shape = Tiles::new(dtypes[dtype], blocks * dtypes[dtype].block_len(), rows).unwrap();
                sources.push(source(index, at, shape.raw_bytes() as u64));
                tiles.push(shape);
                at += shape.raw_bytes() as u64 + 32;
            }
            let mut came = vec![0u64; tiles.len()];
            let mut before = (0, 0);
            for part in split_into_parts(&sources, &tiles, LIMIT).unwrap() {
                let shape = &tiles[part.tensor];
                prop_assert!(part.bytes > 0 && part.bytes <= LIMIT);
                prop_assert_eq!(part.start, came[part.tensor]);
                prop_assert_eq!(part.offset, sources[part.tensor].offset + part.start);
                prop_assert!((part.file, part.offset) >= before);
                before = (part.file, part.offset);
                came[part.tensor] += part.bytes as u64;
                let step = TILE_ROWS * shape.raw_bytes() / shape.rows();
                let ends = came[part.tensor] == shape.raw_bytes() as u64;
                if shape.tile_bytes() > 0 {
                    prop_assert!(ends || part.bytes % step == 0);
                    // Checksum chunks start at aligned addresses, whatever is carried over.
                    prop_assert_eq!(part.start % 8, 0);
                } else {
                    prop_assert!(ends || part.bytes % CHUNK_BYTES == 0);
                }
            }
            let expected: Vec<u64> = tiles.iter().map(|shape| shape.raw_bytes() as u64).collect();
            prop_assert_eq!(came, expected);
        }
    }

    #[test]
    fn rows_longer_than_a_part_are_refused() {
        let tiles = Tiles::new(DType::Q8_0, 1 << 20, 20).unwrap();
        let sources = [source(0, 0, tiles.raw_bytes() as u64)];
        let error = split_into_parts(&sources, &[tiles], LIMIT).unwrap_err();
        assert_eq!(error.tensor, "t0");
        assert!(error.bytes > LIMIT);
    }
}
