// SPDX-License-Identifier: Apache-2.0

//! Chooses the draft depth: a function of the acceptance rate and the cost of rows.
//!
//! If each draft token is accepted with probability `a` after the tokens before it, a step with
//! depth `D` outputs `E(D) = 1 + a + .. + a^D` tokens. All sequences in a step share its fixed
//! cost. In a full batch rows are thus relatively expensive, and drafts are short. The chosen depth
//! has the most tokens per cost; 0 is always a choice.
//!
//! The depth never changes a token, so costs may be measured with the clock.

use crate::draft::draft_tokens::DRAFT_DEPTH_MAX;

/// Recent acceptance rate of one sequence's drafts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AcceptanceEstimate {
    right: f64,
    tried: f64,
    /// Steps since a draft was tried although it did not seem to pay.
    unprobed: u32,
}

/// Prior for a new sequence: this acceptance rate, with the weight of this many tokens.
const FIRST_RATE: f64 = 0.6;
const FIRST_TRIED: f64 = 4.0;
/// Each token reduces the weight of earlier ones by this factor, so about 25 tokens count.
const MEMORY: f64 = 0.96;
/// Steps after which a sequence whose drafts do not pay gets a draft, to notice a change.
const PROBE_EVERY: u32 = 32;
const PROBE_DEPTH: usize = 2;

impl Default for AcceptanceEstimate {
    fn default() -> Self {
        Self { right: FIRST_RATE * FIRST_TRIED, tried: FIRST_TRIED, unprobed: 0 }
    }
}

impl AcceptanceEstimate {
    /// Estimated probability that a draft token is accepted if those before it are.
    pub fn rate(&self) -> f64 {
        self.right / self.tried
    }

    /// Of `drafted` tokens the first `right` ones were accepted. The next one was rejected; the
    /// others were not tried.
    pub fn observe(&mut self, drafted: usize, right: usize) {
        for tried in 0..drafted.min(right + 1) {
            self.right = self.right * MEMORY + f64::from(u8::from(tried < right));
            self.tried = self.tried * MEMORY + 1.0;
        }
    }

    /// Depth for the next step of this sequence, where `best` is the depth that pays.
    pub fn next_depth(&mut self, best: usize, depth_max: usize) -> usize {
        if best > 0 {
            self.unprobed = 0;
            return best;
        }
        self.unprobed += 1;
        if self.unprobed < PROBE_EVERY {
            return 0;
        }
        self.unprobed = 0;
        PROBE_DEPTH.min(depth_max)
    }
}

/// Cost of drafting in one step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DraftingCost {
    /// Steps of the draft model, and their rows.
    pub steps: usize,
    pub rows: usize,
    /// Cost of a draft model step as a share of the model's step.
    pub share: f64,
}

/// Step cost as `fixed + row * rows`, fitted to measured steps.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepCostModel {
    /// Sums of products over steps: steps of the model's cost `u`, rows `v`, seconds `y`.
    uu: f64,
    uv: f64,
    vv: f64,
    uy: f64,
    vy: f64,
}

/// Cost of a row in fixed costs while all steps had one width. Small steps are bound by reading the
/// weights.
const FIRST_ROW: f64 = 0.1;
/// About a hundred steps count.
const STEP_MEMORY: f64 = 0.99;
/// Steps differ in width if the determinant of the fit exceeds this share of its maximum.
const SPREAD_MIN: f64 = 1e-3;

impl StepCostModel {
    /// Records a step of `rows` rows and the drafting before it, which took `seconds`.
    pub fn observe(&mut self, rows: usize, work: DraftingCost, seconds: f64) {
        let u = 1.0 + work.steps as f64 * work.share;
        let v = rows as f64 + work.rows as f64 * work.share;
        let add = |sum: &mut f64, term: f64| *sum = *sum * STEP_MEMORY + term;
        add(&mut self.uu, u * u);
        add(&mut self.uv, u * v);
        add(&mut self.vv, v * v);
        add(&mut self.uy, u * seconds);
        add(&mut self.vy, v * seconds);
    }

    /// Fixed cost and cost of a row, in the same unit.
    pub fn fit(&self) -> (f64, f64) {
        let Self { uu, uv, vv, uy, vy } = *self;
        let determinant = uu * vv - uv * uv;
        if determinant > SPREAD_MIN * uu * vv {
            let (fixed, row) = ((uy * vv - vy * uv) / determinant, (vy * uu - uy * uv) / determinant);
            if fixed >= 0.0 && row >= 0.0 && fixed + row > 0.0 {
                return (fixed, row);
            }
            // Noise: one of the two terms explains the measurements.
            return if row < 0.0 { (1.0, 0.0) } else { (0.0, 1.0) };
        }
        (1.0, FIRST_ROW)
    }
}

