//! From a row of logits to one token.
//!
//! The chain, in the order of llama.cpp (`common/sampling.cpp`) where names coincide:
//!
//! 1. what the request's grammar does not allow is ruled out, and stop tokens while the output is shorter than `min_tokens`
//! 2. logit bias: added
//! 3. penalties: repetition, then frequency and presence
//! 4. DRY: tokens that prolong a repetition are lowered
//! 5. temperature 0: the highest logit is taken, and nothing below applies
//! 6. top-n-sigma: logits of at least the highest minus n standard deviations
//! 7. top-k: of the rest, the k highest
//! 8. typical: of the rest, those of the most expected surprise whose softmax adds up to p
//! 9. top-p: of the rest, the fewest highest whose softmax adds up to p
//! 10. min-p: of the rest, those of at least `min_p` times the highest probability
//! 11. XTC: by chance, all above a probability but the last of them are dropped
//! 12. temperature: logits are divided by it; a dynamic one follows the entropy of what is left
//! 13. draw: one uniform number inverts the running sum of the weights in order of rising id
//!
//! Mirostat takes the place of 3 to 11 as it does there: it comes after 1, 2 and a temperature that is not dynamic.
//!
//! `tests/llama_samplers.rs` compares what is left, and how probable it is, with what llama.cpp leaves. On purpose another:
//!
//! - Temperature 0 is greedy whatever else is asked for; there, typical and XTC may drop the highest logit before, and a
//!   dynamic range makes it a draw.
//! - Presence and frequency count the output, as in the OpenAI API; there, the last n tokens of prompt and output.
//! - A token ruled out (by mask, bias or top-n-sigma) is gone; there it stays with a logit of -inf. It counts in the number
//!   of tokens that dynamic temperature and mirostat 1 go by, and makes typical's entropy and mirostat 1's exponent no number.
//! - Mirostat 1 keeps everything where its formula overflows; there, the conversion to an integer is undefined.
//! - Which of equal logits stays at a filter's border; there, it is as the sort leaves them.
//! - The random numbers, XTC's among them.
//!
//! Among equal logits the lower id ranks higher everywhere. Arithmetic is f32 and f64 in a fixed order without library
//! functions that differ between machines; numbers are keyed by position ([`random`]): the same request draws the same
//! token wherever and however often it runs.

mod candidates;
mod dry;
mod history;
mod logprobs;
mod math;
mod mirostat;
mod penalties;
mod random;

use crate::SamplingParams;
use candidates::{Candidates, Filter};
use dry::Repetitions;
use ops::rank::{self, RankedLogit};
use ops::softmax::SoftmaxWeights;
use ops::{DrawParams, SHORTLIST_LEN, Shortlist};

pub use history::History;
pub use logprobs::LogProbs;
pub use random::{Purpose, Stream};

/// What beside logits, parameters and earlier draws decides a draw.
#[derive(Clone, Copy, Debug)]
pub struct Draw<'a> {
    pub params: &'a SamplingParams,
    pub choice: u32,
    /// Absolute position of the token to draw.
    pub position: usize,
    /// Tokens that must not be drawn here.
    pub ruled_out: &'a [u32],
    /// Bit `t % 32` of word `t / 32`: whether token `t` may be drawn. Tokens beyond the end may not.
    pub allowed: Option<&'a [u32]>,
}

