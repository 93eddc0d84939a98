// SPDX-License-Identifier: Apache-2.0

//! Q3_K: 16 sub-blocks of 16 values, 6-bit signed scales, 3-bit signed quants. y = d sc q.

use super::{LEN, fit};
use crate::block::{BlockFormat, int_dot};
use crate::{BlockQ8_K, DType, HalfBytes};
use bytemuck::{Pod, Zeroable};

const SUB: usize = 16;

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ3_K {
    /// Bit 4h + j of byte l belongs to value 128h + 32j + l; a clear bit subtracts 4.
    pub hmask: [u8; LEN / 8],
    /// Bits 2j of byte 32h + l belong to value 128h + 32j + l.
    pub qs: [u8; LEN / 4],
    /// Low nibbles of scales 0 to 7, then 8 to 15 in bytes 0 to 7; the top two bits of scale s in
    /// byte 8 + s % 4.
    pub scales: [u8; 12],
    pub d: HalfBytes,
}

impl BlockQ3_K {
    /// -4 to 3.
    pub fn quants(&self) -> [i8; LEN] {
        let mut q = [0; LEN];
        for (h, (out, qs)) in q.chunks_exact_mut(128).zip(self.qs.chunks_exact(32)).enumerate() {
            for (j, out) in out.chunks_exact_mut(32).enumerate() {
                for (l, q) in out.iter_mut().enumerate() {
                    let high = (self.hmask[l] >> (4 * h + j)) & 1;
                    *q = (((qs[l] >> (2 * j)) & 3) | high << 2) as i8 - 4;
                }
            }
        }
        q
    }

    /// Integer scale of sub-block `s`, -32 to 31.
    pub fn scale(&self, s: usize) -> i8 {
        let low = if s < 8 { self.scales[s] & 15 } else { self.scales[s - 8] >> 4 };
        let high = (self.scales[8 + s % 4] >> (2 * (s / 4))) & 3;
        (low | high << 4) as i8 - 32
    }
}

impl BlockFormat for BlockQ3_K {
    const DTYPE: DType = DType::Q3_K;
    type Activation = BlockQ8_K;

    fn decode(&self, out: &mut [f32]) {
        let d = self.d.to_f32();
        for (s, (out, q)) in out.chunks_exact_mut(SUB).zip(self.quants().chunks_exact(SUB)).enumerate() {
            let scale = d * f32::from(self.scale(s));
            for (y, &q) in out.iter_mut().zip(q) {
                *y = scale * f32::from(q);
            }
        }
    }

    fn encode(x: &[f32]) -> Self {
        let fits: [f32; LEN / SUB] = std::array::from_fn(|s| fit::symmetric(&x[s * SUB..][..SUB], 4));
        let (d, scales) = fit::quantize_signed_scales(&fits, 32.0);
        let mut block = Self { d: HalfBytes::from_f32(d), ..Self::zeroed() };
        for (s, scale) in scales.into_iter().enumerate() {
            let code = (scale + 32) as u8;
            block.scales[s % 8] |= (code & 15) << (4 * (s / 8));
            block.scales[8 + s % 4] |= (code >> 4) << (2 * (s / 4));
        }
        let d = block.d.to_f32();
        let q = fit::quantize(x, SUB, (-4.0, 3.0), |s| (d * f32::from(scales[s]), 0.0));
        for (e, q) in q.into_iter().enumerate() {
            let (h, j, l) = (e / 128, e % 128 / 32, e % 32);
            let code = (q + 4) as u8;
            block.qs[32 * h + l] |= (code & 3) << (2 * j);
            block.hmask[l] |= (code >> 2) << (4 * h + j);
        }
        block
    }

    fn dot(&self, activation: &BlockQ8_K) -> f32 {
        let q = self.quants();
        let products: i32 = (0..LEN / SUB)
            .map(|s| {
                i32::from(self.scale(s)) * int_dot(&q[s * SUB..][..SUB], &activation.qs[s * SUB..][..SUB])
            })
            .sum();
        (activation.d * self.d.to_f32()) * products as f32
    }
}
