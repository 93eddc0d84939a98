// SPDX-License-Identifier: Apache-2.0

//! The sampler: from a row of logits to one token.
//!
//! The chain, in the order of llama.cpp (`common/sampling.cpp`) where names coincide:
//!
//! 1. token mask: tokens that the grammar does not allow are removed, and stop tokens while the
//!    output is shorter than `min_tokens`
//! 2. logit bias: added
//! 3. penalties: repetition, then frequency and presence
//! 4. DRY: tokens that prolong a repetition are lowered
//! 5. temperature 0: the highest logit is taken, and no later step applies
//! 6. top-n-sigma: keeps logits of at least the highest minus n standard deviations
//! 7. top-k: keeps the k highest of the rest
//! 8. typical: keeps the tokens of the most expected surprise whose softmax adds up to p
//! 9. top-p: keeps the fewest highest tokens whose softmax adds up to p
//! 10. min-p: keeps tokens of at least `min_p` times the highest probability
//! 11. XTC: by chance, drops all tokens above a probability but the last of them
//! 12. temperature: divides the logits; a dynamic temperature follows the entropy of the rest
//! 13. draw: one uniform number inverts the cumulative weights in order of rising id
//!
//! Mirostat replaces steps 3 to 11, as in llama.cpp: it follows 1, 2 and a static temperature.
//!
//! `tests/engine/llama_samplers.rs` compares the candidates and their probabilities with llama.cpp.
//! Intended differences:
//!
//! - Temperature 0 is always greedy. In llama.cpp, typical and XTC may drop the highest logit
//!   before, and a dynamic range makes it a draw.
//! - Presence and frequency penalties count the output, as in the OpenAI API. In llama.cpp they
//!   count the last n tokens of prompt and output.
//! - A removed token (by mask, bias or top-n-sigma) is gone. In llama.cpp it stays with a logit of
//!   -inf. There it counts for dynamic temperature and mirostat 1, and makes typical's entropy and
//!   mirostat 1's exponent NaN.
//! - Mirostat 1 keeps everything where its formula overflows. In llama.cpp the conversion to an
//!   integer is undefined.
//! - Which of several equal logits stays at a filter's border. In llama.cpp the sort decides.
//! - The random numbers, those of XTC included.
//!
//! Among equal logits the lower id ranks higher. Arithmetic is f32 and f64 in a fixed order,
//! without library functions that differ between machines. Random numbers are keyed by position
//! ([`crate::sample::random`]). The same request thus samples the same tokens on every machine and
//! in every run.

use crate::sample::candidates::{Candidates, Filter};
use crate::sample::draw::SampleContext;
use crate::sample::dry::DryRepetitions;
use crate::sample::error::{SampleError, check};
use crate::sample::history::History;
use crate::sample::params::SamplingParams;
use crate::sample::{math, mirostat};
use ops::Shortlist;
use ops::rank::{self, RankedLogit};
use ops::softmax::SoftmaxWeights;

/// Buffers that are reused between tokens. No state passes from one token to the next.
#[derive(Debug, Default)]
pub struct Sampler {
    /// The row after mask, bias and penalties, if there are any.
    adjusted: Vec<f32>,
    /// The row after temperature, for mirostat.
    tempered: Vec<f32>,
    repetitions: DryRepetitions,
    candidates: Candidates,
    /// For mirostat, and for a shortlist after penalties.
    best: Vec<RankedLogit>,
    weights: SoftmaxWeights,
}

impl Sampler {
    /// Samples a token and appends it to the request's `history`.
    pub fn sample(
        &mut self,
        logits: &[f32],
        draw: &SampleContext<'_>,
        history: &mut History,
    ) -> Result<u32, SampleError> {
        check(logits)?;
        let token = if draw.uses_raw_logits(history) {
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

    fn adjust(&mut self, logits: &mut [f32], draw: &SampleContext<'_>, history: &History) {
        let params = draw.params;
        if let Some(allowed) = draw.allowed {
            rule_out(logits, allowed);
        }
        for &token in draw.forbidden {
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

    fn choose(
        &mut self,
        logits: &[f32],
        draw: &SampleContext<'_>,
        history: &mut History,
    ) -> Result<u32, SampleError> {
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
            mirostat::truncate(&mut self.candidates, &mut self.best, &self.tempered, &mirostat, mu);
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
                self.candidates.truncate(logits, first, params);
                self.candidates.thin_further(first, params, xtc_acts);
            }
        }
        Ok(self.pick_candidate(params, uniform))
    }

    /// The token that `sample` would draw from a row of `vocab_size` logits, if the shortlist
    /// determines it. The device made the list with [`SampleContext::shortlist_params`].
    /// The caller appends the token to the history.
    pub fn sample_shortlist(
        &mut self,
        list: &Shortlist,
        vocab_size: usize,
        draw: &SampleContext<'_>,
        history: &History,
    ) -> Option<u32> {
        draw.shortlist_params(vocab_size, history)?;
        if draw.uses_raw_logits(history) {
            return self.choose_listed(list.best(), list, vocab_size, draw);
        }
        let mut best = std::mem::take(&mut self.best);
        let whole = list.best().len() == vocab_size;
        self.adjust_best(list.best(), whole, draw, history, &mut best);
        let token = self.choose_listed(&best, list, vocab_size, draw);
        self.best = best;
        token
    }

    /// The listed tokens after penalties. Tokens that fall below the last listed one are dropped:
    /// unlisted tokens may rank between them.
    fn adjust_best(
        &mut self,
        listed: &[RankedLogit],
        whole: bool,
        draw: &SampleContext<'_>,
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
            let mut logit = if draw.forbidden.contains(&id) { f32::NEG_INFINITY } else { listed.logit() };
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

    /// `best` has the tokens of `list` after penalties.
    fn choose_listed(
        &mut self,
        best: &[RankedLogit],
        list: &Shortlist,
        vocab_size: usize,
        draw: &SampleContext<'_>,
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
                if !self.candidates.truncate_list(best, list.total(), whole, first, params) {
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

    /// Draws a token from the candidates and returns its probability among them. `max` is their
    /// highest logit.
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
        // The smallest positive temperature makes the highest logit nearly certain, without a
        // division by 0.
        (low + (high - low) * share as f32).max(f32::MIN_POSITIVE)
    }
}

/// Sets the logits of tokens without a mask bit to -inf.
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
