// SPDX-License-Identifier: Apache-2.0

//! Products with F32, F16 and BF16 weights: f32 fused multiply-adds, 16 lanes along the input
//! dimension. Activations are rounded to the weights' type first, as in `ops::Reference`.
//!
//! Limiting resource:
//!
//! 1. One row: memory.
//! 2. Many rows, on AVX-512: the two loads per multiply-add of a 4 x 4 tile (half of peak).

use super::format::GROUP;
use super::linear::LinearLayer;
use super::{AHEAD_BYTES, prefetch};
use crate::cpu::Isa;
use crate::cpu::element::Element;
use crate::cpu::simd::{Simd, SimdKernel};
use std::marker::PhantomData;
use std::ops::Range;

/// Multiplies groups of a layer with all rows of `x`.
pub(super) fn product<E: Element>(
    isa: Isa,
    layer: &LinearLayer<'_>,
    groups: Range<usize>,
    x: &[f32],
    n_in: usize,
) {
    let outputs = groups.start * GROUP..(groups.end * GROUP).min(layer.n_out);
    isa.run(FloatProduct::<E> { layer, outputs, x, n_in, element: PhantomData });
}

/// Rounds values as `quant::Activations` does for F16 weights.
pub(super) fn round_to_f16(x: &[f32], out: &mut [f32]) {
    for (out, &x) in out.iter_mut().zip(x) {
        *out = quant::saturated_f16(x).to_f32();
    }
}

/// Rounds values as `quant::Activations` does for BF16 weights.
pub(super) fn round_to_bf16(x: &[f32], out: &mut [f32]) {
    for (out, &x) in out.iter_mut().zip(x) {
        *out = half::bf16::from_f32(x).to_f32();
    }
}

struct FloatProduct<'a, E> {
    layer: &'a LinearLayer<'a>,
    outputs: Range<usize>,
    x: &'a [f32],
    n_in: usize,
    element: PhantomData<E>,
}

impl<E: Element> SimdKernel for FloatProduct<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let rows = self.x.len() / self.n_in;
        let mut row = 0;
        while row < rows {
            let columns = if rows - row >= 4 { 4 } else { 1 };
            let mut output = self.outputs.start;
            while output < self.outputs.end {
                let wide = self.outputs.end - output >= 4;
                match (wide, columns) {
                    (true, 4) => self.tile::<S, 4, 4>(s, output, row),
                    (true, _) => self.tile::<S, 4, 1>(s, output, row),
                    (false, 4) => self.tile::<S, 1, 4>(s, output, row),
                    (false, _) => self.tile::<S, 1, 1>(s, output, row),
                }
                output += if wide { 4 } else { 1 };
            }
            row += columns;
        }
    }
}

impl<E: Element> FloatProduct<'_, E> {
    /// Multiplies `R` weight rows with `C` activation rows.
    #[inline(always)]
    fn tile<S: Simd, const R: usize, const C: usize>(&self, s: S, output: usize, row: usize) {
        let row_bytes = self.n_in * E::BYTES;
        let step = 16 * E::BYTES;
        let mut weights = [&self.layer.bytes[..0]; R];
        for r in 0..R {
            weights[r] = &self.layer.bytes[(output + r) * row_bytes..][..row_bytes];
        }
        let mut x = [&self.x[..0]; C];
        for c in 0..C {
            x[c] = &self.x[(row + c) * self.n_in..][..self.n_in];
        }
        let mut sums = [[s.splat(0.0); C]; R];
        let whole = self.n_in / 16;
        for k in 0..whole {
            let mut a = [s.splat(0.0); C];
            for c in 0..C {
                a[c] = s.load_partial(&x[c][16 * k..16 * k + 16]);
            }
            if C == 1 {
                // Prefetches in memory order, although the loop reads `R` rows at once.
                prefetch(s, self.layer.bytes, output * row_bytes + R * step * k + AHEAD_BYTES, R * step);
            }
            for r in 0..R {
                let w = E::load(s, &weights[r][step * k..step * k + step]);
                for c in 0..C {
                    sums[r][c] = s.fma(w, a[c], sums[r][c]);
                }
            }
        }
        if !self.n_in.is_multiple_of(16) {
            for r in 0..R {
                let w = E::load_partial(s, &weights[r][step * whole..]);
                for c in 0..C {
                    // Lanes beyond the end add 0 * 0.
                    sums[r][c] = s.fma(w, s.load_partial(&x[c][16 * whole..]), sums[r][c]);
                }
            }
        }
        for c in 0..C {
            // SAFETY: the layer's tensor is borrowed while `multiply` runs, and each output belongs
            // to one piece.
            let out = unsafe { self.layer.out.part(row + c, output, R) };
            for r in 0..R {
                let bias = self.layer.bias.map(|bias| bias[output + r]);
                let sum = s.sum(sums[r][c]);
                out[r] = bias.map_or(sum, |bias| sum + bias);
            }
        }
    }
}
