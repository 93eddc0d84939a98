//! What decides one draw.

use crate::sample::candidates::Filter;
use crate::sample::history::History;
use crate::sample::params::SamplingParams;
use crate::sample::random::{RandomPurpose, RandomStream};
use ops::{DrawParams, SHORTLIST_LEN};

/// What beside logits, parameters and earlier draws decides a draw.
#[derive(Clone, Copy, Debug)]
pub struct SampleContext<'a> {
    pub params: &'a SamplingParams,
    pub choice: u32,
    /// Absolute position of the token to draw.
    pub position: usize,
    /// Tokens that must not be drawn here.
    pub forbidden: &'a [u32],
    /// Bit `t % 32` of word `t / 32`: whether token `t` may be drawn. Tokens beyond the end may not.
    pub allowed: Option<&'a [u32]>,
}

impl SampleContext<'_> {
    /// Whether it is the model's own logits that decide.
    pub(crate) fn uses_raw_logits(&self, history: &History) -> bool {
        self.params.logit_bias.is_empty()
            && self.forbidden.is_empty()
            && self.allowed.is_none()
            && history.uses_raw_logits()
    }

    fn stream(&self) -> RandomStream {
        RandomStream { seed: self.params.seed, choice: self.choice }
    }

    /// The number that decides between the tokens in the end.
    pub(super) fn uniform(&self) -> f64 {
        self.stream().uniform(self.position as u64, RandomPurpose::Token)
    }

    /// Whether it is XTC's turn, if it is on at all.
    pub(super) fn xtc_acts(&self) -> bool {
        let chance = f64::from(self.params.xtc_probability);
        chance > 0.0 && self.stream().uniform(self.position as u64, RandomPurpose::Xtc) < chance
    }

    /// How a row's shortlist is to be weighed for [`Sampler::sample_shortlist`], if it may show the token: no filter weighs all
    /// tokens by more than their sum, or by that after some have changed, and what changes logits lowers them, so that no token
    /// that is not listed comes before those that are.
    pub fn weighing(&self, vocab_size: usize, history: &History) -> Option<DrawParams> {
        let params = self.params;
        let plain = self.uses_raw_logits(history);
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
