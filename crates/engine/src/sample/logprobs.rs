// SPDX-License-Identifier: Apache-2.0

//! Log-probabilities as reported to clients: the log-softmax of the raw logits.
//!
//! Raw means before bias, penalties, filters and temperature: the model's own distribution.

use crate::sample::error::{SampleError, check};
use ops::rank::{self, RankedLogit};
use ops::softmax;

/// The log-softmax of one row.
#[derive(Debug)]
pub struct LogProbs<'a> {
    logits: &'a [f32],
    /// `ln(sum of e^logit)`.
    normalizer: f64,
}

impl<'a> LogProbs<'a> {
    pub fn new(logits: &'a [f32]) -> Result<Self, SampleError> {
        check(logits)?;
        let max = rank::max(logits);
        if max == f32::NEG_INFINITY {
            return Err(SampleError::NothingLeft);
        }
        Ok(Self { logits, normalizer: f64::from(max) + softmax::exp_sum(logits, max).ln() })
    }

    pub fn of(&self, token: u32) -> f32 {
        (f64::from(self.logits[token as usize]) - self.normalizer) as f32
    }

    /// The `count` most probable tokens in descending order.
    pub fn top(&self, count: usize) -> Vec<(u32, f32)> {
        let mut best: Vec<RankedLogit> = Vec::new();
        rank::select_top_k(self.logits, count, &mut best);
        best.sort_unstable();
        best.iter().map(|kept| (kept.id(), self.of(kept.id()))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logprobs_are_the_log_softmax() {
        let logits = [1.0, -2.0, 3.5, 0.0, 3.5, f32::NEG_INFINITY];
        let total: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        let row = LogProbs::new(&logits).unwrap();
        for (token, &logit) in logits.iter().enumerate() {
            let truth = (f64::from(logit) - total.ln()) as f32;
            assert!(truth == row.of(token as u32) || (truth - row.of(token as u32)).abs() < 1e-6);
        }
        let top: Vec<u32> = row.top(3).iter().map(|entry| entry.0).collect();
        assert_eq!(top, [2, 4, 0]);
        assert_eq!(row.top(20).len(), 6);
        assert!(row.top(0).is_empty());
    }

    #[test]
    fn a_row_that_is_not_finite_is_named() {
        assert_eq!(LogProbs::new(&[0.0, f32::NAN]).unwrap_err(), SampleError::NotFinite { token: 1 });
        assert_eq!(LogProbs::new(&[f32::NEG_INFINITY; 2]).unwrap_err(), SampleError::NothingLeft);
    }
}
