// SPDX-License-Identifier: Apache-2.0

//! [`BlockFormat`]: decode, encode and dot product of one block format.

use crate::{DType, HalfBytes};
use bytemuck::Pod;

/// A block with the byte layout of the file. Every weight format has alignment 1.
pub trait BlockFormat: Pod {
    const DTYPE: DType;
    /// Values per block.
    const LEN: usize = Self::DTYPE.block_len();
    /// The activation block. It has as many values as the weight block.
    type Activation: Pod;

    /// Dequantizes to `out`, which has [`Self::LEN`] values. Products are f32, from left to right,
    /// so the result has the same bits on every machine.
    fn decode(&self, out: &mut [f32]);

    /// Quantizes `x`, which has [`Self::LEN`] finite values.
    fn encode(x: &[f32]) -> Self;

    /// The dot product: exact integer sums, then f32 scales.
    fn dot(&self, activation: &Self::Activation) -> f32;
}

/// The exact dot product of two slices of small integers.
pub(crate) fn int_dot(q: &[i8], a: &[i8]) -> i32 {
    q.iter().zip(a).map(|(&q, &a)| i32::from(q) * i32::from(a)).sum()
}

/// A block's two f16 scale fields as f32.
pub(crate) fn scale_pair(d: HalfBytes, m: HalfBytes) -> (f32, f32) {
    (d.to_f32(), m.to_f32())
}
