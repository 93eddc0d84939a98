// SPDX-License-Identifier: Apache-2.0

//! Q5_K: as Q4_K with a fifth bit per value.

use super::{
    LEN, packed_scales,
    q4_k::{decode_affine, dot_affine, encode_affine, pack_nibbles, unpack_nibbles},
};
use crate::block::{BlockFormat, scale_pair};
use crate::{BlockQ8_K, DType, HalfBytes};
use bytemuck::{Pod, Zeroable};

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ5_K {
    pub d: HalfBytes,
    pub dmin: HalfBytes,
    /// Eight pairs of 6 bits; see [`Self::scale_min`].
    pub scales: [u8; 12],
    /// Bit s of byte l is the fifth bit of value 32s + l.
    pub qh: [u8; LEN / 8],
    /// Byte 32g + l has value 64g + l in its low nibble, 64g + 32 + l in its high one.
    pub qs: [u8; LEN / 2],
}

impl BlockQ5_K {
    /// 0 to 31.
    pub fn quants(&self) -> [i8; LEN] {
        let mut q = unpack_nibbles(&self.qs);
        for (s, out) in q.chunks_exact_mut(32).enumerate() {
            for (q, byte) in out.iter_mut().zip(&self.qh) {
                *q |= (((byte >> s) & 1) << 4) as i8;
            }
        }
        q
    }

    /// Integer scale and minimum of sub-block `s`.
    pub fn scale_min(&self, s: usize) -> (u8, u8) {
        packed_scales::unpack(&self.scales, s)
    }
}

impl BlockFormat for BlockQ5_K {
    const DTYPE: DType = DType::Q5_K;
    type Activation = BlockQ8_K;

    fn decode(&self, out: &mut [f32]) {
        decode_affine(&self.quants(), scale_pair(self.d, self.dmin), |s| self.scale_min(s), out);
    }

    fn encode(x: &[f32]) -> Self {
        let (header, q) = encode_affine(x, 31);
        let mut qh = [0; LEN / 8];
        for (s, q) in q.chunks_exact(32).enumerate() {
            for (byte, &q) in qh.iter_mut().zip(q) {
                *byte |= (q as u8 >> 4) << s;
            }
        }
        Self { d: header.d, dmin: header.dmin, scales: header.scales, qh, qs: pack_nibbles(&q) }
    }

    fn dot(&self, activation: &BlockQ8_K) -> f32 {
        dot_affine(&self.quants(), scale_pair(self.d, self.dmin), |s| self.scale_min(s), activation)
    }
}
