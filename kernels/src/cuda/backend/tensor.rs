//! An activation matrix in device memory, with the shape checks that every op makes by name.

use std::sync::Arc;

use ops::OpError;

use super::command::Floats;
use crate::cuda::Buffer;

/// `[rows_max, cols]` values, row-major.
pub struct Tensor {
    values: Arc<Buffer<f32>>,
    rows_max: usize,
    cols: usize,
}

impl Tensor {
    pub(super) fn new(values: Buffer<f32>, rows_max: usize, cols: usize) -> Self {
        Self { values: Arc::new(values), rows_max, cols }
    }

    pub(super) fn cols(&self) -> usize {
        self.cols
    }

    /// What keeps the memory.
    pub(super) fn owner(&self) -> Arc<Buffer<f32>> {
        self.values.clone()
    }

    /// The first `rows` rows, which a check found to be there.
    pub(super) fn rows(&self, rows: usize) -> Floats {
        Floats { address: self.values.view().address(), len: rows * self.cols }
    }

    /// There is room for `rows` rows of exactly `cols` columns; `what` names the columns.
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

    /// Rows are whole heads of `head_dim` values.
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

    /// `len` host values are `rows` rows, and they are there.
    pub(super) fn check_host(&self, op: &'static str, rows: usize, len: usize) -> Result<(), OpError> {
        self.check(op, "columns", rows, self.cols)?;
        let expected = rows * self.cols;
        if len != expected {
            return Err(OpError::Shape { op, what: "host slice", found: len, expected });
        }
        Ok(())
    }
}