impl Draw<'_> {
    /// Whether it is the model's own logits that decide.
    pub(crate) fn is_plain(&self, history: &History) -> bool {
        self.params.logit_bias.is_empty()
            && self.ruled_out.is_empty()
            && self.allowed.is_none()
            && history.is_plain()
    }

    fn stream(&self) -> Stream {
        Stream { seed: self.params.seed, choice: self.choice }
    }

    /// The number that decides between the tokens in the end.
    fn uniform(&self) -> f64 {
        self.stream().uniform(self.position as u64, Purpose::Token)
    }

    /// Whether it is XTC's turn, if it is on at all.
    fn xtc_acts(&self) -> bool {
        let chance = f64::from(self.params.xtc_probability);
        chance > 0.0 && self.stream().uniform(self.position as u64, Purpose::Xtc) < chance
    }

    /// How a row's shortlist is to be weighed for [`Sampler::sample_shortlist`], if it may show the token: no filter weighs all
    /// tokens by more than their sum, or by that after some have changed, and what changes logits lowers them, so that no token
    /// that is not listed comes before those that are.
    pub fn weighing(&self, vocab_size: usize, history: &History) -> Option<DrawParams> {
        let params = self.params;
        let plain = self.is_plain(history);
        if !plain && (self.allowed.is_some() || !params.only_lowers()) {
            return None;
        }
        if params.temperature == 0.0 {
            return Some(DrawParams::default());
        }
        if params.mirostat.is_some() {
            return None;
        }
        match Filter::first(params, vocab_size, self.xtc_acts()) {
            None if plain && params.dynatemp_range == 0.0 => {
                Some(DrawParams { temperature: params.temperature, uniform: Some(self.uniform()) })
            }
            Some(Filter::TopP) if plain => Some(DrawParams::default()),
            Some(Filter::TopK) if params.top_k as usize <= SHORTLIST_LEN => Some(DrawParams::default()),
            Some(Filter::MinP) => Some(DrawParams::default()),
            _ => None,
        }
    }
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
    /// The row after masks, bias and penalties, when there are any.
    adjusted: Vec<f32>,
    /// The row after temperature, for mirostat.
    tempered: Vec<f32>,
    repetitions: Repetitions,
    candidates: Candidates,
    /// For mirostat; and a shortlist after penalties.
    best: Vec<RankedLogit>,
    weights: SoftmaxWeights,
}

impl Sampler {
    /// Draws a token and adds it to the request's `history`.
    pub fn sample(
        &mut self,
        logits: &[f32],
        draw: &Draw<'_>,
        history: &mut History,
    ) -> Result<u32, SampleError> {
        check(logits)?;
        let token = if draw.is_plain(history) {
            self.choose(logits, draw, history)?
        } else {
            let mut adjusted = std::mem::take(&mut self.adjusted);
            adjusted.clear();
            adjusted.extend_from_slice(logits);
            self.adjust(&mut adjusted, draw, history);
            let chosen = self.choose(&adjusted, draw, history);
            self.adjusted = adjusted;
            chosen?
        };
        history.push(token);
        Ok(token)
    }

    fn adjust(&mut self, logits: &mut [f32], draw: &Draw<'_>, history: &History) {
        let params = draw.params;
        if let Some(allowed) = draw.allowed {
            rule_out(logits, allowed);
        }
        for &token in draw.ruled_out {
            logits[token as usize] = f32::NEG_INFINITY;
        }
        for &(token, bias) in &params.logit_bias {
            logits[token as usize] += bias;
        }
        if let Some(counts) = &history.counts {
            counts.apply(params, logits);
        }
        if let (Some(dry), Some(tokens)) = (&params.dry, &history.tokens) {
            self.repetitions.apply(dry, tokens, logits);
        }
    }

    fn choose(&mut self, logits: &[f32], draw: &Draw<'_>, history: &mut History) -> Result<u32, SampleError> {
        let params = draw.params;
        let max = rank::max(logits);
        if max == f32::NEG_INFINITY {
            return Err(SampleError::NothingLeft);
        }
        if params.temperature == 0.0 {
            return Ok(rank::argmax(logits) as u32);
        }
        let uniform = draw.uniform();
        if let (Some(mirostat), Some(mu)) = (params.mirostat, history.mu) {
            self.tempered.clear();
            self.tempered.extend(logits.iter().map(|logit| (logit - max) / params.temperature));
            mirostat::thin_out(&mut self.candidates, &mut self.best, &self.tempered, &mirostat, mu);
            let (token, probability) = self.pick(0.0, 1.0, uniform);
            history.mu = Some(mirostat::learn(&mirostat, mu, probability));
            return Ok(token);
        }
        let xtc_acts = draw.xtc_acts();
        match Filter::first(params, logits.len(), xtc_acts) {
            None if params.dynatemp_range == 0.0 => {
                self.weights.fill(logits.iter().copied(), max, params.temperature);
                return Ok(self.weights.pick(uniform) as u32);
            }
            None => self.candidates.fill(logits),
            Some(first) => {
                self.candidates.thin_out(logits, first, params);
                self.candidates.thin_further(first, params, xtc_acts);
            }
        }
        Ok(self.pick_candidate(params, uniform))
    }

    /// The token that `sample` draws from a row of `vocab_size` logits, if its shortlist shows it. The list is weighed as
    /// [`Draw::weighing`] says, and it is for the caller to add the token to the history.
    pub fn sample_shortlist(
        &mut self,
        list: &Shortlist,
        vocab_size: usize,
        draw: &Draw<'_>,
        history: &History,
    ) -> Option<u32> {
        draw.weighing(vocab_size, history)?;
        if draw.is_plain(history) {
            return self.choose_listed(list.best(), list, vocab_size, draw);
        }
        let mut best = std::mem::take(&mut self.best);
        let whole = list.best().len() == vocab_size;
        self.adjust_best(list.best(), whole, draw, history, &mut best);
        let token = self.choose_listed(&best, list, vocab_size, draw);
        self.best = best;
        token
    }

