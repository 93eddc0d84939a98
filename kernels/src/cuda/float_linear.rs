// SPDX-License-Identifier: Apache-2.0

//! The launch of linear/float_matmul.cuh: block shapes, shared memory and tensor maps.

use cuda::TensorBoxLayout;
use quant::DType;
use quant::layout::TILE_COLS;

pub use super::abi::float_linear::FloatShape;
use super::abi::float_linear::{FLOAT_UNIT_COLS, FloatMaps, FloatMatmul, TensorMap};
use super::abi::linear::MATRICES_MAX;
use super::abi::tiles::ACT_TILE_TOKENS;
use super::launch::{KernelName, kernel_name};
use super::linear::MatrixProduct;
use super::quantize::QuantizedActivations;
use super::{CudaError, Device};

/// Bytes of a row in a unit, and of eight such rows.
const UNIT_ROW_BYTES: usize = 2 * FLOAT_UNIT_COLS;
const UNIT_TILE_BYTES: usize = ACT_TILE_TOKENS * UNIT_ROW_BYTES;
/// Stages begin at a multiple of this, because the swizzle is a function of address bits below it.
const STAGE_ALIGN: usize = 1024;
/// A stage is released one step after it was used, so one stage alone would never be.
pub(super) const STAGES_MIN: i32 = 2;
/// More stages than this make no shape faster on an H200.
const STAGES_MAX: usize = 24;
/// What a block takes beside its rows, in rows: its start, its tokens and its stores. Measured on
/// an H200 with 1 to 512 tokens and the matrices of an 8B model: the shape of least cost is within
/// 3% of the fastest.
const TILE_COST_ROWS: usize = 32;

impl FloatShape {
    /// The fastest shape for `rows` rows in all matrices of a launch.
    pub(super) fn fastest(device: &Device, rows: usize, tokens: usize) -> Self {
        let block_tokens = if tokens <= 64 { 64 } else { 128 };
        let cost = |shape: &Self| {
            let tiles = shape.count_tiles([rows].into_iter(), tokens);
            tiles.div_ceil(device.multiprocessors() as usize) * (shape.rows() + TILE_COST_ROWS)
        };
        let shared_bytes_max = device.shared_bytes_max();
        let fits = |shape: &Self| {
            shape.tokens() == block_tokens && shape.pipeline(shared_bytes_max, tokens).0 >= STAGES_MIN
        };
        Self::ALL.into_iter().filter(fits).min_by_key(cost).unwrap_or(Self::ALL[0])
    }

    /// All shapes that have kernels.
    pub fn all() -> [Self; 9] {
        Self::ALL
    }

    /// Output tiles of matrices of `rows` rows each. A tile never crosses matrices.
    pub(super) fn count_tiles(&self, rows: impl Iterator<Item = usize>, tokens: usize) -> usize {
        rows.map(|rows| rows.div_ceil(self.rows())).sum::<usize>() * tokens.div_ceil(self.tokens())
    }

    /// The number of pipeline stages, and the bytes of shared memory. float_matmul.cuh divides
    /// shared memory in the same way.
    pub(super) fn pipeline(&self, shared_bytes_max: u32, tokens: usize) -> (i32, u32) {
        let token_rows = self.token_rows(tokens);
        let stage = self.units() * (token_rows + self.rows()) * UNIT_ROW_BYTES;
        // Products read 64 token rows per warpgroup, beyond the rows that a stage has. What they
        // read there is not stored, but the last stage needs memory behind it.
        let overrun = (self.tokens() - token_rows).saturating_sub(self.rows());
        let rest = STAGE_ALIGN + overrun * self.units() * UNIT_ROW_BYTES;
        let barriers = 2 * size_of::<u64>();
        let stages = ((shared_bytes_max as usize - rest) / (stage + barriers)).min(STAGES_MAX);
        (stages as i32, (rest + stages * (stage + barriers)) as u32)
    }
}

/// The tensor maps of at most MATRICES_MAX products.
pub(super) fn float_maps(
    device: &Device,
    shape: FloatShape,
    x: QuantizedActivations<'_>,
    products: &[MatrixProduct<'_>],
) -> Result<FloatMaps, CudaError> {
    let unused = TensorMap { words: [0; 16] };
    let mut maps = FloatMaps { weights: [unused; MATRICES_MAX], activations: unused };
    let encode = |layout: TensorBoxLayout| -> Result<TensorMap, CudaError> {
        Ok(TensorMap { words: device.driver().encode_tensor_map(&layout)?.0 })
    };
    for (map, product) in maps.weights.iter_mut().zip(products) {
        let rows = product.shape.rows();
        if rows > 0 {
            *map = encode(weight_layout(shape, product.tiles.address(), x.cols, rows))?;
        }
    }
    let col_tiles = x.cols.div_ceil(TILE_COLS) as u64;
    let units_per_tile = (TILE_COLS / FLOAT_UNIT_COLS) as u64;
    let tile_bytes = units_per_tile * UNIT_TILE_BYTES as u64;
    maps.activations = encode(TensorBoxLayout {
        address: x.data.address(),
        extents: [
            UNIT_TILE_BYTES as u64 / 4,
            col_tiles * units_per_tile,
            x.tokens.div_ceil(ACT_TILE_TOKENS) as u64,
        ],
        strides: [UNIT_TILE_BYTES as u64, col_tiles * tile_bytes],
        box_extents: [
            UNIT_TILE_BYTES as u32 / 4,
            shape.units() as u32,
            (shape.token_rows(x.tokens) / ACT_TILE_TOKENS) as u32,
        ],
        swizzled: false,
    })?;
    Ok(maps)
}

/// Rows in units of 64 columns. If the rows are no whole units, a box has one unit, so that the
/// copy engine fills the rest of a row's last unit with zeros.
fn weight_layout(shape: FloatShape, address: u64, cols: usize, rows: usize) -> TensorBoxLayout {
    let (row_bytes, rows) = (2 * cols as u64, rows as u64);
    let words = UNIT_ROW_BYTES as u32 / 4;
    let (extents, third_stride, units) = match cols.is_multiple_of(FLOAT_UNIT_COLS) {
        true => {
            let units = (cols / FLOAT_UNIT_COLS) as u64;
            ([u64::from(words), rows, units], UNIT_ROW_BYTES as u64, shape.units())
        }
        false => ([row_bytes / 4, rows, 1], row_bytes * rows, 1),
    };
    TensorBoxLayout {
        address,
        extents,
        strides: [row_bytes, third_stride],
        box_extents: [words, shape.rows() as u32, units as u32],
        swizzled: true,
    }
}

pub(super) fn float_kernel_name(dtype: DType, shape: FloatShape) -> Option<KernelName<FloatMatmul>> {
    macro_rules! names {
        ($type:literal: $($tokens:literal x $rows:literal),*) => {
            match (shape.tokens(), shape.rows()) {
                $(($tokens, $rows) => Some(kernel_name!(
                    concat!("linear_", $type),
                    concat!("matmul_", $type, "_", $tokens, "x", $rows)
                )),)*
                _ => None,
            }
        };
        ($type:literal) => {
            names!($type: 64 x 16, 64 x 32, 64 x 48, 64 x 96, 64 x 192, 128 x 64, 128 x 128, 128 x 192, 128 x 256)
        };
    }
    match dtype {
        DType::F16 => names!("f16"),
        DType::BF16 => names!("bf16"),
        _ => None,
    }
}
