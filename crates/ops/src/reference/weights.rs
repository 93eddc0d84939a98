// SPDX-License-Identifier: Apache-2.0

//! Weights of the reference backend: rows, views of one expert, and the two kinds of product.

use super::{HostTensor, Reference};
use crate::{OpError, Weight};
use quant::{Activations, DType, RowError};

/// The layout of the file: block bytes, row after row.
const LAYOUT_FILE: u32 = 0;

/// The bytes of row `index`; `what` names the index.
pub(super) fn row<'a>(
    op: &'static str,
    what: &'static str,
    weight: &'a Weight<Reference>,
    index: usize,
) -> Result<&'a [u8], OpError> {
    let row_bytes = check(op, weight)?;
    if index >= weight.rows() {
        return Err(OpError::Index { op, what, index, len: weight.rows() });
    }
    Ok(&weight.data[index * row_bytes..][..row_bytes])
}

pub(super) fn decode(op: &'static str, dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<(), OpError> {
    quant::decode(dtype, bytes, out).map_err(|error| row_error(op, dtype, error))
}

/// A norm weight or a bias: one row, decoded.
pub(super) fn vector(op: &'static str, weight: &Weight<Reference>) -> Result<Vec<f32>, OpError> {
    if weight.rows() != 1 {
        return Err(OpError::Shape { op, what: "rows of a vector", found: weight.rows(), expected: 1 });
    }
    let mut values = vec![0.0; weight.cols()];
    decode(op, weight.dtype, row(op, "row", weight, 0)?, &mut values)?;
    Ok(values)
}

/// Matrix `index` of a stack in the third dimension.
pub(super) fn expert(
    op: &'static str,
    stack: &Weight<Reference>,
    index: usize,
) -> Result<Weight<Reference>, OpError> {
    let row_bytes = check(op, stack)?;
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

/// `out[r] = decoded weight . x[r]`.
pub(super) fn product(
    weight: &Weight<Reference>,
    x: &HostTensor,
    out: &mut HostTensor,
    rows: usize,
) -> Result<(), OpError> {
    const OP: &str = "linear";
    let mut decoded = vec![0.0; weight.cols()];
    for o in 0..weight.rows() {
        decode(OP, weight.dtype, row(OP, "row", weight, o)?, &mut decoded)?;
        for r in 0..rows {
            out.row_mut(r)[o] = dot(&decoded, x.row(r)) as f32;
        }
    }
    Ok(())
}

/// As [`product`], with activations first rounded to the format of [`DType::activation`].
pub(super) fn rounded_product(
    weight: &Weight<Reference>,
    x: &HostTensor,
    out: &mut HostTensor,
    rows: usize,
) -> Result<(), OpError> {
    const OP: &str = "linear";
    let dtype = weight.dtype;
    if dtype == DType::F32 {
        return product(weight, x, out, rows);
    }
    check(OP, weight)?;
    for r in 0..rows {
        let activations = Activations::for_weight(dtype, x.row(r))
            .map_err(|error| row_error(OP, dtype, error.into()))?
            .ok_or(OpError::Type { op: OP, dtype })?;
        for (o, out) in out.row_mut(r).iter_mut().enumerate() {
            *out = quant::dot(dtype, row(OP, "row", weight, o)?, &activations)
                .map_err(|error| row_error(OP, dtype, error))?;
        }
    }
    Ok(())
}

pub(super) fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

/// Bytes of one row, after a check that the data has all rows.
fn check(op: &'static str, weight: &Weight<Reference>) -> Result<usize, OpError> {
    if weight.layout != LAYOUT_FILE {
        return Err(OpError::Layout { op, layout: weight.layout });
    }
    let dtype = weight.dtype;
    let row_bytes =
        dtype.row_bytes(weight.cols() as u64).map_err(|error| row_error(op, dtype, error.into()))? as usize;
    let expected = row_bytes.saturating_mul(weight.rows());
    if weight.data.len() != expected {
        return Err(OpError::Shape { op, what: "bytes of the weight", found: weight.data.len(), expected });
    }
    Ok(row_bytes)
}

fn row_error(op: &'static str, dtype: DType, error: RowError) -> OpError {
    match error {
        RowError::Bytes { expected, found, .. } => {
            OpError::Shape { op, what: "bytes of a row", found, expected: expected as usize }
        }
        RowError::Size(quant::SizeError::PartialBlock { values, block, .. }) => OpError::Shape {
            op,
            what: "values beyond whole blocks in a row",
            found: (values % block) as usize,
            expected: 0,
        },
        _ => OpError::Type { op, dtype },
    }
}
