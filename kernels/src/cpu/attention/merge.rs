// SPDX-License-Identifier: Apache-2.0

//! Merges partial results of splits. A partial result is `[largest score, sum of shares, weighted
//! values ..]` per query; its sum is 0 if the query attends to no key of the split.

use crate::cpu::math;
use crate::cpu::simd::{Simd, SimdKernel};

/// Adds the partial results of a split to those of the splits before it, for each query.
pub(super) struct MergeSplits<'a> {
    pub(super) total: &'a mut [f32],
    pub(super) partial: &'a [f32],
    pub(super) width: usize,
}

impl SimdKernel for MergeSplits<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let queries = self.total.chunks_exact_mut(self.width).zip(self.partial.chunks_exact(self.width));
        for (total, partial) in queries {
            // The query has no key in this split.
            if partial[1] == 0.0 {
                continue;
            }
            if total[1] == 0.0 {
                total.copy_from_slice(partial);
                continue;
            }
            let largest = total[0].max(partial[0]);
            let (old, new) = (math::exp_one(s, total[0] - largest), math::exp_one(s, partial[0] - largest));
            total[0] = largest;
            for (total, partial) in total[1..].iter_mut().zip(&partial[1..]) {
                *total = *total * old + partial * new;
            }
        }
    }
}

/// `out = values / sum of shares`.
pub(super) struct NormalizeHead<'a> {
    pub(super) total: &'a [f32],
    pub(super) out: &'a mut [f32],
}

impl SimdKernel for NormalizeHead<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let sum = self.total[1];
        for (out, value) in self.out.iter_mut().zip(&self.total[2..]) {
            *out = value / sum;
        }
    }
}
