// SPDX-License-Identifier: Apache-2.0

//! Logarithm and exponential of f64, from additions, multiplications and divisions only.
//!
//! The C library's functions differ between machines in the last bit. One bit may decide a token,
//! and tokens must be equal on every machine (I5).

use std::f64::consts::{LN_2, SQRT_2};

/// Natural logarithm of a finite positive number. The error is at most 4 units in the last place of
/// the larger of the result and 1.
pub(super) fn ln(x: f64) -> f64 {
    /// Terms of the series below. |s| <= 0.1716, so the next term is under 2^-53.
    const TERMS: u32 = 11;
    debug_assert!(x > 0.0 && x.is_finite());
    let bits = x.to_bits();
    let mut exponent = (bits >> 52) as i64 - 1023;
    let mut mantissa = f64::from_bits(bits & ((1 << 52) - 1) | 1023 << 52);
    if mantissa > SQRT_2 {
        mantissa /= 2.0;
        exponent += 1;
    }
    // ln(m) = 2 artanh(s) = 2 (s + s^3/3 + s^5/5 + ...)
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let square = s * s;
    let mut series = 0.0;
    for term in (0..TERMS).rev() {
        series = series * square + 1.0 / f64::from(2 * term + 1);
    }
    exponent as f64 * LN_2 + 2.0 * s * series
}

/// `e^x` for finite `x`. If the result is not a normal number, it is 0 or infinity. The relative
/// error is under 2^-45 times `1 + |x|`.
pub(super) fn exp(x: f64) -> f64 {
    /// Beyond this, the result is not a normal number.
    const LIMIT: f64 = 708.0;
    /// Terms of the series. |r| <= 0.347, so the next term is under 2^-53.
    const TERMS: u32 = 14;
    if x > LIMIT {
        return f64::INFINITY;
    }
    if x < -LIMIT {
        return 0.0;
    }
    let n = (x / LN_2).round();
    let r = x - n * LN_2;
    let mut series = 1.0;
    for term in (1..TERMS).rev() {
        series = 1.0 + series * r / f64::from(term);
    }
    series * f64::from_bits(((n as i64 + 1023) as u64) << 52)
}

/// `base^power` for `base > 0`.
pub(super) fn pow(base: f64, power: f64) -> f64 {
    exp(power * ln(base))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ln_and_exp_are_those_of_the_library() {
        let mut x = 1e-30_f64;
        while x < 1e30 {
            let truth = x.ln();
            assert!((ln(x) - truth).abs() <= 4.0 * f64::EPSILON * truth.abs().max(1.0), "ln {x}");
            x *= 1.003_7;
        }
        assert_eq!(ln(1.0), 0.0);
        for step in -70_000..70_000 {
            let x = f64::from(step) / 100.0;
            let truth = x.exp();
            assert!((exp(x) - truth).abs() <= truth * 3e-14 * (1.0 + x.abs()), "exp {x}");
        }
        assert_eq!((exp(0.0), exp(-800.0), exp(800.0)), (1.0, 0.0, f64::INFINITY));
        assert!((pow(2.0, 0.5) - SQRT_2).abs() < 1e-14 && (pow(0.25, 2.0) - 0.0625).abs() < 1e-15);
    }

    /// The expected digests were computed with Python's floats, operation by operation.
    #[test]
    fn results_are_the_same_bits_everywhere() {
        let digest = |value: fn(u32) -> f64| {
            (1..=5_000).fold(0_u64, |hash, i| {
                hash.rotate_left(5).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ value(i).to_bits()
            })
        };
        assert_eq!(digest(|i| ln(f64::from(i) * 0.013)), 0x93bf_e4c4_1b19_1c69);
        assert_eq!(digest(|i| exp((f64::from(i) - 2_500.0) * 0.11)), 0x384b_7674_3dd8_4a51);
    }
}
