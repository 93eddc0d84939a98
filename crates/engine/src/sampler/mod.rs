//! From a row of logits to one token.
//!
//! The chain, in llama.cpp's order where names coincide:
//!
//! 1. logit bias: added
//! 2. stop tokens are ruled out while the output is shorter than `min_tokens`
//! 3. penalties: repetition, then frequency and presence
//! 4. temperature 0: the highest logit is taken, and nothing below applies
//! 5. top-k: the k highest logits
//! 6. top-p: of the rest, the fewest highest whose softmax adds up to p
//! 7. min-p: of the rest, those of at least `min_p` times the highest probability
//! 8. temperature: logits are divided by it
//! 9. draw: one uniform number inverts the running sum of the weights in order of rising id
//!
//! Among equal logits the lower id ranks higher everywhere. Arithmetic is f32 and f64 in a fixed order without library
//! functions that differ between machines; numbers are keyed by position ([`random`]): the same request draws the same
//! token wherever and however often it runs.

mod logprobs;
mod penalties;
mod random;
mod rank;
mod weights;

use crate::SamplingParams;
use rank::Ranked;
use weights::Weights;

pub use logprobs::LogProbs;
pub use penalties::TokenCounts;
pub use random::{Purpose, Stream};

/// What beside logits and parameters decides a draw.
#[derive(Clone, Copy, Debug)]
pub struct Draw<'a> {
    pub params: &'a SamplingParams,
    pub choice: u32,
    /// Absolute position of the token to draw.
    pub position: usize,
    /// Needed when the parameters have penalties.
    pub counts: Option<&'a TokenCounts>,
    /// Tokens that must not be drawn here.
    pub ruled_out: &'a [u32],
}

/// A row of logits that no token can be drawn from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SampleError {
    #[error("logit of token {token} is not a number or infinite: the model's weights or kernels are broken")]
    NotFinite { token: usize },
    #[error("every token is ruled out")]
    NothingLeft,
}

/// Buffers for one draw after another; no state passes between draws.
#[derive(Debug, Default)]
pub struct Sampler {
    /// The row after bias and penalties, when there are any.
    adjusted: Vec<f32>,
    candidates: Vec<Ranked>,
    weights: Weights,
}

/// Candidates that top-p sorts first, and the factor by which it takes more until they suffice.
const TOP_P_FIRST: usize = 64;
const TOP_P_GROWTH: usize = 8;

impl Sampler {
    pub fn sample(&mut self, logits: &[f32], draw: &Draw<'_>) -> Result<u32, SampleError> {
        check(logits)?;
        let params = draw.params;
        if params.logit_bias.is_empty() && draw.ruled_out.is_empty() && draw.counts.is_none() {
            return self.choose(logits, draw);
        }
        let mut adjusted = std::mem::take(&mut self.adjusted);
        adjusted.clear();
        adjusted.extend_from_slice(logits);
        for &(token, bias) in &params.logit_bias {
            adjusted[token as usize] += bias;
        }
        for &token in draw.ruled_out {
            adjusted[token as usize] = f32::NEG_INFINITY;
        }
        if let Some(counts) = draw.counts {
            counts.apply(params, &mut adjusted);
        }
        let chosen = self.choose(&adjusted, draw);
        self.adjusted = adjusted;
        chosen
    }

    fn choose(&mut self, logits: &[f32], draw: &Draw<'_>) -> Result<u32, SampleError> {
        let params = draw.params;
        let max = rank::max(logits);
        if max == f32::NEG_INFINITY {
            return Err(SampleError::NothingLeft);
        }
        if params.temperature == 0.0 {
            return Ok(rank::argmax(logits) as u32);
        }
        let stream = Stream { seed: params.seed, choice: draw.choice };
        let uniform = stream.uniform(draw.position as u64, Purpose::Token);
        if !self.truncate(logits, max, params) {
            self.weights.fill(logits.iter().copied(), max, params.temperature);
            return Ok(self.weights.pick(uniform) as u32);
        }
        self.candidates.sort_unstable_by_key(|candidate| candidate.id());
        let kept = self.candidates.iter().map(|candidate| candidate.logit());
        self.weights.fill(kept, max, params.temperature);
        Ok(self.candidates[self.weights.pick(uniform)].id())
    }

    /// Fills `candidates` with what top-k, top-p and min-p leave; `false`: none of them is on, all tokens are left.
    fn truncate(&mut self, logits: &[f32], max: f32, params: &SamplingParams) -> bool {
        let top_k = params.top_k as usize;
        let mut truncated = top_k > 0 && top_k < logits.len();
        if truncated {
            rank::highest(logits, top_k, &mut self.candidates);
        }
        if params.top_p < 1.0 {
            if truncated {
                self.candidates.sort_unstable();
                let total = self.candidates.iter().map(|kept| weight(kept.logit(), max)).sum();
                let count = self.reaching(params.top_p, total, max).unwrap_or(self.candidates.len());
                self.candidates.truncate(count);
            } else {
                self.top_p_of_all(logits, max, params.top_p);
            }
            truncated = true;
        }
        if params.min_p > 0.0 {
            let floor = max + f64::from(params.min_p).ln() as f32;
            if truncated {
                self.candidates.retain(|kept| kept.logit() >= floor);
            } else {
                self.candidates.clear();
                let kept = logits.iter().enumerate().filter(|&(_, &logit)| logit >= floor);
                self.candidates.extend(kept.map(|(id, &logit)| Ranked::new(logit, id as u32)));
            }
            truncated = true;
        }
        truncated
    }

    fn top_p_of_all(&mut self, logits: &[f32], max: f32, top_p: f32) {
        let total = weights::exp_sum(logits, max);
        let mut taken = TOP_P_FIRST;
        loop {
            rank::highest(logits, taken, &mut self.candidates);
            self.candidates.sort_unstable();
            if let Some(count) = self.reaching(top_p, total, max) {
                self.candidates.truncate(count);
                return;
            }
            if taken >= logits.len() {
                return;
            }
            taken *= TOP_P_GROWTH;
        }
    }

    /// How many of the sorted candidates together reach `top_p` of `total`.
    fn reaching(&self, top_p: f32, total: f64, max: f32) -> Option<usize> {
        let wanted = f64::from(top_p) * total;
        let mut sum = 0.0;
        let reached = self.candidates.iter().position(|kept| {
            sum += weight(kept.logit(), max);
            sum >= wanted
        });
        reached.map(|last| last + 1)
    }
}

fn weight(logit: f32, max: f32) -> f64 {
    f64::from(weights::exp(logit - max))
}

/// A model may rule a token out with -inf; NaN and +inf come from broken weights or kernels.
fn check(logits: &[f32]) -> Result<(), SampleError> {
    // Without branches in the loop, so that it is vectorised: the row is looked through again only if it is bad.
    let bad = |logit: f32| logit.is_nan() || logit == f32::INFINITY;
    if !logits.iter().fold(false, |found, &logit| found | bad(logit)) {
        return Ok(());
    }
    let token = logits.iter().position(|&logit| bad(logit)).unwrap_or(0);
    Err(SampleError::NotFinite { token })
}
