// SPDX-License-Identifier: Apache-2.0

//! exp, sine and cosine with the same bits on every machine, unlike those of the C library.

use super::simd::Simd;
use std::f64::consts::FRAC_PI_2;

/// Arguments are clamped to this range, in which the result is a normal f32.
const EXP_ARGUMENT_MIN: f32 = -87.0;
const EXP_ARGUMENT_MAX: f32 = 88.0;
/// ln 2 in two parts; the first has few bits, so that products with small integers are exact.
const LN_2_HIGH: f32 = 0.693_359_4;
const LN_2_LOW: f32 = -2.121_944_4e-4;
/// exp(r) = 1 + r + r^2 p(r) on |r| <= ln 2 / 2, highest power first (coefficients of Cephes'
/// expf).
const EXP_COEFFICIENTS: [f32; 6] =
    [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];

/// e^x with a relative error below 2e-7. An argument out of range is clamped: the result is never
/// zero and never infinite.
#[inline(always)]
pub(super) fn exp<S: Simd>(s: S, x: S::F) -> S::F {
    let x = s.max(s.min(x, s.splat(EXP_ARGUMENT_MAX)), s.splat(EXP_ARGUMENT_MIN));
    let n = s.round(s.mul(x, s.splat(std::f32::consts::LOG2_E)));
    let n_float = s.to_float(n);
    let r = s.fma(n_float, s.splat(-LN_2_HIGH), x);
    let r = s.fma(n_float, s.splat(-LN_2_LOW), r);
    let mut p = s.splat(EXP_COEFFICIENTS[0]);
    for &coefficient in &EXP_COEFFICIENTS[1..] {
        p = s.fma(p, r, s.splat(coefficient));
    }
    let value = s.add(s.fma(s.mul(r, r), p, r), s.splat(1.0));
    // Multiplies with 2^n by adding n to the exponent field.
    s.as_float(s.add_int(s.as_int(value), s.shl::<23>(n)))
}

/// e^x of one number, with the bits of a lane of [`exp`].
#[inline(always)]
pub(super) fn exp_one<S: Simd>(s: S, x: f32) -> f32 {
    let mut lanes = [0.0; 16];
    s.store(exp(s, s.splat(x)), &mut lanes);
    lanes[0]
}

/// pi / 2 in two parts; products of the first with integers below 2^20 are exact.
const HALF_PI_HIGH: f64 = 1.570_796_326_734_125_6;
const HALF_PI_LOW: f64 = 6.077_100_506_506_192e-11;

/// Sine and cosine of `x`, for magnitudes below 2^20 within 1e-10 (rotary angles are at most the
/// context length).
pub(super) fn sin_cos(x: f64) -> (f64, f64) {
    let quarter = (x / FRAC_PI_2).round();
    let r = (x - quarter * HALF_PI_HIGH) - quarter * HALF_PI_LOW;
    let r2 = r * r;
    // Taylor series on |r| <= pi / 4; the first term left out is below 1e-13.
    let terms = |first: f64, coefficients: [f64; 6]| {
        coefficients.iter().rev().fold(0.0, |sum, &coefficient| (sum + coefficient) * r2) + first
    };
    let sin = r * terms(
        1.0,
        [
            -1.0 / 6.0,
            1.0 / 120.0,
            -1.0 / 5_040.0,
            1.0 / 362_880.0,
            -1.0 / 39_916_800.0,
            1.0 / 6_227_020_800.0,
        ],
    );
    let cos =
        terms(1.0, [-0.5, 1.0 / 24.0, -1.0 / 720.0, 1.0 / 40_320.0, -1.0 / 3_628_800.0, 1.0 / 479_001_600.0]);
    match (quarter as i64) & 3 {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;
    use crate::cpu::simd::SimdKernel;

    struct ExpAll<'a>(&'a [f32; 16], &'a mut [f32; 16]);

    impl SimdKernel for ExpAll<'_> {
        type Output = ();

        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            s.store(exp(s, s.load(self.0)), self.1);
        }
    }

    #[test]
    fn exp_is_close_and_the_same_on_every_instruction_set() {
        let mut x = -87.0_f32;
        while x < 88.0 {
            let xs = std::array::from_fn(|i| x + i as f32 * 0.001);
            let mut outs = Vec::new();
            for isa in Isa::available() {
                let mut out = [0.0; 16];
                isa.run(ExpAll(&xs, &mut out));
                outs.push(out.map(f32::to_bits));
            }
            assert!(outs.windows(2).all(|pair| pair[0] == pair[1]));
            for (x, bits) in xs.iter().zip(outs[0]) {
                let (found, exact) = (f64::from(f32::from_bits(bits)), f64::from(x.min(88.0)).exp());
                assert!((found / exact - 1.0).abs() < 2e-7, "exp({x}) = {found}, not {exact}");
            }
            x += 0.37;
        }
    }

    #[test]
    fn exp_stays_finite_and_positive() {
        let xs = [
            f32::MIN,
            -1e9,
            -88.0,
            -87.0,
            88.0,
            89.0,
            1e9,
            f32::MAX,
            0.0,
            -0.0,
            1.0,
            2.0,
            3.0,
            4.0,
            5.0,
            6.0,
        ];
        let mut out = [0.0; 16];
        Isa::best().run(ExpAll(&xs, &mut out));
        assert!(out.iter().all(|x| x.is_normal() && *x > 0.0), "{out:?}");
        assert_eq!(out[8], 1.0);
    }

    #[test]
    fn sine_and_cosine_are_close() {
        for i in 0..200_000 {
            let x = f64::from(i) * 0.731;
            let (sin, cos) = sin_cos(x);
            assert!((sin - x.sin()).abs() < 1e-10 && (cos - x.cos()).abs() < 1e-10, "angle {x}");
        }
    }
}
