//! [`Block`]: what each block format offers, once per format.

use crate::{DType, HalfBytes};
use bytemuck::Pod;

/// A block struct whose fields stand as in the file. Alignment is 1 for every weight format.
pub trait Block: Pod {
    const DTYPE: DType;
    /// Values per block.
    const LEN: usize = Self::DTYPE.block_len();
    /// What its activations are quantised to; one activation block has as many values as one weight block.
    type Activation: Pod;

    /// `out` has [`Self::LEN`] values; products are formed in f32 from left to right, so the result is the same bit for
    /// bit everywhere.
    fn decode(&self, out: &mut [f32]);

    /// `x` has [`Self::LEN`] finite values.
    fn encode(x: &[f32]) -> Self;

    /// Integer sums are exact; scales are applied in f32.
    fn dot(&self, activation: &Self::Activation) -> f32;
}

/// The exact sum of products of two runs of small integers.
pub(crate) fn int_dot(q: &[i8], a: &[i8]) -> i32 {
    q.iter().zip(a).map(|(&q, &a)| i32::from(q) * i32::from(a)).sum()
}

/// A block's two f16 scale fields as f32.
pub(crate) fn scale_pair(d: HalfBytes, m: HalfBytes) -> (f32, f32) {
    (d.to_f32(), m.to_f32())
}
