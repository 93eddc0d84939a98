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
//! MirostatParams takes the place of 3 to 11 as it does there: it comes after 1, 2 and a temperature that is not dynamic.
//!
//! `tests/llama_samplers.rs` compares what is left, and how probable it is, with what llama.cpp leaves. On purpose another:
//!
//! - Temperature 0 is greedy whatever else is asked for; there, typical and XTC may drop the highest logit before, and a
//!   dynamic range makes it a draw.
//! - Presence and frequency count the output, as in the OpenAI API; there, the last n tokens of prompt and output.
//! - A token ruled out (by mask, bias or top-n-sigma) is gone; there it stays with a logit of -inf. It counts in the number
//!   of tokens that dynamic temperature and mirostat 1 go by, and makes typical's entropy and mirostat 1's exponent no number.
//! - MirostatParams 1 keeps everything where its formula overflows; there, the conversion to an integer is undefined.
//! - Which of equal logits stays at a filter's border; there, it is as the sort leaves them.
//! - The random numbers, XTC's among them.
//!
//! Among equal logits the lower id ranks higher everywhere. Arithmetic is f32 and f64 in a fixed order without library
//! functions that differ between machines; numbers are keyed by position ([`random`]): the same request draws the same
//! token wherever and however often it runs.

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

/// Buffers for one draw after another; no state passes between draws.
#[derive(Debug, Default)]
pub struct Sampler {
    /// The row after masks, bias and penalties, when there are any.
    adjusted: Vec<f32>,
    /// The row after temperature, for mirostat.
    tempered: Vec<f32>,
    repetitions: DryRepetitions,
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
    /// [`SampleContext::weighing`] says, and it is for the caller to add the token to the history.
    pub fn sample_shortlist(
        &mut self,
        list: &Shortlist,
        vocab_size: usize,
        draw: &SampleContext<'_>,
        history: &History,
    ) -> Option<u32> {
        draw.weighing(vocab_size, history)?;
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

    /// The best tokens after what lowers some of them. Those that fall below the last one of the list are left out: they would
    /// stand among others that the list does not have.
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

    /// `best` are the best of the row that `list` is of, as they are after penalties.
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