/// The depth with the most tokens per cost, at most `depth_max`, for a sequence with acceptance
/// rate `rate` in a step of `sequences`. `draft` is the cost of a draft model step as a share of
/// the model's.
pub fn depth(rate: f64, cost: (f64, f64), draft: f64, sequences: usize, depth_max: usize) -> usize {
    let (fixed, row) = cost;
    let shared = fixed / sequences.max(1) as f64;
    let (mut best, mut best_value) = (0, 0.0);
    let (mut tokens, mut right) = (1.0, 1.0);
    for depth in 0..=depth_max.min(DRAFT_DEPTH_MAX) {
        let spent = shared + row * (1 + depth) as f64 + draft * (shared + row) * depth as f64;
        // A draft token without gain is not worth its memory traffic.
        if tokens / spent > best_value * (1.0 + f64::EPSILON) {
            (best, best_value) = (depth, tokens / spent);
        }
        right *= rate;
        tokens += right;
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn rows_that_cost_nothing_are_used_up_and_rows_that_cost_all_are_not() {
        assert_eq!(depth(0.5, (1.0, 0.0), 0.0, 1, 8), 8);
        assert_eq!(depth(0.99, (0.0, 1.0), 0.0, 1, 8), 0);
        assert_eq!(depth(0.0, (1.0, 0.1), 0.0, 1, 8), 0);
        assert_eq!(depth(1.0, (1.0, 0.1), 0.0, 1, 100), DRAFT_DEPTH_MAX);
    }

    #[test]
    fn a_draft_model_as_dear_as_the_model_is_not_asked() {
        assert_eq!(depth(0.9, (1.0, 0.0), 1.0, 1, 8), 0);
        assert!(depth(0.9, (1.0, 0.0), 0.1, 1, 8) > 2);
    }

    proptest! {
        #[test]
        fn depth_rises_with_acceptance_and_falls_with_load(
            rates in (0.0..1.0_f64, 0.0..1.0_f64),
            row in 0.0..1.0_f64,
            draft in 0.0..1.0_f64,
            sequences in (1..500_usize, 1..500_usize),
        ) {
            let at = |rate, sequences| depth(rate, (1.0, row), draft, sequences, 12);
            let (low, high) = (rates.0.min(rates.1), rates.0.max(rates.1));
            prop_assert!(at(low, sequences.0) <= at(high, sequences.0));
            let (few, many) = (sequences.0.min(sequences.1), sequences.0.max(sequences.1));
            prop_assert!(at(low, many) <= at(low, few));
        }

        #[test]
        fn the_cost_of_steps_is_found(
            fixed in 0.1..10.0_f64,
            row in 0.001..1.0_f64,
            share in 0.0..0.5_f64,
            steps in prop::collection::vec((1..80_usize, 0..8_usize, 0..40_usize), 20..100),
        ) {
            let mut cost = StepCostModel::default();
            for (rows, steps, draft_rows) in [(1, 0, 0), (9, 0, 0)].into_iter().chain(steps) {
                let work = DraftingCost { steps, rows: draft_rows, share };
                let once = |rows: usize| fixed + row * rows as f64;
                let drafting = share * (fixed * steps as f64 + row * draft_rows as f64);
                cost.observe(rows, work, once(rows) + drafting);
            }
            let found = cost.fit();
            prop_assert!((found.0 - fixed).abs() < 1e-6 * (fixed + row) && (found.1 - row).abs() < 1e-6 * (fixed + row));
        }

        #[test]
        fn acceptance_follows_what_happens(rate in 0.0..=1.0_f64, depth in 1..8_usize) {
            let mut acceptance = AcceptanceEstimate::default();
            let mut owed = 0.0;
            let mut sum = 0.0;
            for round in 0..2000 {
                // A fixed pattern with this share of accepted tokens.
                let mut right = 0;
                while right < depth && { owed += rate; owed >= 1.0 } {
                    owed -= 1.0;
                    right += 1;
                }
                acceptance.observe(depth, right);
                sum += if round >= 1000 { acceptance.rate() } else { 0.0 };
            }
            prop_assert!((sum / 1000.0 - rate).abs() < 0.1, "{} for {rate}", sum / 1000.0);
        }
    }

    #[test]
    fn a_sequence_with_rejected_drafts_is_probed_regularly() {
        let mut acceptance = AcceptanceEstimate::default();
        let depths: Vec<usize> = (0..2 * PROBE_EVERY).map(|_| acceptance.next_depth(0, 8)).collect();
        assert_eq!(depths.iter().filter(|&&depth| depth > 0).count(), 2);
        assert_eq!(acceptance.next_depth(5, 8), 5);
        assert_eq!(AcceptanceEstimate::default().next_depth(0, 0), 0);
    }

    #[test]
    fn equal_steps_say_nothing_about_rows() {
        let mut cost = StepCostModel::default();
        assert_eq!(cost.fit(), (1.0, FIRST_ROW));
        (0..50).for_each(|_| cost.observe(4, DraftingCost::default(), 0.01));
        assert_eq!(cost.fit(), (1.0, FIRST_ROW));
    }
}
