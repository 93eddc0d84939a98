// SPDX-License-Identifier: Apache-2.0

//! Quantizes rows to int8 blocks: activations, and keys and values of type q8_0. The results have
//! the same bits as those of `quant`.

use crate::cpu::simd::{Simd, SimdKernel};
use half::f16;

/// An activation block of 32 values, for weights in blocks of 32. It has the fields of Q8_0 and of
/// Q8_1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(in crate::cpu) struct Rounded32 {
    pub(in crate::cpu) q: [[i8; 4]; 8],
    /// The scale after rounding to f16.
    pub(in crate::cpu) d: f32,
    /// The unrounded scale times the sum, rounded to f16, for weights with a minimum.
    pub(super) s: f32,
    /// Sum of the quants, for weights whose stored quants are not centred.
    pub(super) sum: i32,
}

/// An activation block of 256 values, for k-quants. It is a Q8_K block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rounded256 {
    pub(super) q: [[i8; 4]; 64],
    pub(super) d: f32,
    /// Sums of 16 quants, two in a word.
    pub(super) sums16: [[i16; 2]; 8],
    /// Sums of 32 quants, two in a word.
    pub(super) sums32: [[i16; 2]; 4],
}

impl Default for Rounded256 {
    fn default() -> Self {
        Self { q: [[0; 4]; 64], d: 0.0, sums16: [[0; 2]; 8], sums32: [[0; 2]; 4] }
    }
}

/// Rounds whole blocks; `x` has exactly the values that `out` has room for.
pub(in crate::cpu) struct Round<'a, B> {
    pub(in crate::cpu) x: &'a [f32],
    pub(in crate::cpu) out: &'a mut [B],
}

impl SimdKernel for Round<'_, Rounded32> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (x, out) in self.x.as_chunks::<32>().0.iter().zip(self.out) {
            // Compares magnitudes as integers, in 32 lanes that the compiler can vectorize.
            let mut largest = [0_u32; 32];
            for (largest, x) in largest.iter_mut().zip(x) {
                *largest = (x.to_bits() & 0x7fff_ffff).max(*largest);
            }
            let largest = largest.into_iter().fold(0, u32::max);
            let d = f32::from_bits(largest) / 127.0;
            let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
            let mut q = [0_i8; 32];
            let mut sum = 0;
            for (q, &x) in q.iter_mut().zip(x) {
                *q = (x * inverse).round() as i8;
                sum += i32::from(*q);
            }
            out.q.as_flattened_mut().copy_from_slice(&q);
            out.d = f16::from_f32(d).to_f32();
            out.s = f16::from_f32(sum as f32 * d).to_f32();
            out.sum = sum;
        }
    }
}

impl SimdKernel for Round<'_, Rounded256> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (x, out) in self.x.as_chunks::<256>().0.iter().zip(self.out) {
            let mut largest = [0_u32; 16];
            for x in x.as_chunks::<16>().0 {
                for (largest, x) in largest.iter_mut().zip(x) {
                    *largest = (x.to_bits() & 0x7fff_ffff).max(*largest);
                }
            }
            let largest = largest.into_iter().fold(0, u32::max);
            // Among values of equal magnitude, the first one decides the sign.
            let first = x.iter().find(|x| x.to_bits() & 0x7fff_ffff == largest);
            let Some(&max) = first.filter(|&&max| max != 0.0) else {
                *out = Rounded256::default();
                continue;
            };
            let inverse = -127.0 / max;
            let mut q = [0_i8; 256];
            for (q, &x) in q.iter_mut().zip(x) {
                *q = (inverse * x).round_ties_even().min(127.0) as i8;
            }
            let mut sums16 = [0_i16; 16];
            for (sum, q) in sums16.iter_mut().zip(q.as_chunks::<16>().0) {
                *sum = q.iter().map(|&q| i16::from(q)).sum();
            }
            out.q.as_flattened_mut().copy_from_slice(&q);
            out.d = 1.0 / inverse;
            out.sums16.as_flattened_mut().copy_from_slice(&sums16);
            for (sum, pair) in out.sums32.as_flattened_mut().iter_mut().zip(&out.sums16) {
                *sum = pair[0] + pair[1];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;
    use proptest::prelude::*;

    /// Rows of values that exercise the rounding rules: ties, zeros, signs, tiny and huge
    /// magnitudes.
    fn rows() -> impl Strategy<Value = Vec<f32>> {
        let value = prop_oneof![
            4 => -1.0_f32..1.0,
            2 => (-254_i32..=254).prop_map(|x| x as f32 * 0.5),
            1 => Just(0.0_f32),
            1 => Just(127.0_f32),
            1 => Just(-127.0_f32),
        ];
        let scale = prop_oneof![Just(1.0_f32), Just(1e-30), Just(1e-41), Just(1e30), 0.01_f32..100.0];
        (prop::collection::vec(value, 512), scale)
            .prop_map(|(x, scale)| x.into_iter().map(|x| x * scale).collect())
    }

    proptest! {
        #[test]
        fn blocks_of_32_are_rounded_as_quant_does(x in rows()) {
            let (q8_0, q8_1) = (quant::quantize_row_q8_0(&x).unwrap(), quant::quantize_row_q8_1(&x).unwrap());
            for isa in Isa::available() {
                let mut out = [Rounded32::default(); 16];
                isa.run(Round { x: &x, out: &mut out });
                for ((out, q8_0), q8_1) in out.iter().zip(&q8_0).zip(&q8_1) {
                    prop_assert_eq!(out.q.as_flattened(), &q8_0.qs);
                    prop_assert_eq!(out.d, q8_0.d.to_f32());
                    prop_assert_eq!(out.s, q8_1.s.to_f32());
                    prop_assert_eq!(out.sum, q8_0.qs.iter().map(|&q| i32::from(q)).sum::<i32>());
                }
            }
        }

        #[test]
        fn blocks_of_256_are_rounded_as_quant_does(x in rows()) {
            let q8_k = quant::quantize_row_q8_k(&x).unwrap();
            for isa in Isa::available() {
                let mut out = [Rounded256::default(); 2];
                isa.run(Round { x: &x, out: &mut out });
                for (out, q8_k) in out.iter().zip(&q8_k) {
                    prop_assert_eq!(out.q.as_flattened(), &q8_k.qs);
                    prop_assert_eq!(out.d, q8_k.d);
                    prop_assert_eq!(out.sums16.as_flattened(), &q8_k.bsums);
                    let sums32: Vec<i16> = q8_k.bsums.chunks(2).map(|pair| pair[0] + pair[1]).collect();
                    prop_assert_eq!(out.sums32.as_flattened(), &sums32);
                }
            }
        }
    }
}
