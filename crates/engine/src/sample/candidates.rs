// SPDX-License-Identifier: Apache-2.0

//! The candidate tokens, and the filters that reduce them.
//!
//! Every filter works on the softmax of what earlier filters kept, at temperature 1, as in
//! llama.cpp.

use crate::sample::math;
use crate::sample::params::SamplingParams;
use ops::rank::{self, RankedLogit};
use ops::softmax;

/// Candidates that are sorted first, and the factor by which the sorted part grows until it
/// suffices.
const SORTED_FIRST: usize = 64;
const SORTED_GROWTH: usize = 8;

/// The filters in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Filter {
    TopNSigma,
    TopK,
    Typical,
    TopP,
    MinP,
    Xtc,
}

impl Filter {
    const IN_ORDER: [Self; 6] =
        [Self::TopNSigma, Self::TopK, Self::Typical, Self::TopP, Self::MinP, Self::Xtc];

    /// The first filter that removes any of `vocab_size` tokens. `acts`: whether XTC acts, if it is
    /// on.
    pub(super) fn first(params: &SamplingParams, vocab_size: usize, acts: bool) -> Option<Self> {
        Self::IN_ORDER.into_iter().find(|filter| filter.is_on(params, vocab_size, acts))
    }

    fn is_on(self, params: &SamplingParams, left: usize, acts: bool) -> bool {
        match self {
            Self::TopNSigma => params.top_n_sigma > 0.0,
            Self::TopK => params.top_k > 0 && (params.top_k as usize) < left,
            Self::Typical => params.typical_p < 1.0,
            Self::TopP => params.top_p < 1.0,
            Self::MinP => params.min_p > 0.0,
            Self::Xtc => params.xtc_probability > 0.0 && params.xtc_threshold <= 0.5 && acts,
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Candidates {
    /// In order of rising id.
    kept: Vec<RankedLogit>,
    scratch: Vec<RankedLogit>,
}

/// A softmax over some tokens: `total` is the sum of `e^(logit - max)`.
struct Softmax {
    max: f32,
    total: f64,
    /// In nats.
    entropy: f64,
}

impl Candidates {
    pub(super) fn kept(&self) -> &[RankedLogit] {
        &self.kept
    }

    /// Applies the filter `first`, which is the first one that acts, to a row.
    pub(super) fn truncate(&mut self, logits: &[f32], first: Filter, params: &SamplingParams) {
        match first {
            Filter::TopNSigma => self.keep_above(logits, sigma_floor(logits, params.top_n_sigma)),
            Filter::TopK => self.keep_highest(logits, params.top_k as usize),
            Filter::TopP => self.top_p_of_all(logits, params.top_p),
            Filter::MinP => self.keep_above(logits, min_p_floor(rank::max(logits), params.min_p)),
            Filter::Typical | Filter::Xtc => {
                self.fill(logits);
                self.filter(first, params);
            }
        }
    }

    /// As `truncate`, for the highest tokens of a row in order, where `total` is the sum of the
    /// whole row's weights. `whole`: the list has every token. Returns `false` if the list does not
    /// determine the result.
    pub(super) fn truncate_list(
        &mut self,
        best: &[RankedLogit],
        total: f64,
        whole: bool,
        first: Filter,
        params: &SamplingParams,
    ) -> bool {
        let Some(max) = best.first().map(|best| best.logit()) else { return false };
        let count = match first {
            Filter::TopK => Some(params.top_k as usize).filter(|&count| count <= best.len()),
            Filter::TopP => reaching(best, max, f64::from(params.top_p) * total),
            Filter::MinP => {
                let floor = min_p_floor(max, params.min_p);
                best.iter().position(|best| best.logit() < floor)
            }
            // These filters weigh every token.
            Filter::TopNSigma | Filter::Typical | Filter::Xtc => return false,
        };
        let Some(count) = count.or(whole.then_some(best.len())) else { return false };
        self.kept.clear();
        self.kept.extend_from_slice(&best[..count]);
        self.sort_by_id();
        true
    }

    /// Applies the filters after `first`. `acts`: whether XTC acts, if it is on.
    pub(super) fn thin_further(&mut self, first: Filter, params: &SamplingParams, acts: bool) {
        for filter in Filter::IN_ORDER.into_iter().filter(|&filter| filter > first) {
            if filter.is_on(params, self.kept.len(), acts) {
                self.filter(filter, params);
            }
        }
    }

    /// Applies one filter. Top-n-sigma is always the first filter, so it never comes here.
    fn filter(&mut self, filter: Filter, params: &SamplingParams) {
        match filter {
            Filter::TopNSigma => {}
            Filter::TopK => {
                rank::truncate_to_top_k(&mut self.kept, params.top_k as usize);
                self.sort_by_id();
            }
            Filter::Typical => self.keep_typical(params.typical_p),
            Filter::TopP => self.top_p(params.top_p),
            Filter::MinP => {
                let floor = min_p_floor(max_of(&self.kept), params.min_p);
                self.kept.retain(|kept| kept.logit() >= floor);
            }
            Filter::Xtc => self.drop_likeliest(params.xtc_threshold),
        }
    }

    /// Makes every token a candidate that was not removed.
    pub(super) fn fill(&mut self, logits: &[f32]) {
        self.keep_above(logits, f32::MIN);
    }

    pub(super) fn keep_above(&mut self, logits: &[f32], floor: f32) {
        self.kept.clear();
        let above = logits.iter().enumerate().filter(|&(_, &logit)| logit >= floor);
        self.kept.extend(above.map(|(id, &logit)| RankedLogit::new(logit, id as u32)));
    }

    pub(super) fn keep_highest(&mut self, logits: &[f32], count: usize) {
        rank::select_top_k(logits, count, &mut self.kept);
        self.sort_by_id();
    }

    fn sort_by_id(&mut self) {
        self.kept.sort_unstable_by_key(|kept| kept.id());
    }

    /// Keeps the tokens whose surprise is nearest to the entropy, until their probabilities exceed
    /// `typical_p`.
    fn keep_typical(&mut self, typical_p: f32) {
        let Softmax { max, total, entropy } = softmax(&self.kept);
        let expected = math::ln(total) - entropy;
        self.scratch.clear();
        self.scratch.extend(self.kept.iter().enumerate().map(|(index, kept)| {
            let off = (expected - f64::from(kept.logit() - max)).abs();
            RankedLogit::new(-off as f32, index as u32)
        }));
        let wanted = f64::from(typical_p) * total;
        let (mut sum, kept) = (0.0, &self.kept);
        let count = fewest(&mut self.scratch, |nearest| {
            sum += weight(kept[nearest.id() as usize].logit(), max);
            sum > wanted
        });
        self.scratch.truncate(count);
        self.scratch.iter_mut().for_each(|nearest| *nearest = kept[nearest.id() as usize]);
        std::mem::swap(&mut self.kept, &mut self.scratch);
        self.sort_by_id();
    }

    fn top_p(&mut self, top_p: f32) {
        let Softmax { max, total, .. } = softmax(&self.kept);
        let wanted = f64::from(top_p) * total;
        let mut sum = 0.0;
        let count = fewest(&mut self.kept, |best| {
            sum += weight(best.logit(), max);
            sum >= wanted
        });
        self.kept.truncate(count);
        self.sort_by_id();
    }

    fn top_p_of_all(&mut self, logits: &[f32], top_p: f32) {
        let max = rank::max(logits);
        let wanted = f64::from(top_p) * softmax::exp_sum(logits, max);
        let mut taken = SORTED_FIRST;
        loop {
            rank::select_top_k(logits, taken, &mut self.kept);
            self.kept.sort_unstable();
            let reached = reaching(&self.kept, max, wanted);
            if reached.is_some() || taken >= logits.len() {
                self.kept.truncate(reached.unwrap_or(self.kept.len()));
                return self.sort_by_id();
            }
            taken *= SORTED_GROWTH;
        }
    }

    /// Drops all tokens of at least this probability but the last of them.
    fn drop_likeliest(&mut self, threshold: f32) {
        let Softmax { max, total, .. } = softmax(&self.kept);
        let floor = f64::from(threshold) * total;
        let likely = |kept: &&RankedLogit| weight(kept.logit(), max) >= floor;
        let Some(&last) = self.kept.iter().filter(likely).max() else { return };
        self.kept.retain(|kept| *kept == last || !likely(&kept));
    }

    /// Entropy of the candidates divided by that of equally likely ones: 0 to 1. Removed tokens do
    /// not count, though top-k may have kept some to reach k.
    pub(super) fn normalised_entropy(&self) -> f64 {
        match self.kept.iter().filter(|kept| kept.logit() > f32::NEG_INFINITY).count() {
            0 | 1 => 0.0,
            count => (softmax(&self.kept).entropy / math::ln(count as f64)).clamp(0.0, 1.0),
        }
    }
}

/// The number of highest tokens, in order, whose weights reach `wanted`.
fn reaching(best: &[RankedLogit], max: f32, wanted: f64) -> Option<usize> {
    let mut sum = 0.0;
    let last = best.iter().position(|best| {
        sum += weight(best.logit(), max);
        sum >= wanted
    });
    last.map(|last| last + 1)
}

fn min_p_floor(max: f32, min_p: f32) -> f32 {
    max + math::ln(f64::from(min_p)) as f32
}

/// Sorts as much of `ranked` as needed until `enough` returns true, and returns the number of
/// tokens seen.
fn fewest(ranked: &mut [RankedLogit], mut enough: impl FnMut(RankedLogit) -> bool) -> usize {
    let (mut sorted, mut more) = (0, SORTED_FIRST);
    while sorted < ranked.len() {
        let end = ranked.len().min(sorted + more);
        if end < ranked.len() {
            ranked[sorted..].select_nth_unstable(end - sorted - 1);
        }
        ranked[sorted..end].sort_unstable();
        if let Some(at) = ranked[sorted..end].iter().position(|&best| enough(best)) {
            return sorted + at + 1;
        }
        (sorted, more) = (end, more * SORTED_GROWTH);
    }
    ranked.len()
}

fn softmax(kept: &[RankedLogit]) -> Softmax {
    let max = max_of(kept);
    let (mut total, mut weighted) = (0.0, 0.0);
    for candidate in kept {
        let below = candidate.logit() - max;
        let weight = f64::from(softmax::exp(below));
        if weight > 0.0 {
            total += weight;
            weighted += weight * f64::from(below);
        }
    }
    Softmax { max, total, entropy: math::ln(total) - weighted / total }
}

fn max_of(kept: &[RankedLogit]) -> f32 {
    kept.iter().map(|candidate| candidate.logit()).fold(f32::NEG_INFINITY, f32::max)
}

fn weight(logit: f32, max: f32) -> f64 {
    f64::from(softmax::exp(logit - max))
}

/// The highest logit minus `sigmas` standard deviations of all tokens that were not removed.
fn sigma_floor(logits: &[f32], sigmas: f32) -> f32 {
    let max = f64::from(rank::max(logits));
    let (mut count, mut sum, mut squares) = (0.0, 0.0, 0.0);
    for &logit in logits.iter().filter(|logit| **logit > f32::NEG_INFINITY) {
        // Relative to the highest, so that large logits of one size do not cancel out.
        let below = f64::from(logit) - max;
        (count, sum, squares) = (count + 1.0, sum + below, squares + below * below);
    }
    let mean = sum / count;
    let deviation = (squares / count - mean * mean).max(0.0).sqrt();
    (max - f64::from(sigmas) * deviation) as f32
}
