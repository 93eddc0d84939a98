// SPDX-License-Identifier: Apache-2.0

//! Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0: blocks of 32 values with one scale; the `_1` types also have a
//! minimum.
//!
//! Value e of a 4- or 5-bit block is the low nibble of byte e if e < 16, else the high nibble of
//! byte e - 16.

use crate::block::{BlockFormat, int_dot, scale_pair};
use crate::{BlockQ8_1, DType, HalfBytes};
use bytemuck::{Pod, Zeroable};

const LEN: usize = 32;
const HALF: usize = LEN / 2;

/// y = (q - 8) d.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4_0 {
    pub d: HalfBytes,
    pub qs: [u8; HALF],
}

/// y = q d + m.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4_1 {
    pub d: HalfBytes,
    pub m: HalfBytes,
    pub qs: [u8; HALF],
}

/// y = (q - 16) d; `qh` is a little-endian u32 whose bit e is the fifth bit of value e.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ5_0 {
    pub d: HalfBytes,
    pub qh: [u8; 4],
    pub qs: [u8; HALF],
}

/// y = q d + m; `qh` as in [`BlockQ5_0`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ5_1 {
    pub d: HalfBytes,
    pub m: HalfBytes,
    pub qh: [u8; 4],
    pub qs: [u8; HALF],
}

/// y = q d. A weight format and an activation format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ8_0 {
    pub d: HalfBytes,
    pub qs: [i8; LEN],
}

impl BlockQ4_0 {
    /// Centred: -8 to 7.
    pub fn quants(&self) -> [i8; LEN] {
        unpack_nibbles(&self.qs).map(|q| q - 8)
    }
}

impl BlockQ4_1 {
    /// 0 to 15.
    pub fn quants(&self) -> [i8; LEN] {
        unpack_nibbles(&self.qs)
    }
}

impl BlockQ5_0 {
    /// Centred: -16 to 15.
    pub fn quants(&self) -> [i8; LEN] {
        unpack_five_bits(&self.qs, self.qh).map(|q| q - 16)
    }
}

impl BlockQ5_1 {
    /// 0 to 31.
    pub fn quants(&self) -> [i8; LEN] {
        unpack_five_bits(&self.qs, self.qh)
    }
}

impl BlockFormat for BlockQ4_0 {
    const DTYPE: DType = DType::Q4_0;
    type Activation = BlockQ8_0;

    fn decode(&self, out: &mut [f32]) {
        scale(&self.quants(), self.d, out);
    }

    fn encode(x: &[f32]) -> Self {
        // The value of largest magnitude becomes -8, since the range -8 to 7 has one more step
        // below zero.
        let d = signed_max(x) / -8.0;
        let inverse = inverse_or_zero(d);
        let q = quantize(x, |x| (x * inverse + 8.5).min(15.0));
        Self { d: HalfBytes::from_f32(d), qs: pack_nibbles(&q) }
    }

    fn dot(&self, activation: &BlockQ8_0) -> f32 {
        dot_q8_0(&self.quants(), self.d, activation)
    }
}

impl BlockFormat for BlockQ4_1 {
    const DTYPE: DType = DType::Q4_1;
    type Activation = BlockQ8_1;

    fn decode(&self, out: &mut [f32]) {
        scale_and_shift(&self.quants(), self.d, self.m, out);
    }

    fn encode(x: &[f32]) -> Self {
        let (d, min) = range(x, 15.0);
        let inverse = inverse_or_zero(d);
        let q = quantize(x, |x| ((x - min) * inverse + 0.5).min(15.0));
        Self { d: HalfBytes::from_f32(d), m: HalfBytes::from_f32(min), qs: pack_nibbles(&q) }
    }

    fn dot(&self, activation: &BlockQ8_1) -> f32 {
        dot_q8_1(&self.quants(), self.d, self.m, activation)
    }
}

impl BlockFormat for BlockQ5_0 {
    const DTYPE: DType = DType::Q5_0;
    type Activation = BlockQ8_0;

    fn decode(&self, out: &mut [f32]) {
        scale(&self.quants(), self.d, out);
    }

    fn encode(x: &[f32]) -> Self {
        let d = signed_max(x) / -16.0;
        let inverse = inverse_or_zero(d);
        let q = quantize(x, |x| (x * inverse + 16.5).min(31.0));
        Self { d: HalfBytes::from_f32(d), qh: pack_fifth_bits(&q), qs: pack_nibbles(&q) }
    }

    fn dot(&self, activation: &BlockQ8_0) -> f32 {
        dot_q8_0(&self.quants(), self.d, activation)
    }
}

impl BlockFormat for BlockQ5_1 {
    const DTYPE: DType = DType::Q5_1;
    type Activation = BlockQ8_1;

    fn decode(&self, out: &mut [f32]) {
        scale_and_shift(&self.quants(), self.d, self.m, out);
    }

