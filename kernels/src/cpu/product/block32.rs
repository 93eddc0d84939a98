// SPDX-License-Identifier: Apache-2.0

//! Products with Q8_0, Q4_0, Q4_1, Q5_0 and Q5_1 weights. A block has 32 values and one scale; Q4_1
//! and Q5_1 add one minimum.

use super::activation::Rounded32;
use super::format::{BlockFamily, Format, GROUP, Quants, Sink};
use crate::cpu::simd::{Simd, StridedRows};
use bytemuck::{Pod, Zeroable};

/// One unpacked block of each of 16 rows. `q[k]` holds values `4k` to `4k + 3` of every row, as
/// unsigned bytes.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub(super) struct Window32 {
    q: [[u8; 64]; 8],
    d: [f32; 16],
    /// Minima. Formats without minima do not use them.
    m: [f32; 16],
}

/// 16 blocks of an activation row, one per lane, with values in the order of [`Window32`].
#[repr(align(64))]
pub(super) struct Lanes32 {
    q: [[u8; 64]; 8],
    d: [f32; 16],
    s: [f32; 16],
    sums: [i32; 16],
}

/// Unpacking adds 128 to the signed quants, so that they are unsigned.
pub(super) enum Q8_0 {}
pub(super) enum Q4_0 {}
pub(super) enum Q4_1 {}
pub(super) enum Q5_0 {}
pub(super) enum Q5_1 {}

/// Formats with blocks of 32 values. If `FULL`, unpacked quants use all eight bits; otherwise they
/// are below 128.
pub(super) enum Family32<const FULL: bool> {}

impl<const FULL: bool> BlockFamily for Family32<FULL> {
    type Window = Window32;
    type Rounded = Rounded32;
    type Lanes = Lanes32;

    #[inline(always)]
    fn accumulate<S: Simd, const C: usize>(
        s: S,
        windows: &[Window32],
        rounded: [&[Rounded32]; C],
        quants: Quants,
        sums: &mut [S::F; C],
    ) {
        for (b, window) in windows.iter().enumerate() {
            let mut x = [&rounded[0][b]; C];
            for c in 1..C {
                x[c] = &rounded[c][b];
            }
            let mut dots = [s.int(0); C];
            if let Quants::Offset(offset) = quants {
                for c in 0..C {
                    dots[c] = s.int(-offset * x[c].sum);
                }
            }
            for k in 0..8 {
                let w = s.load_bytes(&window.q[k]);
                for c in 0..C {
                    let a = s.int(i32::from_ne_bytes(x[c].q[k].map(|q| q as u8)));
                    dots[c] = dot::<S, FULL>(s, dots[c], w, a);
                }
            }
            let d = s.load(&window.d);
            for c in 0..C {
                let mut term = s.mul(s.mul(d, s.splat(x[c].d)), s.to_float(dots[c]));
                if let Quants::Minima = quants {
                    term = s.add(term, s.mul(s.load(&window.m), s.splat(x[c].s)));
                }
                sums[c] = s.add(sums[c], term);
            }
        }
    }
}

macro_rules! format {
    ($format:ident, $bytes:expr, $full:expr, $quants:expr, $unpack:ident($($argument:expr),*)) => {
        impl Format for $format {
            type BlockFamily = Family32<$full>;
            const LEN: usize = 32;
            const BYTES: usize = $bytes;
            const QUANTS: Quants = $quants;

            #[inline(always)]
            fn unpack<S: Simd>(s: S, rows: StridedRows<'_>, at: usize, sink: &mut impl Sink<S>) {
                $unpack(s, rows, at, $($argument,)* sink);
            }

            #[inline(always)]
            fn unpack_window<S: Simd>(s: S, rows: StridedRows<'_>, at: usize, window: &mut Window32) {
                Self::unpack(s, rows, at, window);
            }

            #[inline(always)]
            fn terms<S: Simd>(s: S, blocks: StridedRows<'_>, at: usize, lanes: &Lanes32) -> S::F {
                let (zero, none) = (s.splat(0.0), s.int(0));
                let mut sink = Dots32::<'_, S, $full> { lanes, dots: none, d: zero, m: zero };
                if let Quants::Offset(offset) = Self::QUANTS {
                    sink.dots = s.mul_int(s.load_int(&lanes.sums), s.int(-offset));
                }
                Self::unpack(s, blocks, at, &mut sink);
                let term = s.mul(s.mul(sink.d, s.load(&lanes.d)), s.to_float(sink.dots));
                match Self::QUANTS {
                    Quants::Offset(_) => term,
                    Quants::Minima => s.add(term, s.mul(sink.m, s.load(&lanes.s))),
                }
            }
        }
    };
}

format!(Q8_0, 34, true, Quants::Offset(128), unpack_q8_0());
format!(Q4_0, 18, false, Quants::Offset(8), unpack_nibbles(2, None));
format!(Q4_1, 20, false, Quants::Minima, unpack_nibbles(4, None));
format!(Q5_0, 22, false, Quants::Offset(16), unpack_nibbles(6, Some(2)));
format!(Q5_1, 24, false, Quants::Minima, unpack_nibbles(8, Some(4)));

