// SPDX-License-Identifier: Apache-2.0

//! Q4_K: 8 sub-blocks of 32 values, 6-bit scales and minima, 4-bit quants. y = d sc q - dmin mn.

use super::{LEN, fit, packed_scales};
use crate::block::{BlockFormat, scale_pair};
use crate::{BlockQ8_K, DType, HalfBytes};
use bytemuck::{Pod, Zeroable};

pub(super) const SUB: usize = 32;
pub(super) const SUBS: usize = LEN / SUB;

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4_K {
    pub d: HalfBytes,
    pub dmin: HalfBytes,
    /// Eight pairs of 6 bits; see [`Self::scale_min`].
    pub scales: [u8; 12],
    /// Byte 32g + l has value 64g + l in its low nibble, 64g + 32 + l in its high one.
    pub qs: [u8; LEN / 2],
}

impl BlockQ4_K {
    /// 0 to 15.
    pub fn quants(&self) -> [i8; LEN] {
        unpack_nibbles(&self.qs)
    }

    /// Integer scale and minimum of sub-block `s`.
    pub fn scale_min(&self, s: usize) -> (u8, u8) {
        packed_scales::unpack(&self.scales, s)
    }
}

impl BlockFormat for BlockQ4_K {
    const DTYPE: DType = DType::Q4_K;
    type Activation = BlockQ8_K;

    fn decode(&self, out: &mut [f32]) {
        decode_affine(&self.quants(), scale_pair(self.d, self.dmin), |s| self.scale_min(s), out);
    }

    fn encode(x: &[f32]) -> Self {
        let (header, q) = encode_affine(x, 15);
        Self { d: header.d, dmin: header.dmin, scales: header.scales, qs: pack_nibbles(&q) }
    }

    fn dot(&self, activation: &BlockQ8_K) -> f32 {
        dot_affine(&self.quants(), scale_pair(self.d, self.dmin), |s| self.scale_min(s), activation)
    }
}

/// The common header of Q4_K and Q5_K blocks.
pub(super) struct AffineHeader {
    pub(super) d: HalfBytes,
    pub(super) dmin: HalfBytes,
    pub(super) scales: [u8; 12],
}

pub(super) fn decode_affine(
    q: &[i8; LEN],
    (d, dmin): (f32, f32),
    scale_min: impl Fn(usize) -> (u8, u8),
    out: &mut [f32],
) {
    for (s, (out, q)) in out.chunks_exact_mut(SUB).zip(q.chunks_exact(SUB)).enumerate() {
        let (sc, mn) = scale_min(s);
        let (scale, min) = (d * f32::from(sc), dmin * f32::from(mn));
        for (y, &q) in out.iter_mut().zip(q) {
            *y = scale * f32::from(q) - min;
        }
    }
}

/// `steps` is the largest quant.
pub(super) fn encode_affine(x: &[f32], steps: i32) -> (AffineHeader, [i8; LEN]) {
    let fits: [(f32, f32); SUBS] = std::array::from_fn(|s| fit::affine(&x[s * SUB..][..SUB], steps));
    let (d, scales) = fit::quantize_scales(&fits.map(|fit| fit.0), 63.0);
    let (dmin, mins) = fit::quantize_scales(&fits.map(|fit| fit.1), 63.0);
    let header = AffineHeader {
        d: HalfBytes::from_f32(d),
        dmin: HalfBytes::from_f32(dmin),
        scales: packed_scales::pack(&std::array::from_fn(|s| (scales[s], mins[s]))),
    };
    let (d, dmin) = scale_pair(header.d, header.dmin);
    let q =
        fit::quantize(x, SUB, (0.0, steps as f32), |s| (d * f32::from(scales[s]), dmin * f32::from(mins[s])));
    (header, q)
}

pub(super) fn dot_affine(
    q: &[i8; LEN],
    (d, dmin): (f32, f32),
    scale_min: impl Fn(usize) -> (u8, u8),
    activation: &BlockQ8_K,
) -> f32 {
    let (mut products, mut mins) = (0, 0);
    for s in 0..SUBS {
        let (sc, mn) = scale_min(s);
        let product = crate::block::int_dot(&q[s * SUB..][..SUB], &activation.qs[s * SUB..][..SUB]);
        let sum = i32::from(activation.bsums[2 * s]) + i32::from(activation.bsums[2 * s + 1]);
        products += i32::from(sc) * product;
        mins += i32::from(mn) * sum;
    }
    (activation.d * d) * products as f32 - (activation.d * dmin) * mins as f32
}

pub(super) fn unpack_nibbles(qs: &[u8; LEN / 2]) -> [i8; LEN] {
    let mut q = [0; LEN];
    for (out, qs) in q.chunks_exact_mut(64).zip(qs.chunks_exact(32)) {
        for (l, byte) in qs.iter().enumerate() {
            out[l] = (byte & 15) as i8;
            out[l + 32] = (byte >> 4) as i8;
        }
    }
    q
}

/// Low nibbles of `q`.
pub(super) fn pack_nibbles(q: &[i8; LEN]) -> [u8; LEN / 2] {
    std::array::from_fn(|byte| {
        let e = byte / 32 * 64 + byte % 32;
        (q[e] as u8 & 15) | (q[e + 32] as u8 & 15) << 4
    })
}
