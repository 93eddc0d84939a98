// SPDX-License-Identifier: Apache-2.0

//! [`Shortlist`]: what of a row of logits most draws need, so that the rest of it can stay on the
//! device.
//!
//! It is a pure function of the row and the [`DrawParams`], to the last bit: order and sums are
//! those of [`crate::rank`] and [`crate::softmax`]. A sampler that draws from it must draw what it
//! would draw from the row, or ask for the row.

use crate::rank::{self, RankedLogit};
use crate::softmax::SoftmaxWeights;

/// Logits of a shortlist. Common values of top-k are at most 100; top-p and min-p usually keep
/// fewer.
pub const SHORTLIST_LEN: usize = 256;

/// How a backend draws a token from a row, whose weights are `e^((logit - max) / temperature)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DrawParams {
    /// Above 0.
    pub temperature: f32,
    /// Uniform random number in `[0, 1)` that draws a token from the whole row. Without it, no
    /// token is drawn.
    pub uniform: Option<f64>,
}

impl Default for DrawParams {
    /// A plain softmax without a draw.
    fn default() -> Self {
        Self { temperature: 1.0, uniform: None }
    }
}

/// The highest logits of a row, the sum of its weights, and a token drawn from it.
///
/// The list is empty if the row contains a NaN or its highest logit is infinite. A backend may also
/// leave it empty; then the sampler reads the row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Shortlist {
    best: Vec<RankedLogit>,
    total: f64,
    drawn: Option<u32>,
}

impl Shortlist {
    /// The [`SHORTLIST_LEN`] highest logits (all logits of a shorter row), the best first. May be
    /// empty.
    pub fn best(&self) -> &[RankedLogit] {
        &self.best
    }

    /// Sum of the weights of the whole row. Valid if [`Self::best`] is not empty.
    pub fn total(&self) -> f64 {
        self.total
    }

    /// The drawn token, as [`SoftmaxWeights::pick`] defines it.
    pub fn drawn(&self) -> Option<u32> {
        self.drawn
    }

    pub fn clear(&mut self) {
        self.best.clear();
        self.total = 0.0;
        self.drawn = None;
    }

    /// Replaces the contents. `best` is in order and has the length that [`Self::best`] describes.
    pub fn set(&mut self, best: impl Iterator<Item = RankedLogit>, total: f64, drawn: Option<u32>) {
        self.best.clear();
        self.best.extend(best);
        (self.total, self.drawn) = (total, drawn);
    }

    /// Computes the shortlist of a row.
    pub fn fill(&mut self, row: &[f32], params: &DrawParams, weights: &mut SoftmaxWeights) {
        self.clear();
        let max = rank::max(row);
        if !max.is_finite() || row.iter().any(|logit| logit.is_nan()) {
            return;
        }
        rank::select_top_k(row, SHORTLIST_LEN, &mut self.best);
        self.best.sort_unstable();
        weights.fill(row.iter().copied(), max, params.temperature);
        self.total = weights.total();
        self.drawn = params.uniform.map(|uniform| weights.pick(uniform) as u32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shortlist(row: &[f32], params: DrawParams) -> Shortlist {
        let mut list = Shortlist::default();
        // Fills the list with another row first, so that the test notices leftovers.
        list.fill(
            &[1.0; 3],
            &DrawParams { temperature: 2.0, uniform: Some(0.5) },
            &mut SoftmaxWeights::default(),
        );
        list.fill(row, &params, &mut SoftmaxWeights::default());
        list
    }

    #[test]
    fn best_logits_are_in_order_with_ties_by_id() {
        let row: Vec<f32> = (0..1000).map(|i| (i * 7 % 100) as f32 - 50.0).collect();
        let list = shortlist(&row, DrawParams::default());
        let mut ids: Vec<u32> = (0..1000).collect();
        ids.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]).then(a.cmp(&b)));
        let found: Vec<u32> = list.best().iter().map(|best| best.id()).collect();
        assert_eq!(found, ids[..SHORTLIST_LEN]);
        assert_eq!(list.drawn(), None);
        let total: f64 = row.iter().map(|&logit| f64::from(logit - 49.0).exp()).sum();
        assert!((list.total() - total).abs() < total * 1e-6);
    }

    #[test]
    fn a_short_row_is_complete_and_a_row_with_nan_or_infinity_is_empty() {
        let list =
            shortlist(&[1.0, f32::NEG_INFINITY, 3.0], DrawParams { temperature: 0.5, uniform: Some(0.999) });
        assert_eq!(list.best().iter().map(|best| best.id()).collect::<Vec<_>>(), [2, 0, 1]);
        assert_eq!(list.drawn(), Some(2));
        for broken in [[0.0, f32::NAN], [0.0, f32::INFINITY], [f32::NEG_INFINITY; 2]] {
            assert_eq!(shortlist(&broken, DrawParams::default()), Shortlist::default());
        }
    }
}
