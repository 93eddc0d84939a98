// SPDX-License-Identifier: Apache-2.0

//! [`TensorInfo`]: one entry of the tensor table.

use crate::cursor::{Cursor, HeaderReadError};
use crate::limits::{MAX_DIMS, MAX_TENSOR_NAME_BYTES};
use quant::{DType, SizeError, UnknownDType};

/// A tensor's entry in the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    pub name: String,
    pub dtype: DType,
    /// One to four dimensions; `dims[0]` is the row length.
    pub dims: Vec<u64>,
    /// Offset from the start of the file's tensor data.
    pub offset: u64,
    /// Size without padding.
    pub bytes: u64,
}

/// What is wrong with an entry of the tensor table. Offsets count from the start of the file.
#[derive(Debug, thiserror::Error)]
pub enum TensorInfoError {
    #[error("cannot read tensor number {index}")]
    ReadName { index: u64, source: HeaderReadError },
    #[error("cannot read tensor {name}")]
    Read { name: String, source: HeaderReadError },
    #[error("tensor {index} at byte {offset} has no name")]
    EmptyName { index: u64, offset: u64 },
    #[error(
        "tensor {index} at byte {offset} claims a name of {len} bytes; the limit is {MAX_TENSOR_NAME_BYTES}"
    )]
    LongName { index: u64, offset: u64, len: u64 },
    #[error("the name of tensor {index} at byte {offset} is not UTF-8")]
    NameEncoding { index: u64, offset: u64 },
    #[error("tensor {name} has {count} dimensions at byte {offset}; the limit is {MAX_DIMS}")]
    TooManyDims { name: String, offset: u64, count: u32 },
    #[error("tensor {name} has the negative dimension {dim} at byte {offset}")]
    NegativeDim { name: String, offset: u64, dim: i64 },
    #[error("tensor {name} of dimensions {dims:?} overflows 63 bits with its number of values")]
    TooManyValues { name: String, dims: Vec<u64> },
    #[error("tensor {name} has an unknown type at byte {offset}")]
    Type { name: String, offset: u64, source: UnknownDType },
    #[error("tensor {name}: rows of {row} values do not fit its type")]
    Row { name: String, row: u64, source: SizeError },
    #[error("cannot compute the size of tensor {name}")]
    Bytes { name: String, source: SizeError },
}

impl TensorInfo {
    /// Number of values: the product of all dimensions.
    pub fn values(&self) -> u64 {
        self.dims.iter().product()
    }

    /// Values in a row.
    pub fn row_values(&self) -> u64 {
        self.dims.first().copied().unwrap_or(1)
    }

    /// Number of rows: the product of all dimensions but the first.
    pub fn rows(&self) -> u64 {
        self.dims.iter().skip(1).product()
    }

    pub(crate) fn read(cursor: &mut impl Cursor, index: u64) -> Result<Self, TensorInfoError> {
        let name = read_name(cursor, index)?;
        let read_error = |source| TensorInfoError::Read { name: name.clone(), source };
        let offset = cursor.offset();
        let count = cursor.u32().map_err(read_error)?;
        if count > MAX_DIMS {
            return Err(TensorInfoError::TooManyDims { name, offset, count });
        }
        let mut dims = Vec::with_capacity(MAX_DIMS as usize);
        for _ in 0..count {
            let offset = cursor.offset();
            let dim = cursor.u64().map_err(read_error)?;
            if let dim @ ..0 = dim.cast_signed() {
                return Err(TensorInfoError::NegativeDim { name, offset, dim });
            }
            dims.push(dim);
        }
        if dims.is_empty() {
            // A tensor without dimensions is a scalar.
            dims.push(1);
        }
        let type_offset = cursor.offset();
        let id = cursor.u32().map_err(read_error)?;
        let offset = cursor.u64().map_err(read_error)?;
        let dtype = DType::from_id(id).map_err(|source| TensorInfoError::Type {
            name: name.clone(),
            offset: type_offset,
            source,
        })?;
        let bytes = tensor_bytes(&name, dtype, &dims)?;
        Ok(Self { name, dtype, dims, offset, bytes })
    }
}

/// Computes a tensor's size in bytes and checks every product for overflow.
pub(crate) fn tensor_bytes(name: &str, dtype: DType, dims: &[u64]) -> Result<u64, TensorInfoError> {
    let row = dims.first().copied().unwrap_or(1);
    dtype.row_bytes(row).map_err(|source| TensorInfoError::Row { name: name.into(), row, source })?;
    let values = if dims.contains(&0) {
        Some(0)
    } else {
        dims.iter().try_fold(1_u64, |product, &dim| product.checked_mul(dim))
    };
    let values = values
        .filter(|&values| i64::try_from(values).is_ok())
        .ok_or_else(|| TensorInfoError::TooManyValues { name: name.into(), dims: dims.to_vec() })?;
    dtype.row_bytes(values).map_err(|source| TensorInfoError::Bytes { name: name.into(), source })
}

fn read_name(cursor: &mut impl Cursor, index: u64) -> Result<String, TensorInfoError> {
    let offset = cursor.offset();
    let read_error = |source| TensorInfoError::ReadName { index, source };
    let len = cursor.u64().map_err(read_error)?;
    if len == 0 {
        return Err(TensorInfoError::EmptyName { index, offset });
    }
    if len > MAX_TENSOR_NAME_BYTES {
        return Err(TensorInfoError::LongName { index, offset, len });
    }
    let bytes = cursor.take(len).map_err(read_error)?;
    let name = std::str::from_utf8(bytes).map_err(|_| TensorInfoError::NameEncoding { index, offset })?;
    Ok(name.to_owned())
}
