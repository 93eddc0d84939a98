// SPDX-License-Identifier: Apache-2.0

//! Q2_K: 16 sub-blocks of 16 values, 4-bit scales and minima, 2-bit quants. y = d sc q - dmin mn.

use super::{LEN, fit};
use crate::block::{BlockFormat, int_dot, scale_pair};
use crate::{BlockQ8_K, DType, HalfBytes};
use bytemuck::{Pod, Zeroable};

const SUB: usize = 16;

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ2_K {
    /// Scale in the low nibble, minimum in the high one.
    pub scales: [u8; LEN / SUB],
    /// Bits 2j of byte 32h + l belong to value 128h + 32j + l.
    pub qs: [u8; LEN / 4],
    pub d: HalfBytes,
    pub dmin: HalfBytes,
}

impl BlockQ2_K {
    /// 0 to 3.
    pub fn quants(&self) -> [i8; LEN] {
        let mut q = [0; LEN];
        for (out, qs) in q.chunks_exact_mut(128).zip(self.qs.chunks_exact(32)) {
            for (j, out) in out.chunks_exact_mut(32).enumerate() {
                for (q, byte) in out.iter_mut().zip(qs) {
                    *q = ((byte >> (2 * j)) & 3) as i8;
                }
            }
        }
        q
    }

    /// Integer scale and minimum of sub-block `s`.
    pub fn scale_min(&self, s: usize) -> (u8, u8) {
        (self.scales[s] & 15, self.scales[s] >> 4)
    }
}

impl BlockFormat for BlockQ2_K {
    const DTYPE: DType = DType::Q2_K;
    type Activation = BlockQ8_K;

    fn decode(&self, out: &mut [f32]) {
        let (d, dmin) = scale_pair(self.d, self.dmin);
        for (s, (out, q)) in out.chunks_exact_mut(SUB).zip(self.quants().chunks_exact(SUB)).enumerate() {
            let (sc, mn) = self.scale_min(s);
            let (scale, min) = (d * f32::from(sc), dmin * f32::from(mn));
            for (y, &q) in out.iter_mut().zip(q) {
                *y = scale * f32::from(q) - min;
            }
        }
    }

    fn encode(x: &[f32]) -> Self {
        let fits: [(f32, f32); LEN / SUB] = std::array::from_fn(|s| fit::affine(&x[s * SUB..][..SUB], 3));
        let (d, scales) = fit::quantize_scales(&fits.map(|fit| fit.0), 15.0);
        let (dmin, mins) = fit::quantize_scales(&fits.map(|fit| fit.1), 15.0);
        let mut block = Self {
            scales: std::array::from_fn(|s| scales[s] | mins[s] << 4),
            d: HalfBytes::from_f32(d),
            dmin: HalfBytes::from_f32(dmin),
            ..Self::zeroed()
        };
        let (d, dmin) = scale_pair(block.d, block.dmin);
        let q = fit::quantize(x, SUB, (0.0, 3.0), |s| (d * f32::from(scales[s]), dmin * f32::from(mins[s])));
        for (h, qs) in block.qs.chunks_exact_mut(32).enumerate() {
            for (l, byte) in qs.iter_mut().enumerate() {
                *byte = (0..4).fold(0, |byte, j| byte | (q[128 * h + 32 * j + l] as u8) << (2 * j));
            }
        }
        block
    }

    fn dot(&self, activation: &BlockQ8_K) -> f32 {
        let (d, dmin) = scale_pair(self.d, self.dmin);
        let q = self.quants();
        let (mut products, mut mins) = (0, 0);
        for s in 0..LEN / SUB {
            let (sc, mn) = self.scale_min(s);
            products += i32::from(sc) * int_dot(&q[s * SUB..][..SUB], &activation.qs[s * SUB..][..SUB]);
            mins += i32::from(mn) * i32::from(activation.bsums[s]);
        }
        (activation.d * d) * products as f32 - (activation.d * dmin) * mins as f32
    }
}
