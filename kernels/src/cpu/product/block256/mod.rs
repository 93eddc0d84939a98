// SPDX-License-Identifier: Apache-2.0

//! Products with k-quants, Q2_K to Q6_K. A block has 256 values in sub-blocks with integer scales,
//! and one or two f16 scales.
//!
//! The kernels multiply the integer scales with exact int32 dot products. Therefore they form only
//! one or two f32 terms per 256 values.

#![expect(non_camel_case_types, reason = "names as ggml writes them")]

mod unpack;

use super::activation::Rounded256;
use super::format::{BlockFamily, Format, GROUP, Quants, Sink};
use crate::cpu::simd::{Simd, StridedRows};
use bytemuck::{Pod, Zeroable};
use unpack::{unpack_q2_k, unpack_q3_k, unpack_q4_k, unpack_q5_k, unpack_q6_k};

/// One unpacked block of each of 16 rows, with `SUBS` sub-blocks. `PAIRS` is half of `SUBS`.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Window256<const SUBS: usize, const PAIRS: usize> {
    /// `q[k]` holds values `4k` to `4k + 3` of every row, as unsigned bytes.
    q: [[u8; 64]; 64],
    scales: [[i32; 16]; SUBS],
    /// Factors of the activation sums of two sub-blocks, as two 16-bit numbers. These are the
    /// minima. In formats without minima they are the scales again, to centre the quants.
    weights: [[i32; 16]; PAIRS],
    d: [f32; 16],
    dmin: [f32; 16],
}

// SAFETY: all bit patterns are values of the arrays. Every field is a multiple of 64 bytes, so
// there is no padding.
unsafe impl<const SUBS: usize, const PAIRS: usize> Zeroable for Window256<SUBS, PAIRS> {}
// SAFETY: as above.
unsafe impl<const SUBS: usize, const PAIRS: usize> Pod for Window256<SUBS, PAIRS> where Self: 'static {}

pub(super) enum Q2_K {}
pub(super) enum Q3_K {}
pub(super) enum Q4_K {}
pub(super) enum Q5_K {}
pub(super) enum Q6_K {}

pub(super) enum Family256<const SUBS: usize, const PAIRS: usize> {}

impl<const SUBS: usize, const PAIRS: usize> BlockFamily for Family256<SUBS, PAIRS> {
    type Window = Window256<SUBS, PAIRS>;
    type Rounded = Rounded256;
    type Lanes = Lanes256;

    #[inline(always)]
    fn accumulate<S: Simd, const C: usize>(
        s: S,
        windows: &[Self::Window],
        rounded: [&[Rounded256]; C],
        quants: Quants,
        sums: &mut [S::F; C],
    ) {
        for (b, window) in windows.iter().enumerate() {
            let mut x = [&rounded[0][b]; C];
            for c in 1..C {
                x[c] = &rounded[c][b];
            }
            let words = 64 / SUBS;
            let mut products = [s.int(0); C];
            for sub in 0..SUBS {
                let mut dots = [s.int(0); C];
                for k in 0..words {
                    let word = sub * words + k;
                    let w = s.load_bytes(&window.q[word]);
                    for c in 0..C {
                        let a = s.int(i32::from_ne_bytes(x[c].q[word].map(|q| q as u8)));
                        dots[c] = s.dot_u7(dots[c], w, a);
                    }
                }
                let scale = s.load_int(&window.scales[sub]);
                for c in 0..C {
                    products[c] = s.add_int(products[c], s.mul_int(dots[c], scale));
                }
            }
            let mut corrections = [s.int(0); C];
            for pair in 0..PAIRS {
                let w = s.load_int(&window.weights[pair]);
                for c in 0..C {
                    let sums = if SUBS == 16 { x[c].sums16[pair] } else { x[c].sums32[pair] };
                    corrections[c] = s.dot_i16(corrections[c], w, s.int(two_sums(sums)));
                }
            }
            let (d, dmin) = (s.load(&window.d), s.load(&window.dmin));
            for c in 0..C {
                let value = term(s, quants, products[c], corrections[c], [d, dmin, s.splat(x[c].d)]);
                sums[c] = s.add(sums[c], value);
            }
        }
    }
}

/// Computes a block's f32 term from its integer sums. `da` is the scale of the activations.
#[inline(always)]
fn term<S: Simd>(s: S, quants: Quants, products: S::I, corrections: S::I, [d, dmin, da]: [S::F; 3]) -> S::F {
    match quants {
        Quants::Minima => {
            let product = s.mul(s.mul(da, d), s.to_float(products));
            s.sub(product, s.mul(s.mul(da, dmin), s.to_float(corrections)))
        }
        Quants::Offset(offset) => {
            let products = s.sub_int(products, s.mul_int(corrections, s.int(offset)));
            s.mul(s.mul(da, d), s.to_float(products))
        }
    }
}

