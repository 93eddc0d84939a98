// SPDX-License-Identifier: Apache-2.0

//! The inputs that decide a sampled token besides the logits and earlier tokens.

use crate::sample::candidates::Filter;
use crate::sample::history::History;
use crate::sample::params::SamplingParams;
use crate::sample::random::{RandomPurpose, RandomStream};
use ops::{DrawParams, SHORTLIST_LEN};

/// Parameters, random number key and masks for one token.
#[derive(Clone, Copy, Debug)]
pub struct SampleContext<'a> {
    pub params: &'a SamplingParams,
    pub choice: u32,
    /// Absolute position of the token to sample.
    pub position: usize,
    /// Tokens that must not be sampled here.
    pub forbidden: &'a [u32],
    /// Token bitmask: bit `t % 32` of word `t / 32` allows token `t`. Tokens beyond the end are not
    /// allowed.
    pub allowed: Option<&'a [u32]>,
}

impl SampleContext<'_> {
    /// Whether no mask, bias or penalty changes the logits.
    pub(crate) fn uses_raw_logits(&self, history: &History) -> bool {
        self.params.logit_bias.is_empty()
            && self.forbidden.is_empty()
            && self.allowed.is_none()
            && history.uses_raw_logits()
    }

    fn stream(&self) -> RandomStream {
        RandomStream { seed: self.params.seed, choice: self.choice }
    }

    /// The uniform number of the final draw.
    pub(super) fn uniform(&self) -> f64 {
        self.stream().uniform(self.position as u64, RandomPurpose::Token)
    }

    /// Whether XTC acts on this token, if it is on.
    pub(super) fn xtc_acts(&self) -> bool {
        let chance = f64::from(self.params.xtc_probability);
        chance > 0.0 && self.stream().uniform(self.position as u64, RandomPurpose::Xtc) < chance
    }

    /// How the device must compute a shortlist for
    /// [`Sampler::sample_shortlist`](crate::sample::sampler::Sampler::sample_shortlist). Returns
    /// `None` if a shortlist cannot determine the token.
    ///
    /// A shortlist determines the token on two conditions: of the unlisted tokens, filters need at
    /// most the sum of their weights; and penalties only lower logits, so that no unlisted token
    /// ranks before a listed one.
    pub fn shortlist_params(&self, vocab_size: usize, history: &History) -> Option<DrawParams> {
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
