// SPDX-License-Identifier: Apache-2.0

//! Weights of the CPU backend: bytes in the layout of the file, with length checks.

use super::Cpu;
use bytes::Bytes;
use ops::{OpError, Weight};
use quant::{DType, RowError, SizeError};

/// The layout of the file, the only one that the CPU kernels read.
const LAYOUT_FILE: u32 = 0;

impl Cpu {
    /// Makes a weight of bytes without copying them; the bytes may start at any address. Refuses
    /// types and layouts without a kernel, and lengths that do not fit the shape.
    pub fn weight(dtype: DType, dims: &[usize], layout: u32, data: Bytes) -> Result<Weight<Self>, OpError> {
        const OP: &str = "weight";
        if dtype.activation().is_none() {
            return Err(OpError::Type { op: OP, dtype });
        }
        if dims.is_empty() {
            return Err(OpError::Shape { op: OP, what: "number of dimensions", found: 0, expected: 1 });
        }
        let weight = Weight { dtype, dims: dims.to_vec(), layout, data };
        row_bytes(OP, &weight)?;
        Ok(weight)
    }
}

/// The bytes of one row. Checks the layout and that the data has all rows.
pub(super) fn row_bytes(op: &'static str, weight: &Weight<Cpu>) -> Result<usize, OpError> {
    if weight.layout != LAYOUT_FILE {
        return Err(OpError::Layout { op, layout: weight.layout });
    }
    let dtype = weight.dtype;
    let too_long =
        OpError::Shape { op, what: "bytes of the weight", found: weight.data.len(), expected: usize::MAX };
    let row_bytes = match dtype.row_bytes(weight.cols() as u64) {
        Ok(bytes) => bytes as usize,
        Err(SizeError::PartialBlock { values, block, .. }) => {
            let (what, found) = ("values beyond whole blocks in a row", (values % block) as usize);
            return Err(OpError::Shape { op, what, found, expected: 0 });
        }
        Err(SizeError::Overflow { .. }) => return Err(too_long),
    };
    let rows = weight.dims[1..].iter().try_fold(1_usize, |rows, &dim| rows.checked_mul(dim));
    let Some(expected) = rows.and_then(|rows| rows.checked_mul(row_bytes)) else { return Err(too_long) };
    if weight.data.len() != expected {
        return Err(OpError::Shape { op, what: "bytes of the weight", found: weight.data.len(), expected });
    }
    Ok(row_bytes)
}

/// Decodes row `index`; `what` names the index.
pub(super) fn decode_row(
    op: &'static str,
    what: &'static str,
    weight: &Weight<Cpu>,
    index: usize,
    out: &mut [f32],
) -> Result<(), OpError> {
    let row_bytes = row_bytes(op, weight)?;
    let len = weight.rows();
    if index >= len {
        return Err(OpError::Index { op, what, index, len });
    }
    let bytes = &weight.data[index * row_bytes..][..row_bytes];
    quant::decode(weight.dtype, bytes, out).map_err(|error| match error {
        RowError::Unsupported { dtype } => OpError::Type { op, dtype },
        _ => OpError::Shape { op, what: "values of a row", found: out.len(), expected: weight.cols() },
    })
}

/// Decodes a norm weight or a bias, which is one row of `len` values.
pub(super) fn vector(
    op: &'static str,
    what: &'static str,
    weight: &Weight<Cpu>,
    len: usize,
) -> Result<Vec<f32>, OpError> {
    for (what, found, expected) in [("rows of a vector", weight.rows(), 1), (what, weight.cols(), len)] {
        if found != expected {
            return Err(OpError::Shape { op, what, found, expected });
        }
    }
    let mut values = vec![0.0; len];
    decode_row(op, "row", weight, 0, &mut values)?;
    Ok(values)
}

/// Matrix `index` of a stack in the third dimension.
pub(super) fn expert(op: &'static str, stack: &Weight<Cpu>, index: usize) -> Result<Weight<Cpu>, OpError> {
    let row_bytes = row_bytes(op, stack)?;
    let matrix_rows = stack.dims.get(1).copied().unwrap_or(1);
    let len = stack.rows() / matrix_rows.max(1);
    if index >= len {
        return Err(OpError::Index { op, what: "expert", index, len });
    }
    let bytes = row_bytes * matrix_rows;
    Ok(Weight {
        dtype: stack.dtype,
        dims: stack.dims[..stack.dims.len().min(2)].to_vec(),
        layout: stack.layout,
        data: stack.data.slice(index * bytes..(index + 1) * bytes),
    })
}