impl From<[Rounded32; GROUP]> for Lanes32 {
    fn from(blocks: [Rounded32; GROUP]) -> Self {
        let mut lanes = Self { q: [[0; 64]; 8], d: [0.0; 16], s: [0.0; 16], sums: [0; 16] };
        for (r, block) in blocks.iter().enumerate() {
            for (words, word) in lanes.q.iter_mut().zip(block.q) {
                words[4 * r..4 * r + 4].copy_from_slice(&word.map(|q| q as u8));
            }
            (lanes.d[r], lanes.s[r], lanes.sums[r]) = (block.d, block.s, block.sum);
        }
        lanes
    }
}

impl<S: Simd> Sink<S> for Window32 {
    #[inline(always)]
    fn scale(&mut self, s: S, d: S::F) {
        s.store(d, &mut self.d);
    }

    #[inline(always)]
    fn second_scale(&mut self, s: S, d: S::F) {
        s.store(d, &mut self.m);
    }

    #[inline(always)]
    fn sub_scale(&mut self, _: S, _: usize, _: S::I) {}

    #[inline(always)]
    fn sum_weights(&mut self, _: S, _: usize, _: S::I) {}

    #[inline(always)]
    fn values(&mut self, s: S, _: usize, words: [S::I; 8]) {
        for k in 0..8 {
            s.store_bytes(words[k], &mut self.q[k]);
        }
    }
}

/// A [`Sink`] that multiplies unpacked values with activations at once, without a window.
struct Dots32<'a, S: Simd, const FULL: bool> {
    lanes: &'a Lanes32,
    dots: S::I,
    d: S::F,
    m: S::F,
}

impl<S: Simd, const FULL: bool> Sink<S> for Dots32<'_, S, FULL> {
    #[inline(always)]
    fn scale(&mut self, _: S, d: S::F) {
        self.d = d;
    }

    #[inline(always)]
    fn second_scale(&mut self, _: S, d: S::F) {
        self.m = d;
    }

    #[inline(always)]
    fn sub_scale(&mut self, _: S, _: usize, _: S::I) {}

    #[inline(always)]
    fn sum_weights(&mut self, _: S, _: usize, _: S::I) {}

    #[inline(always)]
    fn values(&mut self, s: S, _: usize, words: [S::I; 8]) {
        for k in 0..8 {
            self.dots = dot::<S, FULL>(s, self.dots, words[k], s.load_bytes(&self.lanes.q[k]));
        }
    }
}

#[inline(always)]
fn dot<S: Simd, const FULL: bool>(s: S, acc: S::I, w: S::I, a: S::I) -> S::I {
    if FULL { s.dot_u8(acc, w, a) } else { s.dot_u7(acc, w, a) }
}

/// Unpacks Q8_0. The fields of a block are `d, qs[32]`.
#[inline(always)]
fn unpack_q8_0<S: Simd>(s: S, rows: StridedRows<'_>, at: usize, sink: &mut impl Sink<S>) {
    sink.scale(s, s.gather_f16(rows, at));
    let sign = s.int(0x8080_8080_u32 as i32);
    let mut words = eight(s.transpose(rows, at + 2), s.transpose(rows, at + 18));
    for word in &mut words {
        *word = s.xor(*word, sign);
    }
    sink.values(s, 0, words);
}

/// Unpacks Q4_0, Q4_1, Q5_0 and Q5_1. The fields of a block are:
///
/// 1. `d`, and `m` in formats with a minimum.
/// 2. 32 fifth bits at `fifth`, in formats that have them. Bit `e` belongs to value `e`.
/// 3. 16 bytes of nibbles at `nibbles`. The low ones are values 0 to 15, the high ones 16 to 31.
#[inline(always)]
fn unpack_nibbles<S: Simd>(
    s: S,
    rows: StridedRows<'_>,
    at: usize,
    nibbles: usize,
    fifth: Option<usize>,
    sink: &mut impl Sink<S>,
) {
    // The first field after the scales starts at byte 2 (one f16 scale) or 4 (scale and minimum).
    if fifth.unwrap_or(nibbles) == 2 {
        sink.scale(s, s.gather_f16(rows, at));
    } else {
        let both = s.gather_u32(rows, at);
        sink.scale(s, s.low_f16(both));
        sink.second_scale(s, s.low_f16(s.shr::<16>(both)));
    }
    let low = s.int(0x0f0f_0f0f);
    let packed = s.transpose(rows, at + nibbles);
    let mut words = eight(packed, packed);
    for k in 0..4 {
        words[k] = s.and(words[k], low);
        words[k + 4] = s.and(s.shr::<4>(words[k + 4]), low);
    }
    if let Some(fifth) = fifth {
        let mut bits = s.gather_u32(rows, at + fifth);
        for word in &mut words {
            // The product moves bit i to bit 8i, for i from 0 to 3.
            let spread = s.mul_int(s.and(bits, s.int(0xf)), s.int(0x0020_4081));
            *word = s.or(*word, s.shl::<4>(s.and(spread, s.int(0x0101_0101))));
            bits = s.shr::<4>(bits);
        }
    }
    sink.values(s, 0, words);
}

#[inline(always)]
fn eight<T>([a, b, c, d]: [T; 4], [e, f, g, h]: [T; 4]) -> [T; 8] {
    [a, b, c, d, e, f, g, h]
}
