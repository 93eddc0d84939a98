//! The tokens still in the running, and the filters that thin them out.
//!
//! Every filter works on the softmax of what the filters before it left, at temperature 1, as in llama.cpp.

use super::rank::{self, Ranked};
use super::weights;
use super::{Stream, math};
use crate::SamplingParams;
use crate::sampler::Purpose;

/// Candidates that are sorted first, and the factor by which more are taken until they suffice.
const SORTED_FIRST: usize = 64;
const SORTED_GROWTH: usize = 8;

#[derive(Debug, Default)]
pub(super) struct Candidates {
    /// In order of rising id.
    kept: Vec<Ranked>,
    scratch: Vec<Ranked>,
}

/// Of a softmax over some tokens: `total` is the sum of `e^(logit - max)`.
struct Softmax {
    max: f32,
    total: f64,
    /// In nats.
    entropy: f64,
}

impl Candidates {
    pub(super) fn kept(&self) -> &[Ranked] {
        &self.kept
    }

    /// Top-n-sigma, top-k, typical, top-p, min-p, XTC. `false`: none of them is on, and every token is left.
    pub(super) fn thin_out(
        &mut self,
        logits: &[f32],
        params: &SamplingParams,
        stream: Stream,
        position: u64,
    ) -> bool {
        // While false, `kept` is not filled: most requests need no more than the best few of a large vocabulary.
        let mut thinned = false;
        if params.top_n_sigma > 0.0 {
            self.keep_above(logits, thinned, sigma_floor(logits, params.top_n_sigma));
            thinned = true;
        }
        let top_k = params.top_k as usize;
        if top_k > 0 && top_k < if thinned { self.kept.len() } else { logits.len() } {
            self.keep_highest(logits, thinned, top_k);
            thinned = true;
        }
        if params.typical_p < 1.0 {
            self.fill(logits, thinned);
            self.keep_typical(params.typical_p);
            thinned = true;
        }
        if params.top_p < 1.0 {
            if thinned {
                self.top_p(params.top_p)
            } else {
                self.top_p_of_all(logits, params.top_p)
            }
            thinned = true;
        }
        if params.min_p > 0.0 {
            let max = if thinned { max_of(&self.kept) } else { rank::max(logits) };
            self.keep_above(logits, thinned, max + math::ln(f64::from(params.min_p)) as f32);
            thinned = true;
        }
        if params.xtc_probability > 0.0
            && params.xtc_threshold <= 0.5
            && stream.uniform(position, Purpose::Xtc) < f64::from(params.xtc_probability)
        {
            self.fill(logits, thinned);
            self.drop_likeliest(params.xtc_threshold);
            thinned = true;
        }
        thinned
    }

    /// Makes `kept` all tokens, unless it is some of them already.
    pub(super) fn fill(&mut self, logits: &[f32], thinned: bool) {
        if !thinned {
            self.keep_above(logits, false, f32::MIN);
        }
    }

    pub(super) fn keep_above(&mut self, logits: &[f32], thinned: bool, floor: f32) {
        if thinned {
            self.kept.retain(|kept| kept.logit() >= floor);
        } else {
            self.kept.clear();
            let above = logits.iter().enumerate().filter(|&(_, &logit)| logit >= floor);
            self.kept.extend(above.map(|(id, &logit)| Ranked::new(logit, id as u32)));
        }
    }

    pub(super) fn keep_highest(&mut self, logits: &[f32], thinned: bool, count: usize) {
        if thinned {
            rank::keep(&mut self.kept, count);
        } else {
            rank::highest(logits, count, &mut self.kept);
        }
        self.sort_by_id();
    }

    fn sort_by_id(&mut self) {
        self.kept.sort_unstable_by_key(|kept| kept.id());
    }

    /// Those whose surprise is nearest to the entropy, until their probabilities exceed `typical_p`.
    fn keep_typical(&mut self, typical_p: f32) {
        let Softmax { max, total, entropy } = softmax(&self.kept);
        let expected = math::ln(total) - entropy;
        self.scratch.clear();
        self.scratch.extend(self.kept.iter().enumerate().map(|(index, kept)| {
            let off = (expected - f64::from(kept.logit() - max)).abs();
            Ranked::new(-off as f32, index as u32)
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
        let wanted = f64::from(top_p) * weights::exp_sum(logits, max);
        let mut taken = SORTED_FIRST;
        loop {
            rank::highest(logits, taken, &mut self.kept);
            self.kept.sort_unstable();
            let mut sum = 0.0;
            let reached = self.kept.iter().position(|best| {
                sum += weight(best.logit(), max);
                sum >= wanted
            });
            if reached.is_some() || taken >= logits.len() {
                self.kept.truncate(reached.map_or(self.kept.len(), |last| last + 1));
                return self.sort_by_id();
            }
            taken *= SORTED_GROWTH;
        }
    }

    /// Drops all tokens of at least that probability but the last of them.
    fn drop_likeliest(&mut self, threshold: f32) {
        let Softmax { max, total, .. } = softmax(&self.kept);
        let floor = f64::from(threshold) * total;
        let likely = |kept: &&Ranked| weight(kept.logit(), max) >= floor;
        let Some(&last) = self.kept.iter().filter(likely).max() else { return };
        self.kept.retain(|kept| *kept == last || !likely(&kept));
    }

    /// Entropy of what is left over that of as many equally likely tokens: 0 to 1.
    pub(super) fn normalised_entropy(&self) -> f64 {
        match self.kept.len() {
            0 | 1 => 0.0,
            count => (softmax(&self.kept).entropy / math::ln(count as f64)).clamp(0.0, 1.0),
        }
    }
}

/// Sorts as much of `ranked` as it takes until `enough` has seen enough, and returns how many that are.
fn fewest(ranked: &mut [Ranked], mut enough: impl FnMut(Ranked) -> bool) -> usize {
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

fn softmax(kept: &[Ranked]) -> Softmax {
    let max = max_of(kept);
    let (mut total, mut weighted) = (0.0, 0.0);
    for candidate in kept {
        let below = candidate.logit() - max;
        let weight = f64::from(weights::exp(below));
        if weight > 0.0 {
            total += weight;
            weighted += weight * f64::from(below);
        }
    }
    Softmax { max, total, entropy: math::ln(total) - weighted / total }
}

fn max_of(kept: &[Ranked]) -> f32 {
    kept.iter().map(|candidate| candidate.logit()).fold(f32::NEG_INFINITY, f32::max)
}

fn weight(logit: f32, max: f32) -> f64 {
    f64::from(weights::exp(logit - max))
}

/// Highest logit minus `sigmas` standard deviations of all that are not ruled out.
fn sigma_floor(logits: &[f32], sigmas: f32) -> f32 {
    let max = f64::from(rank::max(logits));
    let (mut count, mut sum, mut squares) = (0.0, 0.0, 0.0);
    for &logit in logits.iter().filter(|logit| **logit > f32::NEG_INFINITY) {
        // From the highest, so that large logits of one size do not cancel out.
        let below = f64::from(logit) - max;
        (count, sum, squares) = (count + 1.0, sum + below, squares + below * below);
    }
    let mean = sum / count;
    let deviation = (squares / count - mean * mean).max(0.0).sqrt();
    (max - f64::from(sigmas) * deviation) as f32
}
