// SPDX-License-Identifier: Apache-2.0

//! Mirostat 1 and 2: keeps the tokens whose surprise stays near a target.
//!
//! Formulas and constants as in llama.cpp, surprise in bits.

use crate::sample::candidates::Candidates;
use crate::sample::math;
use crate::sample::params::{MirostatParams, MirostatVersion};
use ops::rank::{self, RankedLogit};
use ops::softmax;
use std::f64::consts::LN_2;

/// Highest tokens from which version 1 estimates the exponent of Zipf's law.
const ESTIMATED_FROM: usize = 100;

/// Leaves in `candidates` the tokens that may be drawn. `logits` are after temperature; `mu` is the
/// bound on surprise.
pub(super) fn truncate(
    candidates: &mut Candidates,
    best: &mut Vec<RankedLogit>,
    logits: &[f32],
    mirostat: &MirostatParams,
    mu: f32,
) {
    match mirostat.version {
        MirostatVersion::One => {
            rank::select_top_k(logits, ESTIMATED_FROM, best);
            best.sort_unstable();
            let left = logits.iter().filter(|logit| **logit > f32::NEG_INFINITY).count();
            candidates.keep_highest(logits, count(best, left, mu));
        }
        MirostatVersion::Two => {
            let max = rank::max(logits);
            let normalizer = math::ln(softmax::exp_sum(logits, max));
            let floor = f64::from(max) + normalizer - f64::from(mu) * LN_2;
            // The highest token always stays.
            candidates.keep_above(logits, (floor as f32).min(max));
        }
    }
}

/// Number of tokens that version 1 keeps of `vocabulary`.
fn count(best: &[RankedLogit], vocabulary: usize, mu: f32) -> usize {
    let (mut products, mut squares) = (0.0, 0.0);
    for (index, pair) in best.windows(2).enumerate() {
        if pair[1].logit() == f32::NEG_INFINITY {
            break;
        }
        let t = math::ln((index + 2) as f64 / (index + 1) as f64);
        let b = f64::from(pair[0].logit()) - f64::from(pair[1].logit());
        products += t * b;
        squares += t * t;
    }
    if squares == 0.0 {
        return 1;
    }
    let s = products / squares;
    let epsilon = s - 1.0;
    let share = 1.0 - math::pow(vocabulary as f64, -epsilon);
    let base = epsilon * math::pow(2.0, f64::from(mu)) / share;
    // The formula has no value at an exponent of 1. Everything is kept then.
    if !(base > 0.0 && base.is_finite()) {
        return vocabulary;
    }
    let k = math::pow(base, 1.0 / s);
    if k.is_finite() { (k as usize).clamp(1, vocabulary) } else { vocabulary }
}

/// The bound after a token with this probability was drawn.
pub(super) fn learn(mirostat: &MirostatParams, mu: f32, probability: f64) -> f32 {
    let surprise = -math::ln(probability) / LN_2;
    mu - mirostat.eta * (surprise as f32 - mirostat.tau)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For tokens of a Zipf distribution, the estimate finds the exponent, and k follows the
    /// formula.
    #[test]
    fn version_one_finds_the_exponent_of_zipf() {
        for exponent in [0.8_f64, 1.2, 2.0] {
            let logits: Vec<f32> = (1..=1000).map(|rank| -(exponent * f64::from(rank).ln()) as f32).collect();
            let mut best = Vec::new();
            rank::select_top_k(&logits, ESTIMATED_FROM, &mut best);
            best.sort_unstable();
            let mu = 4.0_f32;
            let epsilon = exponent - 1.0;
            let share = 1.0 - 1000_f64.powf(-epsilon);
            let truth = (epsilon * 16.0 / share).powf(1.0 / exponent);
            let found = count(&best, 1000, mu);
            assert!((found as f64 - truth).abs() < 1.5, "{exponent}: {found}, {truth}");
        }
    }

    #[test]
    fn odd_distributions_leave_a_number_of_tokens_in_range() {
        for logits in [vec![0.0; 50], vec![1.0], vec![5.0, f32::NEG_INFINITY, 1.0], vec![3e38, -3e38, 0.0]] {
            for mu in [-50.0, 0.0, 3.0, 1e6] {
                let mut best = Vec::new();
                rank::select_top_k(&logits, ESTIMATED_FROM, &mut best);
                best.sort_unstable();
                assert!((1..=logits.len()).contains(&count(&best, logits.len(), mu)), "{logits:?} {mu}");
            }
        }
    }

    #[test]
    fn the_bound_moves_against_the_error() {
        let mirostat = MirostatParams { version: MirostatVersion::Two, tau: 3.0, eta: 0.5 };
        assert!((learn(&mirostat, 6.0, 0.5) - 7.0).abs() < 1e-6);
        assert!((learn(&mirostat, 6.0, 1.0 / 64.0) - 4.5).abs() < 1e-6);
    }
}
