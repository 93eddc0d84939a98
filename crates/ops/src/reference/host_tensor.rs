// SPDX-License-Identifier: Apache-2.0

//! An activation matrix in host memory, with the shape checks that every op makes by name.

use crate::OpError;

/// `[rows_max, cols]` values, row-major.
#[derive(Clone, Debug)]
pub struct HostTensor {
    rows_max: usize,
    cols: usize,
    values: Vec<f32>,
}

impl HostTensor {
    pub(super) fn new(rows_max: usize, cols: usize) -> Self {
        Self { rows_max, cols, values: vec![f32::NAN; rows_max * cols] }
    }

    pub(super) fn cols(&self) -> usize {
        self.cols
    }

    pub(super) fn row(&self, r: usize) -> &[f32] {
        &self.values[r * self.cols..][..self.cols]
    }

    pub(super) fn row_mut(&mut self, r: usize) -> &mut [f32] {
        &mut self.values[r * self.cols..][..self.cols]
    }

    /// The first `rows` rows, which hold `len` values.
    pub(super) fn rows(&self, op: &'static str, rows: usize, len: usize) -> Result<&[f32], OpError> {
        self.check_rows(op, rows)?;
        self.check_host(op, rows, len)?;
        Ok(&self.values[..len])
    }

    pub(super) fn rows_mut(
        &mut self,
        op: &'static str,
        rows: usize,
        len: usize,
    ) -> Result<&mut [f32], OpError> {
        self.check_rows(op, rows)?;
        self.check_host(op, rows, len)?;
        Ok(&mut self.values[..len])
    }

    /// The tensor has room for `rows` rows of exactly `cols` columns; `what` names the columns.
    pub(super) fn check(
        &self,
        op: &'static str,
        what: &'static str,
        rows: usize,
        cols: usize,
    ) -> Result<(), OpError> {
        self.check_rows(op, rows)?;
        if self.cols != cols {
            return Err(OpError::Shape { op, what, found: self.cols, expected: cols });
        }
        Ok(())
    }

    /// The tensor's rows are whole heads of `head_dim` values.
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

    fn check_rows(&self, op: &'static str, rows: usize) -> Result<(), OpError> {
        if rows > self.rows_max {
            return Err(OpError::Index { op, what: "row", index: rows - 1, len: self.rows_max });
        }
        Ok(())
    }

    fn check_host(&self, op: &'static str, rows: usize, len: usize) -> Result<(), OpError> {
        let expected = rows * self.cols;
        if len != expected {
            return Err(OpError::Shape { op, what: "host slice", found: len, expected });
        }
        Ok(())
    }
}
