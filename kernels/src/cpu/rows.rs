// SPDX-License-Identifier: Apache-2.0

//! Kernels on single rows: norms, additions, activations, rope. They take little time compared with
//! matrix products.

use super::math;
use super::simd::{Simd, SimdKernel};

/// `out = x / sqrt(mean(x^2) + eps) * weight`. Squares are summed in 16 lanes.
#[derive(Clone, Copy)]
pub(super) struct Norm<'a> {
    pub(super) weight: &'a [f32],
    pub(super) eps: f32,
}

impl Norm<'_> {
    #[inline(always)]
    fn factor<S: Simd>(self, s: S, x: &[f32]) -> f32 {
        let mut squares = s.splat(0.0);
        for x in x.chunks(16) {
            let x = s.load_partial(x);
            squares = s.fma(x, x, squares);
        }
        1.0 / (s.sum(squares) / x.len() as f32 + self.eps).sqrt()
    }
}

pub(super) struct NormInto<'a> {
    pub(super) x: &'a [f32],
    pub(super) norm: Norm<'a>,
    pub(super) out: &'a mut [f32],
}

impl SimdKernel for NormInto<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let factor = s.splat(self.norm.factor(s, self.x));
        let chunks = self.x.chunks(16).zip(self.norm.weight.chunks(16)).zip(self.out.chunks_mut(16));
        for ((x, weight), out) in chunks {
            s.store_partial(s.mul(s.mul(s.load_partial(x), factor), s.load_partial(weight)), out);
        }
    }
}

/// `x += y`, then the norm of `x`.
pub(super) struct AddNorm<'a> {
    pub(super) x: &'a mut [f32],
    pub(super) y: &'a [f32],
    pub(super) norm: Norm<'a>,
    pub(super) out: &'a mut [f32],
}

impl SimdKernel for AddNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        Add { x: self.x, y: self.y }.run(s);
        NormInto { x: self.x, norm: self.norm, out: self.out }.run(s);
    }
}

/// RMS norm of every head of `weight.len()` values, in place.
pub(super) struct NormHeads<'a> {
    pub(super) x: &'a mut [f32],
    pub(super) norm: Norm<'a>,
}

impl SimdKernel for NormHeads<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for head in self.x.chunks_exact_mut(self.norm.weight.len()) {
            let factor = s.splat(self.norm.factor(s, head));
            for (x, weight) in head.chunks_mut(16).zip(self.norm.weight.chunks(16)) {
                s.store_partial(s.mul(s.mul(s.load_partial(x), factor), s.load_partial(weight)), x);
            }
        }
    }
}

/// `x += y`.
pub(super) struct Add<'a> {
    pub(super) x: &'a mut [f32],
    pub(super) y: &'a [f32],
}

impl SimdKernel for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (x, y) in self.x.iter_mut().zip(self.y) {
            *x += y;
        }
    }
}

/// `gate = gate / (1 + exp(-gate)) * up`.
pub(super) struct Silu<'a> {
    pub(super) gate: &'a mut [f32],
    pub(super) up: &'a [f32],
}

impl SimdKernel for Silu<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (values, up) in self.gate.chunks_mut(16).zip(self.up.chunks(16)) {
            let gate = s.load_partial(values);
            let exp = math::exp(s, s.sub(s.splat(0.0), gate));
            let silu = s.div(gate, s.add(s.splat(1.0), exp));
            s.store_partial(s.mul(silu, s.load_partial(up)), values);
        }
    }
}

/// `gate = gate / (1 + exp(-gate * (GELU_LINEAR + GELU_CUBIC * gate^2))) * up`.
pub(super) struct Gelu<'a> {
    pub(super) gate: &'a mut [f32],
    pub(super) up: &'a [f32],
}

impl SimdKernel for Gelu<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (linear, cubic) = (s.splat(-ops::GELU_LINEAR as f32), s.splat(-ops::GELU_CUBIC as f32));
        for (values, up) in self.gate.chunks_mut(16).zip(self.up.chunks(16)) {
            let gate = s.load_partial(values);
            let exponent = s.mul(gate, s.fma(s.mul(gate, gate), cubic, linear));
            let gelu = s.div(gate, s.add(s.splat(1.0), math::exp(s, exponent)));
            s.store_partial(s.mul(gelu, s.load_partial(up)), values);
        }
    }
}

/// `x *= factor`.
pub(super) struct Scale<'a> {
    pub(super) x: &'a mut [f32],
    pub(super) factor: f32,
}

impl SimdKernel for Scale<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for x in self.x.iter_mut() {
            *x *= self.factor;
        }
    }
}

/// Rotates the pairs of every head of `head_dim` values, in place.
pub(super) struct Rotate<'a> {
    pub(super) x: &'a mut [f32],
    pub(super) head_dim: usize,
    pub(super) adjacent: bool,
    /// One value per pair.
    pub(super) cos: &'a [f32],
    pub(super) sin: &'a [f32],
}

impl SimdKernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let pairs = self.cos.len();
        for head in self.x.chunks_exact_mut(self.head_dim) {
            let head = &mut head[..2 * pairs];
            let angles = self.cos.iter().zip(self.sin);
            if self.adjacent {
                for (pair, (cos, sin)) in head.as_chunks_mut::<2>().0.iter_mut().zip(angles) {
                    let [a, b] = *pair;
                    *pair = [a * cos - b * sin, a * sin + b * cos];
                }
            } else {
                let (low, high) = head.split_at_mut(pairs);
                for ((a, b), (cos, sin)) in low.iter_mut().zip(high).zip(angles) {
                    (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
                }
            }
        }
    }
}
