// SPDX-License-Identifier: Apache-2.0

//! Log-probabilities as reported to clients: the log-softmax of the raw logits.
//!
//! Raw means before bias, penalties, filters and temperature: the model's own distribution.

use crate::request::input::TOP_LOGPROBS_MAX;
use crate::sample::error::{SampleError, check};
use ops::rank::{self, RankedLogit};
use ops::{SHORTLIST_LEN, Shortlist, softmax};

/// What a client gets about one token.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogProbs {
    pub logprob: f32,
    /// The most probable tokens in descending order.
    pub top: Vec<(u32, f32)>,
}

impl TokenLogProbs {
    /// Those of `token` with the `top` best tokens, to the bit as from the row, if the list has the
    /// token. The list's weights are those of temperature 1.
    pub fn of_list(list: &Shortlist, token: u32, top: u8) -> Option<Self> {
        const { assert!(TOP_LOGPROBS_MAX as usize <= SHORTLIST_LEN) };
        let best = list.best();
        let normalizer = normalizer(best.first()?.logit(), list.total());
        let of = |listed: &RankedLogit| log_prob(listed.logit(), normalizer);
        let logprob = of(best.iter().find(|listed| listed.id() == token)?);
        let top = best.iter().take(usize::from(top)).map(|listed| (listed.id(), of(listed))).collect();
        Some(Self { logprob, top })
    }
}

/// `ln(sum of e^logit)`, from the sum of `e^(logit - max)`.
fn normalizer(max: f32, exp_sum: f64) -> f64 {
    f64::from(max) + exp_sum.ln()
}

fn log_prob(logit: f32, normalizer: f64) -> f32 {
    (f64::from(logit) - normalizer) as f32
}

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
        Ok(Self { logits, normalizer: normalizer(max, softmax::exp_sum(logits, max)) })
    }

    pub fn of(&self, token: u32) -> f32 {
        log_prob(self.logits[token as usize], self.normalizer)
    }

    pub fn of_token(&self, token: u32, top: u8) -> TokenLogProbs {
        TokenLogProbs { logprob: self.of(token), top: self.top(usize::from(top)) }
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
