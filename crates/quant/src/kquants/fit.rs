// SPDX-License-Identifier: Apache-2.0

//! Scale search of the K-quants: tries a few grids per sub-block, improves each by weighted least
//! squares, and keeps the best.
//!
//! The weight of an error is rms + |x|, so that large values count more than by their square alone.

use super::LEN;

/// Grids tried on each side of the plain grid, in tenths of a step of the largest quant.
const CANDIDATES: i32 = 9;

/// The scale s with the smallest error of x = s q, for q in `-steps..steps`. It may be negative,
/// since the negative side has one more step.
pub(super) fn symmetric(x: &[f32], steps: i32) -> f32 {
    let max = x.iter().fold(0.0_f32, |max, &x| if x.abs() > max.abs() { x } else { max });
    if max == 0.0 {
        return 0.0;
    }
    let floor = rms(x);
    let mut best = (0.0, 0.0);
    for candidate in -CANDIDATES..=CANDIDATES {
        let inverse = -(steps as f32 + 0.1 * candidate as f32) / max;
        let (mut xq, mut qq) = (0.0_f32, 0.0_f32);
        for &x in x {
            let q = (x * inverse).round().clamp(-steps as f32, (steps - 1) as f32);
            let weight = floor + x.abs();
            xq += weight * x * q;
            qq += weight * q * q;
        }
        // The error of least squares is (sum of w x^2) - gain.
        let gain = if qq > 0.0 { xq * xq / qq } else { 0.0 };
        if gain > best.0 {
            best = (gain, xq / qq);
        }
    }
    best.1
}

/// Scale and minimum with the smallest error of x = s q - m, for q in `0..=steps`. Both are at
/// least 0.
pub(super) fn affine(x: &[f32], steps: i32) -> (f32, f32) {
    let (low, high) = x.iter().fold((0.0_f32, f32::MIN), |(low, high), &x| (low.min(x), high.max(x)));
    if high <= low {
        // All values are equal and at most 0, so the minimum alone represents them.
        return (0.0, -low);
    }
    let floor = rms(x);
    let mut best = (f32::MAX, (high - low) / steps as f32, -low);
    for candidate in -CANDIDATES..=CANDIDATES {
        let inverse = (steps as f32 + 0.1 * candidate as f32) / (high - low);
        if inverse <= 0.0 {
            continue;
        }
        let quant = |x: f32| ((x - low) * inverse).round().clamp(0.0, steps as f32);
        let (scale, min) = affine_least_squares(x, floor, &quant);
        let error: f32 = x
            .iter()
            .map(|&x| {
                let difference = scale * quant(x) - min - x;
                (floor + x.abs()) * difference * difference
            })
            .sum();
        if error < best.0 {
            best = (error, scale, min);
        }
    }
    (best.1, best.2)
}

fn affine_least_squares(x: &[f32], floor: f32, quant: &impl Fn(f32) -> f32) -> (f32, f32) {
    let (mut w, mut wq, mut wqq, mut wx, mut wxq) = (0.0_f32, 0.0_f32, 0.0_f32, 0.0_f32, 0.0_f32);
    for &x in x {
        let (weight, q) = (floor + x.abs(), quant(x));
        w += weight;
        wq += weight * q;
        wqq += weight * q * q;
        wx += weight * x;
        wxq += weight * x * q;
    }
    let determinant = w * wqq - wq * wq;
    if determinant > 0.0 {
        let scale = (w * wxq - wq * wx) / determinant;
        let min = (wq * wxq - wqq * wx) / determinant;
        if scale >= 0.0 && min >= 0.0 {
            return (scale, min);
        }
    }
    // The format cannot store a minimum above zero, so fit a line through zero.
    (if wqq > 0.0 { (wxq / wqq).max(0.0) } else { 0.0 }, 0.0)
}

/// The nearest quants in `low..=high` for x = scale q - min, in sub-blocks of `sub` values.
pub(super) fn quantize(
    x: &[f32],
    sub: usize,
    (low, high): (f32, f32),
    scale_min: impl Fn(usize) -> (f32, f32),
) -> [i8; LEN] {
    let mut quants = [0; LEN];
    for (s, (x, quants)) in x.chunks_exact(sub).zip(quants.chunks_exact_mut(sub)).enumerate() {
        let (scale, min) = scale_min(s);
        if scale != 0.0 {
            for (q, x) in quants.iter_mut().zip(x) {
                *q = ((x + min) / scale).round().clamp(low, high) as i8;
            }
        }
    }
    quants
}

/// The scale that maps the largest of `values` to `steps`, and the nearest integers of `values` at
/// that scale.
pub(super) fn quantize_scales<const N: usize>(values: &[f32; N], steps: f32) -> (f32, [u8; N]) {
    let max = values.iter().fold(0.0_f32, |max, &value| max.max(value));
    let step = max / steps;
    let inverse = if max > 0.0 { steps / max } else { 0.0 };
    (step, values.map(|value| (value * inverse).round().clamp(0.0, steps) as u8))
}

/// As [`quantize_scales`], for scales of either sign. The scale of largest magnitude becomes
/// -`steps`.
pub(super) fn quantize_signed_scales<const N: usize>(values: &[f32; N], steps: f32) -> (f32, [i8; N]) {
    let max = values.iter().fold(0.0_f32, |max, &value| if value.abs() > max.abs() { value } else { max });
    let step = max / -steps;
    let inverse = if max == 0.0 { 0.0 } else { -steps / max };
    (step, values.map(|value| (value * inverse).round().clamp(-steps, steps - 1.0) as i8))
}

fn rms(x: &[f32]) -> f32 {
    (x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32).sqrt()
}