    /// The best tokens after what lowers some of them. Those that fall below the last one of the list are left out: they would
    /// stand among others that the list does not have.
    fn adjust_best(
        &mut self,
        listed: &[RankedLogit],
        whole: bool,
        draw: &Draw<'_>,
        history: &History,
        best: &mut Vec<RankedLogit>,
    ) {
        let dry = draw.params.dry.as_ref().zip(history.tokens.as_ref());
        if let Some((dry, tokens)) = dry {
            self.repetitions.find(dry, tokens);
        }
        best.clear();
        best.extend(listed.iter().map(|listed| {
            let id = listed.id();
            let mut logit = if draw.ruled_out.contains(&id) { f32::NEG_INFINITY } else { listed.logit() };
            if let Some(counts) = &history.counts {
                logit = counts.applied(draw.params, id, logit);
            }
            if let Some((dry, _)) = dry {
                logit = self.repetitions.applied(dry, id, logit);
            }
            RankedLogit::new(logit, id)
        }));
        if let Some(&last) = listed.last().filter(|_| !whole) {
            best.retain(|&lowered| lowered <= last);
        }
        best.sort_unstable();
    }

    /// `best` are the best of the row that `list` is of, as they are after penalties.
    fn choose_listed(
        &mut self,
        best: &[RankedLogit],
        list: &Shortlist,
        vocab_size: usize,
        draw: &Draw<'_>,
    ) -> Option<u32> {
        let (params, xtc_acts) = (draw.params, draw.xtc_acts());
        let is_greedy = params.temperature == 0.0;
        let first = Filter::first(params, vocab_size, xtc_acts);
        if !is_greedy && first.is_none() {
            return list.drawn();
        }
        let highest = best.first().filter(|best| best.logit() > f32::NEG_INFINITY)?;
        match first {
            Some(first) if !is_greedy => {
                let whole = list.best().len() == vocab_size;
                if !self.candidates.thin_out_list(best, list.total(), whole, first, params) {
                    return None;
                }
                self.candidates.thin_further(first, params, xtc_acts);
                Some(self.pick_candidate(params, draw.uniform()))
            }
            _ => Some(highest.id()),
        }
    }

    fn pick_candidate(&mut self, params: &SamplingParams, uniform: f64) -> u32 {
        let dynamic = params.dynatemp_range > 0.0;
        let temperature = if dynamic { self.dynamic_temperature(params) } else { params.temperature };
        let max = self.candidates.kept().iter().map(|kept| kept.logit()).fold(f32::NEG_INFINITY, f32::max);
        self.pick(max, temperature, uniform).0
    }

    /// A token among the candidates, and its probability there. `max` is the highest logit of theirs.
    fn pick(&mut self, max: f32, temperature: f32, uniform: f64) -> (u32, f64) {
        let kept = self.candidates.kept();
        self.weights.fill(kept.iter().map(|kept| kept.logit()), max, temperature);
        let index = self.weights.pick(uniform);
        (kept[index].id(), self.weights.probability(index))
    }

    fn dynamic_temperature(&self, params: &SamplingParams) -> f32 {
        let SamplingParams { temperature, dynatemp_range: range, dynatemp_exponent: exponent, .. } = *params;
        let (low, high) = ((temperature - range).max(0.0), temperature + range);
        let entropy = self.candidates.normalised_entropy();
        let share = match entropy {
            0.0 => {
                if exponent == 0.0 {
                    1.0
                } else {
                    0.0
                }
            }
            _ => math::pow(entropy, f64::from(exponent)),
        };
        // At 0 the highest logit is as good as certain, and nothing is divided by 0.
        (low + (high - low) * share as f32).max(f32::MIN_POSITIVE)
    }
}

/// Tokens whose bit is not set become impossible.
fn rule_out(logits: &mut [f32], allowed: &[u32]) {
    for (word, logits) in logits.chunks_mut(32).enumerate() {
        let bits = allowed.get(word).copied().unwrap_or(0);
        if bits != u32::MAX {
            for (bit, logit) in logits.iter_mut().enumerate() {
                if bits >> bit & 1 == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }
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