macro_rules! format {
    ($format:ident, $bytes:expr, $subs:expr, $quants:expr, $unpack:ident) => {
        impl Format for $format {
            type BlockFamily = Family256<$subs, { $subs / 2 }>;
            const LEN: usize = 256;
            const BYTES: usize = $bytes;
            const QUANTS: Quants = $quants;

            #[inline(always)]
            fn unpack<S: Simd>(s: S, rows: StridedRows<'_>, at: usize, sink: &mut impl Sink<S>) {
                $unpack(s, rows, at, sink);
            }

            #[inline(always)]
            fn unpack_window<S: Simd>(
                s: S,
                rows: StridedRows<'_>,
                at: usize,
                window: &mut Window256<$subs, { $subs / 2 }>,
            ) {
                Self::unpack(s, rows, at, window);
            }

            #[inline(always)]
            fn terms<S: Simd>(s: S, blocks: StridedRows<'_>, at: usize, lanes: &Lanes256) -> S::F {
                let (zero, none) = (s.splat(0.0), s.int(0));
                let (sub_scales, products, corrections) = ([none; $subs], none, none);
                let mut sink =
                    Dots256::<'_, S, $subs> { lanes, sub_scales, products, corrections, d: zero, dmin: zero };
                Self::unpack(s, blocks, at, &mut sink);
                let scales = [sink.d, sink.dmin, s.load(&lanes.d)];
                term(s, Self::QUANTS, sink.products, sink.corrections, scales)
            }
        }
    };
}

format!(Q2_K, 84, 16, Quants::Minima, unpack_q2_k);
format!(Q3_K, 110, 16, Quants::Offset(4), unpack_q3_k);
format!(Q4_K, 144, 8, Quants::Minima, unpack_q4_k);
format!(Q5_K, 176, 8, Quants::Minima, unpack_q5_k);
format!(Q6_K, 210, 16, Quants::Offset(32), unpack_q6_k);

/// 16 blocks of an activation row, one per lane, with values in the order of [`Window256`].
#[repr(align(64))]
pub(super) struct Lanes256 {
    q: [[u8; 64]; 64],
    d: [f32; 16],
    /// In each lane, two sums of 16 quants as 16-bit numbers.
    sums16: [[i32; 16]; 8],
    /// In each lane, two sums of 32 quants as 16-bit numbers.
    sums32: [[i32; 16]; 4],
}

impl From<[Rounded256; GROUP]> for Lanes256 {
    fn from(blocks: [Rounded256; GROUP]) -> Self {
        let mut lanes = Self { q: [[0; 64]; 64], d: [0.0; 16], sums16: [[0; 16]; 8], sums32: [[0; 16]; 4] };
        for (r, block) in blocks.iter().enumerate() {
            for (words, word) in lanes.q.iter_mut().zip(block.q) {
                words[4 * r..4 * r + 4].copy_from_slice(&word.map(|q| q as u8));
            }
            lanes.d[r] = block.d;
            for (sums, &sum) in lanes.sums16.iter_mut().zip(&block.sums16) {
                sums[r] = two_sums(sum);
            }
            for (sums, &sum) in lanes.sums32.iter_mut().zip(&block.sums32) {
                sums[r] = two_sums(sum);
            }
        }
        lanes
    }
}

#[inline(always)]
fn two_sums([low, high]: [i16; 2]) -> i32 {
    i32::from(low) & 0xffff | i32::from(high) << 16
}

impl<S: Simd, const SUBS: usize, const PAIRS: usize> Sink<S> for Window256<SUBS, PAIRS> {
    #[inline(always)]
    fn scale(&mut self, s: S, d: S::F) {
        s.store(d, &mut self.d);
    }

    #[inline(always)]
    fn second_scale(&mut self, s: S, d: S::F) {
        s.store(d, &mut self.dmin);
    }

    #[inline(always)]
    fn sub_scale(&mut self, s: S, sub: usize, scale: S::I) {
        s.store_int(scale, &mut self.scales[sub]);
    }

    #[inline(always)]
    fn sum_weights(&mut self, s: S, pair: usize, weights: S::I) {
        s.store_int(weights, &mut self.weights[pair]);
    }

    #[inline(always)]
    fn values(&mut self, s: S, run: usize, words: [S::I; 8]) {
        for k in 0..8 {
            s.store_bytes(words[k], &mut self.q[8 * run + k]);
        }
    }
}

/// A [`Sink`] that multiplies unpacked values with activations at once, without a window.
struct Dots256<'a, S: Simd, const SUBS: usize> {
    lanes: &'a Lanes256,
    sub_scales: [S::I; SUBS],
    products: S::I,
    corrections: S::I,
    d: S::F,
    dmin: S::F,
}

impl<S: Simd, const SUBS: usize> Sink<S> for Dots256<'_, S, SUBS> {
    #[inline(always)]
    fn scale(&mut self, _: S, d: S::F) {
        self.d = d;
    }

    #[inline(always)]
    fn second_scale(&mut self, _: S, d: S::F) {
        self.dmin = d;
    }

    #[inline(always)]
    fn sub_scale(&mut self, _: S, sub: usize, scale: S::I) {
        self.sub_scales[sub] = scale;
    }

    #[inline(always)]
    fn sum_weights(&mut self, s: S, pair: usize, weights: S::I) {
        let sums = if SUBS == 16 { &self.lanes.sums16[pair] } else { &self.lanes.sums32[pair] };
        self.corrections = s.dot_i16(self.corrections, weights, s.load_int(sums));
    }

    #[inline(always)]
    fn values(&mut self, s: S, run: usize, words: [S::I; 8]) {
        let mut dots = [s.int(0); 2];
        for k in 0..8 {
            dots[k / 4] = s.dot_u7(dots[k / 4], words[k], s.load_bytes(&self.lanes.q[8 * run + k]));
        }
        if SUBS == 16 {
            for half in 0..2 {
                let product = s.mul_int(dots[half], self.sub_scales[2 * run + half]);
                self.products = s.add_int(self.products, product);
            }
        } else {
            let product = s.mul_int(s.add_int(dots[0], dots[1]), self.sub_scales[run]);
            self.products = s.add_int(self.products, product);
        }
    }
}
