// SPDX-License-Identifier: Apache-2.0

//! Q6_K: 16 sub-blocks of 16 values, 8-bit signed scales, 6-bit signed quants. y = d sc q.

use super::{LEN, fit};
use crate::block::{BlockFormat, int_dot};
use crate::{BlockQ8_K, DType, HalfBytes};
use bytemuck::{Pod, Zeroable};

const SUB: usize = 16;

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ6_K {
    /// Nibble j / 2 of byte 64h + 32(j % 2) + l has the low four bits of value 128h + 32j + l.
    pub ql: [u8; LEN / 2],
    /// Bits 2j of byte 32h + l are its top two bits.
    pub qh: [u8; LEN / 4],
    pub scales: [i8; LEN / SUB],
    pub d: HalfBytes,
}

impl BlockQ6_K {
    /// -32 to 31.
    pub fn quants(&self) -> [i8; LEN] {
        let mut q = [0; LEN];
        for (h, out) in q.chunks_exact_mut(128).enumerate() {
            for (j, out) in out.chunks_exact_mut(32).enumerate() {
                let (ql, qh) = (&self.ql[64 * h + 32 * (j % 2)..][..32], &self.qh[32 * h..][..32]);
                for ((q, low), high) in out.iter_mut().zip(ql).zip(qh) {
                    *q = ((low >> (4 * (j / 2))) & 15 | ((high >> (2 * j)) & 3) << 4) as i8 - 32;
                }
            }
        }
        q
    }
}

impl BlockFormat for BlockQ6_K {
    const DTYPE: DType = DType::Q6_K;
    type Activation = BlockQ8_K;

    fn decode(&self, out: &mut [f32]) {
        let d = self.d.to_f32();
        for ((out, q), &sc) in
            out.chunks_exact_mut(SUB).zip(self.quants().chunks_exact(SUB)).zip(&self.scales)
        {
            let scale = d * f32::from(sc);
            for (y, &q) in out.iter_mut().zip(q) {
                *y = scale * f32::from(q);
            }
        }
    }

    fn encode(x: &[f32]) -> Self {
        let fits: [f32; LEN / SUB] = std::array::from_fn(|s| fit::symmetric(&x[s * SUB..][..SUB], 32));
        let (d, scales) = fit::quantize_signed_scales(&fits, 128.0);
        let mut block = Self { scales, d: HalfBytes::from_f32(d), ..Self::zeroed() };
        let d = block.d.to_f32();
        let q = fit::quantize(x, SUB, (-32.0, 31.0), |s| (d * f32::from(scales[s]), 0.0));
        for (e, q) in q.into_iter().enumerate() {
            let (h, j, l) = (e / 128, e % 128 / 32, e % 32);
            let code = (q + 32) as u8;
            block.ql[64 * h + 32 * (j % 2) + l] |= (code & 15) << (4 * (j / 2));
            block.qh[32 * h + l] |= (code >> 4) << (2 * j);
        }
        block
    }

    fn dot(&self, activation: &BlockQ8_K) -> f32 {
        let q = self.quants();
        let products: i32 = (0..LEN / SUB)
            .map(|s| {
                i32::from(self.scales[s]) * int_dot(&q[s * SUB..][..SUB], &activation.qs[s * SUB..][..SUB])
            })
            .sum();
        (activation.d * self.d.to_f32()) * products as f32
    }
}
