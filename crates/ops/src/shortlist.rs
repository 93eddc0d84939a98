//! [`Shortlist`]: what of a row of logits most draws need, so that the rest of it can stay on the device.
//!
//! It is a pure function of the row and the [`DrawParams`], to the last bit: order and sums are those of [`crate::rank`] and
//! [`crate::softmax`]. Whoever draws from it must draw what it would draw from the row, or ask for the row.

use crate::rank::{self, RankedLogit};
use crate::softmax::SoftmaxWeights;

/// Best logits of a shortlist: common values of top-k are up to 100, and top-p or min-p of a sure model leave fewer.
pub const SHORTLIST_LEN: usize = 256;

/// How a row's logits are weighed: by `e^((logit - max) / temperature)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DrawParams {
    /// Above 0.
    pub temperature: f32,
    /// The number in `[0, 1)` that draws a token from the whole row, where one is wanted.
    pub uniform: Option<f64>,
}

impl Default for DrawParams {
    /// Of a softmax that nothing is drawn from.
    fn default() -> Self {
        Self { temperature: 1.0, uniform: None }
    }
}

/// Nothing is in it of a row that holds a NaN or whose highest logit is infinite. It may leave out what its row has: then
/// that is looked for in the row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Shortlist {
    best: Vec<RankedLogit>,
    total: f64,
    drawn: Option<u32>,
}

impl Shortlist {
    /// The [`SHORTLIST_LEN`] highest logits, or all where there are no more, the best first; or none of them.
    pub fn best(&self) -> &[RankedLogit] {
        &self.best
    }

    /// Sum of the weights of the whole row, where there are best ones.
    pub fn total(&self) -> f64 {
        self.total
    }

    /// The token that was wanted: [`SoftmaxWeights::pick`].
    pub fn drawn(&self) -> Option<u32> {
        self.drawn
    }

    pub fn clear(&mut self) {
        self.best.clear();
        self.total = 0.0;
        self.drawn = None;
    }

    /// `best` is in order, and as long as [`Self::best`] says.
    pub fn set(&mut self, best: impl Iterator<Item = RankedLogit>, total: f64, drawn: Option<u32>) {
        self.best.clear();
        self.best.extend(best);
        (self.total, self.drawn) = (total, drawn);
    }

    /// Makes it that of a row.
    pub fn fill(&mut self, row: &[f32], weighing: &DrawParams, weights: &mut SoftmaxWeights) {
        self.clear();
        let max = rank::max(row);
        if !max.is_finite() || row.iter().any(|logit| logit.is_nan()) {
            return;
        }
        rank::select_top_k(row, SHORTLIST_LEN, &mut self.best);
        self.best.sort_unstable();
        weights.fill(row.iter().copied(), max, weighing.temperature);
        self.total = weights.total();
        self.drawn = weighing.uniform.map(|uniform| weights.pick(uniform) as u32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shortlist(row: &[f32], weighing: DrawParams) -> Shortlist {
        let mut list = Shortlist::default();
        // What was there before leaves nothing.
        list.fill(
            &[1.0; 3],
            &DrawParams { temperature: 2.0, uniform: Some(0.5) },
            &mut SoftmaxWeights::default(),
        );
        list.fill(row, &weighing, &mut SoftmaxWeights::default());
        list
    }

    #[test]
    fn the_best_stand_in_order_and_equals_by_id() {
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
    fn a_short_row_is_there_whole_and_a_broken_one_not_at_all() {
        let list =
            shortlist(&[1.0, f32::NEG_INFINITY, 3.0], DrawParams { temperature: 0.5, uniform: Some(0.999) });
        assert_eq!(list.best().iter().map(|best| best.id()).collect::<Vec<_>>(), [2, 0, 1]);
        assert_eq!(list.drawn(), Some(2));
        for broken in [[0.0, f32::NAN], [0.0, f32::INFINITY], [f32::NEG_INFINITY; 2]] {
            assert_eq!(shortlist(&broken, DrawParams::default()), Shortlist::default());
        }
    }
}
