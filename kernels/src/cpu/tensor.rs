// SPDX-License-Identifier: Apache-2.0

//! [`CpuTensor`]: an activation matrix in host memory. A page takes memory when it is first
//! written.

use ops::OpError;

/// `[rows_max, cols]` values, row-major.
#[derive(Debug)]
pub struct CpuTensor {
    rows_max: usize,
    cols: usize,
    values: Vec<f32>,
}

impl CpuTensor {
    pub(super) fn new(rows_max: usize, cols: usize) -> Result<Self, OpError> {
        let (op, what) = ("tensor", "an activation matrix");
        let len = rows_max.saturating_mul(cols);
        let bytes = (len as u64).saturating_mul(4);
        let values = bytemuck::try_zeroed_vec(len);
        let values = values.map_err(|()| OpError::Memory { op, what, bytes, free: None })?;
        Ok(Self { rows_max, cols, values })
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

    /// The first `rows` rows, after a check.
    pub(super) fn rows(&self, rows: usize) -> &[f32] {
        &self.values[..rows * self.cols]
    }

    pub(super) fn rows_mut(&mut self, rows: usize) -> &mut [f32] {
        &mut self.values[..rows * self.cols]
    }

    /// Checks that the tensor has at least `rows` rows and exactly `cols` columns. `what` names the
    /// columns in the error.
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

    /// Checks that a row consists of whole heads of `head_dim` values, and returns their number.
    pub(super) fn check_heads(
        &self,
        op: &'static str,
        what: &'static str,
        rows: usize,
        head_dim: usize,
    ) -> Result<usize, OpError> {
        let heads = self.cols / head_dim.max(1);
        self.check(op, what, rows, heads * head_dim)?;
        Ok(heads)
    }

    pub(super) fn check_host(&self, op: &'static str, rows: usize, len: usize) -> Result<(), OpError> {
        self.check(op, "columns", rows, self.cols)?;
        let expected = rows * self.cols;
        if len != expected {
            return Err(OpError::Shape { op, what: "host slice", found: len, expected });
        }
        Ok(())
    }
}

/// Rows of values that several threads write, each in its own part.
pub(super) struct SharedRows<T> {
    values: *mut T,
    len: usize,
    cols: usize,
}

impl<T> Clone for SharedRows<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for SharedRows<T> {}

// SAFETY: the pointer points to values that may be sent. The contract of `part` makes threads use
// disjoint parts.
unsafe impl<T: Send> Send for SharedRows<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedRows<T> {}

impl<T> SharedRows<T> {
    /// All uses of the parts must end before the borrow of `values`.
    pub(super) fn new(values: &mut [T], cols: usize) -> Self {
        Self { values: values.as_mut_ptr(), len: values.len(), cols }
    }

    /// Columns `from .. from + len` of row `r`.
    ///
    /// # Safety
    /// The values are still borrowed for this use, and no other live slice overlaps.
    #[inline(always)]
    pub(super) unsafe fn part<'a>(self, r: usize, from: usize, len: usize) -> &'a mut [T] {
        let at = r * self.cols + from;
        assert!(from + len <= self.cols && at + len <= self.len);
        // SAFETY: the assertion keeps the slice inside the values. The caller guarantees that it is
        // exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.values.add(at), len) }
    }
}
