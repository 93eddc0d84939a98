// SPDX-License-Identifier: Apache-2.0

//! [`CudaTensor`] is an activation matrix in device memory, with the shape checks of the ops.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ops::OpError;

use super::operand::FloatRange;
use super::usage::allocated;
use crate::cuda::Buffer;

/// `[rows_max, cols]` values, row-major.
pub struct CudaTensor {
    values: Arc<Buffer<f32>>,
    rows_max: usize,
    cols: usize,
    _counted: CountedBytes,
}

/// A number of bytes that counts towards a total as long as this value lives.
struct CountedBytes {
    bytes: u64,
    total: Arc<AtomicU64>,
}

impl Drop for CountedBytes {
    fn drop(&mut self) {
        self.total.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl CudaTensor {
    /// Makes a tensor and adds its bytes to `total`.
    pub(super) fn new(values: Buffer<f32>, rows_max: usize, cols: usize, total: &Arc<AtomicU64>) -> Self {
        let bytes = allocated((values.len() * size_of::<f32>()) as u64);
        total.fetch_add(bytes, Ordering::Relaxed);
        Self {
            values: Arc::new(values),
            rows_max,
            cols,
            _counted: CountedBytes { bytes, total: total.clone() },
        }
    }

    pub(super) fn cols(&self) -> usize {
        self.cols
    }

    /// The value that keeps the memory alive.
    pub(super) fn owner(&self) -> Arc<Buffer<f32>> {
        self.values.clone()
    }

    /// The first `rows` rows. The caller has checked their number.
    pub(super) fn rows(&self, rows: usize) -> FloatRange {
        FloatRange { address: self.values.view().address(), len: rows * self.cols }
    }

    /// Checks that the tensor has room for `rows` rows and has exactly `cols` columns. `what` names
    /// the columns in the error.
    pub(super) fn check(
        &self,
        op: &'static str,
        what: &'static str,
        rows: usize,
        cols: usize,
    ) -> Result<(), OpError> {
        if rows > self.rows_max {
            return Err(OpError::Index { op, what: "row", index: rows - 1, len: self.rows_max });
        }
        if self.cols != cols {
            return Err(OpError::Shape { op, what, found: self.cols, expected: cols });
        }
        Ok(())
    }

    /// Checks that each row consists of whole heads of `head_dim` values.
    pub(super) fn check_heads(
        &self,
        op: &'static str,
        what: &'static str,
        rows: usize,
        head_dim: usize,
    ) -> Result<(), OpError> {
        let heads = self.cols / head_dim.max(1);
        self.check(op, what, rows, heads * head_dim)
    }

    /// Checks that `len` host values are the values of the first `rows` rows.
    pub(super) fn check_host(&self, op: &'static str, rows: usize, len: usize) -> Result<(), OpError> {
        self.check(op, "columns", rows, self.cols)?;
        let expected = rows * self.cols;
        if len != expected {
            return Err(OpError::Shape { op, what: "host slice", found: len, expected });
        }
        Ok(())
    }
}
