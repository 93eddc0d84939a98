// SPDX-License-Identifier: Apache-2.0

//! Multiplies quantized weights with a single activation row, in memory order of the weights.
//!
//! Each lane takes one of 16 consecutive weight blocks, which may cross the end of a row. The lane
//! multiplies the weight block with the activation block of the same position. The terms of a group
//! of 16 rows are stored, then added per row in block order. The sums are therefore the same as
//! those of `linear`.
//!
//! Limiting resource: memory, if the instruction set unpacks 16 blocks faster than memory delivers
//! them.

use super::format::{Format, GROUP, Lanes};
use super::{AHEAD_BYTES, prefetch};
use crate::cpu::simd::{Simd, SimdKernel, StridedRows};

/// Interleaves activation blocks for each batch of 16 weight blocks, until the pattern repeats.
pub(super) fn lanes_of<B: Copy, L: From<[B; GROUP]>>(rounded: &[B], lanes: &mut Vec<L>) {
    lanes.clear();
    if rounded.is_empty() {
        return;
    }
    let mut first = 0;
    loop {
        lanes.push(std::array::from_fn(|r| rounded[(first + r) % rounded.len()]).into());
        first = (first + GROUP) % rounded.len();
        if first == 0 {
            return;
        }
    }
}

pub(super) struct OneRow<'a, Q: Format> {
    /// The bytes of the layer from the first row on, for prefetches.
    pub(super) layer: &'a [u8],
    /// The rows: whole groups, the last of which may have fewer rows.
    pub(super) bytes: &'a [u8],
    /// Blocks per row.
    pub(super) blocks: usize,
    pub(super) lanes: &'a [Lanes<Q>],
    pub(super) bias: Option<&'a [f32]>,
    pub(super) out: &'a mut [f32],
    pub(super) terms: &'a mut Vec<f32>,
    pub(super) padded: &'a mut Vec<u8>,
}

impl<Q: Format> SimdKernel for OneRow<'_, Q> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let group_bytes = GROUP * self.blocks * Q::BYTES;
        self.terms.resize(GROUP * self.blocks, 0.0);
        let groups = self.bytes.chunks(group_bytes).zip(self.out.chunks_mut(GROUP));
        for (g, (bytes, out)) in groups.enumerate() {
            let (batches, rest) = bytes.split_at(bytes.len() / (GROUP * Q::BYTES) * (GROUP * Q::BYTES));
            let mut phase = 0;
            let mut terms = self.terms.as_chunks_mut::<GROUP>().0.iter_mut();
            for (i, batch) in batches.chunks_exact(GROUP * Q::BYTES).enumerate() {
                prefetch(s, self.layer, g * group_bytes + i * batch.len() + AHEAD_BYTES, batch.len());
                let rows = StridedRows { bytes: batch, stride: Q::BYTES };
                if let Some(terms) = terms.next() {
                    s.store(Q::terms(s, rows, 0, &self.lanes[phase]), terms);
                }
                phase = if phase + 1 == self.lanes.len() { 0 } else { phase + 1 };
            }
            if let Some(terms) = terms.next().filter(|_| !rest.is_empty()) {
                self.padded.clear();
                self.padded.extend_from_slice(rest);
                self.padded.resize(GROUP * Q::BYTES, 0);
                let rows = StridedRows { bytes: self.padded, stride: Q::BYTES };
                s.store(Q::terms(s, rows, 0, &self.lanes[phase]), terms);
            }

            let mut sums = row_sums(s, self.terms, self.blocks);
            if let Some(bias) = self.bias {
                sums = s.add(sums, s.load_partial(&bias[g * GROUP..][..out.len()]));
            }
            s.store_partial(sums, out);
        }
    }
}

/// Lane `r` is `((0 + t_0) + t_1) + ..` of the terms of row `r`.
#[inline(always)]
fn row_sums<S: Simd>(s: S, terms: &[f32], blocks: usize) -> S::F {
    let rows = StridedRows { bytes: bytemuck::cast_slice(terms), stride: 4 * blocks };
    let mut sums = s.splat(0.0);
    let mut b = 0;
    while b + 4 <= blocks {
        for terms in s.transpose(rows, 4 * b) {
            sums = s.add(sums, s.as_float(terms));
        }
        b += 4;
    }
    for b in b..blocks {
        sums = s.add(sums, s.as_float(s.gather_u32(rows, 4 * b)));
    }
    sums
}
