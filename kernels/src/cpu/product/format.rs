// SPDX-License-Identifier: Apache-2.0

//! [`Format`]: the operations of a quantized weight format that the product kernels use.

use super::prefetch;
use crate::cpu::simd::{Simd, SimdKernel, StridedRows};
use bytemuck::Pod;

/// Rows of a group: one per lane.
pub(super) const GROUP: usize = 16;

/// Receives one block of each of 16 rows (or 16 blocks of one row) during unpacking, one block per
/// lane. Scales come before values.
pub(super) trait Sink<S: Simd> {
    /// The f16 scale of the block.
    fn scale(&mut self, s: S, d: S::F);
    /// The second f16 of the block: the scale of the minima, or the minimum itself.
    fn second_scale(&mut self, s: S, d: S::F);
    /// Integer scale of a sub-block.
    fn sub_scale(&mut self, s: S, sub: usize, scale: S::I);
    /// Factors of the activation sums of two sub-blocks, as two 16-bit numbers.
    fn sum_weights(&mut self, s: S, pair: usize, weights: S::I);
    /// 32 values as unsigned bytes; word `k` holds values `32 run + 4k` to `32 run + 4k + 3`.
    fn values(&mut self, s: S, run: usize, words: [S::I; 8]);
}

/// How a format computes values from its stored quants.
#[derive(Clone, Copy)]
pub(super) enum Quants {
    /// The format subtracts this number from each quant.
    Offset(i32),
    /// The block has a minimum, or each sub-block has one with its own scale.
    Minima,
}

/// Formats that have the same window type and are multiplied by the same code.
pub(super) trait BlockFamily: 'static {
    /// One block of each of the 16 rows of a group, unpacked.
    type Window: Pod;
    /// One block of an activation row.
    type Rounded: Copy + Default + Send + Sync;
    /// 16 blocks of an activation row, one per lane.
    type Lanes: From<[Self::Rounded; GROUP]> + Send + Sync;

    /// Adds the terms of consecutive blocks to the sums of `C` activation rows. Lanes are weight
    /// rows.
    fn accumulate<S: Simd, const C: usize>(
        s: S,
        windows: &[Self::Window],
        rounded: [&[Self::Rounded]; C],
        quants: Quants,
        sums: &mut [S::F; C],
    );
}

/// A block format, as an empty type.
pub(super) trait Format: 'static {
    type BlockFamily: BlockFamily;

    /// Values per block.
    const LEN: usize;
    /// Bytes of a block in the file.
    const BYTES: usize;
    const QUANTS: Quants;

    /// Unpacks the block that starts `at` bytes into each row.
    fn unpack<S: Simd>(s: S, rows: StridedRows<'_>, at: usize, sink: &mut impl Sink<S>);

    /// As `unpack`, into a window.
    fn unpack_window<S: Simd>(s: S, rows: StridedRows<'_>, at: usize, window: &mut Window<Self>);

    /// Computes the terms of 16 weight blocks and as many activation blocks. Lanes are blocks.
    fn terms<S: Simd>(s: S, blocks: StridedRows<'_>, at: usize, lanes: &Lanes<Self>) -> S::F;
}

pub(super) type Window<Q> = <<Q as Format>::BlockFamily as BlockFamily>::Window;
pub(super) type RoundedBlock<Q> = <<Q as Format>::BlockFamily as BlockFamily>::Rounded;
pub(super) type Lanes<Q> = <<Q as Format>::BlockFamily as BlockFamily>::Lanes;

/// Unpacks consecutive blocks. The first one starts `at` bytes into each row.
pub(super) struct Unpack<'a, Q: Format> {
    pub(super) rows: StridedRows<'a>,
    pub(super) at: usize,
    pub(super) windows: &'a mut [Window<Q>],
    /// Bytes that the next call needs, for prefetches.
    pub(super) ahead: &'a [u8],
}

impl<Q: Format> SimdKernel for Unpack<'_, Q> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (b, window) in self.windows.iter_mut().enumerate() {
            let bytes = GROUP * Q::BYTES;
            prefetch(s, self.ahead, b * bytes, bytes);
            Q::unpack_window(s, self.rows, self.at + b * Q::BYTES, window);
        }
    }
}

/// Adds the terms of a window to the results of `C` activation rows and up to 16 weight rows.
pub(super) struct Accumulate<'a, M: BlockFamily, const C: usize> {
    pub(super) windows: &'a [M::Window],
    pub(super) rounded: [&'a [M::Rounded]; C],
    pub(super) quants: Quants,
    /// The sums of the blocks before this window. If `first`, they are overwritten.
    pub(super) sums: [&'a mut [f32]; C],
    pub(super) first: bool,
    /// The bias, if the window has the last block of the rows.
    pub(super) bias: Option<&'a [f32]>,
}

impl<M: BlockFamily, const C: usize> SimdKernel for Accumulate<'_, M, C> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut sums = [s.splat(0.0); C];
        if !self.first {
            for c in 0..C {
                sums[c] = s.load_partial(self.sums[c]);
            }
        }
        M::accumulate(s, self.windows, self.rounded, self.quants, &mut sums);
        if let Some(bias) = self.bias {
            let bias = s.load_partial(bias);
            for sum in &mut sums {
                *sum = s.add(*sum, bias);
            }
        }
        for (sum, out) in sums.into_iter().zip(self.sums) {
            s.store_partial(sum, out);
        }
    }
}