    fn encode(x: &[f32]) -> Self {
        let (d, min) = range(x, 31.0);
        let inverse = inverse_or_zero(d);
        let q = quantize(x, |x| ((x - min) * inverse + 0.5).min(31.0));
        Self {
            d: HalfBytes::from_f32(d),
            m: HalfBytes::from_f32(min),
            qh: pack_fifth_bits(&q),
            qs: pack_nibbles(&q),
        }
    }

    fn dot(&self, activation: &BlockQ8_1) -> f32 {
        dot_q8_1(&self.quants(), self.d, self.m, activation)
    }
}

impl BlockFormat for BlockQ8_0 {
    const DTYPE: DType = DType::Q8_0;
    type Activation = BlockQ8_0;

    fn decode(&self, out: &mut [f32]) {
        scale(&self.qs, self.d, out);
    }

    /// Quants are computed with the f32 scale. Only the stored scale is rounded to f16.
    fn encode(x: &[f32]) -> Self {
        let (d, qs) = quantize_q8(x);
        Self { d: HalfBytes::from_f32(d), qs }
    }

    fn dot(&self, activation: &BlockQ8_0) -> f32 {
        dot_q8_0(&self.qs, self.d, activation)
    }
}

/// Scale and quants of a Q8_0 or Q8_1 block: the largest magnitude becomes 127, halves round away
/// from zero.
pub(crate) fn quantize_q8(x: &[f32]) -> (f32, [i8; LEN]) {
    let d = x.iter().fold(0.0_f32, |max, x| max.max(x.abs())) / 127.0;
    let inverse = inverse_or_zero(d);
    let mut qs = [0; LEN];
    for (q, x) in qs.iter_mut().zip(x) {
        *q = (x * inverse).round() as i8;
    }
    (d, qs)
}

fn scale(q: &[i8; LEN], d: HalfBytes, out: &mut [f32]) {
    let d = d.to_f32();
    for (y, &q) in out.iter_mut().zip(q) {
        *y = f32::from(q) * d;
    }
}

fn scale_and_shift(q: &[i8; LEN], d: HalfBytes, m: HalfBytes, out: &mut [f32]) {
    let (d, m) = scale_pair(d, m);
    for (y, &q) in out.iter_mut().zip(q) {
        *y = f32::from(q) * d + m;
    }
}

fn dot_q8_0(q: &[i8; LEN], d: HalfBytes, activation: &BlockQ8_0) -> f32 {
    int_dot(q, &activation.qs) as f32 * (d.to_f32() * activation.d.to_f32())
}

fn dot_q8_1(q: &[i8; LEN], d: HalfBytes, m: HalfBytes, activation: &BlockQ8_1) -> f32 {
    let (d, m) = scale_pair(d, m);
    (d * activation.d.to_f32()) * int_dot(q, &activation.qs) as f32 + m * activation.s.to_f32()
}

fn unpack_nibbles(qs: &[u8; HALF]) -> [i8; LEN] {
    let mut q = [0; LEN];
    for (e, byte) in qs.iter().enumerate() {
        q[e] = (byte & 15) as i8;
        q[e + HALF] = (byte >> 4) as i8;
    }
    q
}

fn unpack_five_bits(qs: &[u8; HALF], qh: [u8; 4]) -> [i8; LEN] {
    let mut q = unpack_nibbles(qs);
    let fifth = u32::from_le_bytes(qh);
    for (e, q) in q.iter_mut().enumerate() {
        *q |= (((fifth >> e) & 1) << 4) as i8;
    }
    q
}

fn pack_nibbles(q: &[u8; LEN]) -> [u8; HALF] {
    std::array::from_fn(|e| q[e] & 15 | (q[e + HALF] & 15) << 4)
}

fn pack_fifth_bits(q: &[u8; LEN]) -> [u8; 4] {
    let fifth = q.iter().enumerate().fold(0_u32, |bits, (e, q)| bits | u32::from(q >> 4) << e);
    fifth.to_le_bytes()
}

/// `code` returns a number whose integer part is the quant.
fn quantize(x: &[f32], code: impl Fn(f32) -> f32) -> [u8; LEN] {
    let mut q = [0; LEN];
    for (q, &x) in q.iter_mut().zip(x) {
        *q = code(x) as u8;
    }
    q
}

/// The value of largest magnitude with its sign, the first among equals.
fn signed_max(x: &[f32]) -> f32 {
    x.iter().fold(0.0_f32, |max, &x| if x.abs() > max.abs() { x } else { max })
}

/// The scale that divides the range of `x` into `steps`, and the minimum of `x`.
fn range(x: &[f32], steps: f32) -> (f32, f32) {
    let (min, max) = x.iter().fold((f32::MAX, f32::MIN), |(min, max), &x| (min.min(x), max.max(x)));
    ((max - min) / steps, min)
}

fn inverse_or_zero(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}
