//! What a quantised weight format must offer to be multiplied.

use crate::cpu::simd::{Kernel, Rows, Simd};
use bytemuck::Pod;
use std::marker::PhantomData;

/// Rows of a group: one per lane.
pub(super) const GROUP: usize = 16;

const CACHE_LINE: usize = 64;

/// A block format, as a type without values.
pub(super) trait Format: 'static {
    /// One block of each of the 16 rows of a group, unpacked.
    type Window: Pod;
    /// One block of an activation row.
    type Rounded: Copy + Default + Send + Sync;

    /// Values per block.
    const LEN: usize;
    /// Bytes of a block in the file.
    const BYTES: usize;

    /// Unpacks the block that starts `at` bytes into each row.
    fn unpack<S: Simd>(s: S, rows: Rows<'_>, at: usize, window: &mut Self::Window);

    /// Adds the terms of consecutive blocks to the sums of `C` activation rows.
    fn accumulate<S: Simd, const C: usize>(
        s: S,
        windows: &[Self::Window],
        rounded: [&[Self::Rounded]; C],
        sums: &mut [S::F; C],
    );
}

/// Unpacks consecutive blocks, the first `at` bytes into each row.
pub(super) struct Unpack<'a, Q: Format> {
    pub(super) rows: Rows<'a>,
    pub(super) at: usize,
    pub(super) windows: &'a mut [Q::Window],
    /// Bytes that will be needed soon.
    pub(super) ahead: &'a [u8],
}

impl<Q: Format> Kernel for Unpack<'_, Q> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut ahead = self.ahead.chunks(GROUP * Q::BYTES);
        for (b, window) in self.windows.iter_mut().enumerate() {
            for line in ahead.next().unwrap_or_default().chunks(CACHE_LINE) {
                s.prefetch(line);
            }
            Q::unpack(s, self.rows, self.at + b * Q::BYTES, window);
        }
    }
}

/// Adds the terms of a window to the results of `C` activation rows and up to 16 weight rows.
pub(super) struct Accumulate<'a, Q: Format, const C: usize> {
    pub(super) windows: &'a [Q::Window],
    pub(super) rounded: [&'a [Q::Rounded]; C],
    /// The sums of the blocks before this window; where it is the first, they are overwritten.
    pub(super) sums: [&'a mut [f32]; C],
    pub(super) first: bool,
    /// Added after the last block.
    pub(super) bias: Option<&'a [f32]>,
    pub(super) format: PhantomData<Q>,
}

impl<Q: Format, const C: usize> Kernel for Accumulate<'_, Q, C> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut sums = [s.splat(0.0); C];
        if !self.first {
            for c in 0..C {
                sums[c] = s.load_partial(self.sums[c]);
            }
        }
        Q::accumulate(s, self.windows, self.rounded, &mut sums);
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
