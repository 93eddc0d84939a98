// SPDX-License-Identifier: Apache-2.0

//! Validates a request before it is queued, and computes how long its sequence may get.

use crate::kv::group::KvGroupKind;
use crate::request::input::{
    BEAM_WIDTH_MAX, BeamParams, BeamRequest, EmbedRequest, LENGTH_PENALTY_MAX, Request, ScoreKind,
    ScoreRequest, StopConditions, TOP_LOGPROBS_MAX,
};
use crate::request::refusal::RefuseReason;
use crate::sample::history::History;
use crate::sample::params::SamplingParamError;

/// The limits that requests are checked against.
#[derive(Clone, Debug)]
pub(crate) struct RequestLimits {
    pub(crate) vocab_size: usize,
    pub(crate) context_tokens: usize,
    pub(crate) block_tokens: usize,
    /// Allocatable blocks.
    pub(crate) blocks: usize,
    /// Each group has its own blocks of every sequence.
    pub(crate) groups: Vec<KvGroupKind>,
    /// Token budget of a step.
    pub(crate) step_tokens: usize,
}

/// Most entries of `stop_tokens`; bounds the work per token.
const STOP_TOKENS_MAX: usize = 256;

impl RequestLimits {
    /// Checks the request. Returns the length at which its sequence ends, and its sampler history.
    pub(crate) fn check(&self, request: &Request) -> Result<(usize, History), RefuseReason> {
        let Request { prompt, prior_output, .. } = request;
        request.sampling.check(self.vocab_size)?;
        let tokens_max = self.check_generation(prompt, *prior_output, &request.stop, request.logprobs)?;
        let (prompt, output) = prompt.split_at(prompt.len() - prior_output);
        let history = History::new(&request.sampling, prompt, output, &request.sampler_state)?;
        Ok((tokens_max, history))
    }

    /// Checks the request. Returns the length at which its sequences end.
    pub(crate) fn check_beams(&self, request: &BeamRequest) -> Result<usize, RefuseReason> {
        let BeamParams { width, choices, length_penalty, .. } = request.params;
        check_range("beam_width", width as f32, 1.0, BEAM_WIDTH_MAX as f32)?;
        check_range("choices", choices as f32, 1.0, width as f32)?;
        check_range("length_penalty", length_penalty, -LENGTH_PENALTY_MAX, LENGTH_PENALTY_MAX)?;
        self.check_generation(&request.prompt, 0, &request.stop, request.logprobs)
    }

    /// Returns the length at which the sequence ends.
    fn check_generation(
        &self,
        prompt: &[u32],
        prior_output: usize,
        stop: &StopConditions,
        logprobs: Option<u8>,
    ) -> Result<usize, RefuseReason> {
        self.check_tokens("prompt", prompt)?;
        self.check_tokens("stop_tokens", &stop.stop_tokens)?;
        check_range("logprobs", f32::from(logprobs.unwrap_or(0)), 0.0, f32::from(TOP_LOGPROBS_MAX))?;
        if stop.stop_tokens.len() > STOP_TOKENS_MAX {
            let (count, max) = (stop.stop_tokens.len(), STOP_TOKENS_MAX);
            return Err(SamplingParamError::TooMany { field: "stop_tokens", count, max }.into());
        }
        let prompt_tokens = prompt.len();
        if prompt_tokens == 0 {
            return Err(RefuseReason::EmptyPrompt);
        }
        if prior_output >= prompt_tokens {
            return Err(RefuseReason::PriorOutput { prior_output, prompt_tokens });
        }
        if prompt_tokens >= self.context_tokens {
            return Err(RefuseReason::PromptTooLong { prompt_tokens, context_tokens: self.context_tokens });
        }
        let wanted = match stop.max_tokens {
            Some(max_tokens) if max_tokens as usize <= prior_output => {
                return Err(RefuseReason::NothingToGenerate { prior_output, max_tokens });
            }
            Some(max_tokens) => prompt_tokens - prior_output + max_tokens as usize,
            // One token more than the cache holds: the last token is sampled and never computed.
            None => self.tokens_max() + 1,
        };
        let tokens_max = wanted.min(self.context_tokens).max(prompt_tokens + 1);
        self.check_fits(tokens_max - 1)?;
        Ok(tokens_max)
    }

    pub(crate) fn check_score(&self, request: &ScoreRequest) -> Result<(), RefuseReason> {
        if let ScoreKind::Logprobs { top } = request.kind {
            check_range("logprobs", f32::from(top), 0.0, f32::from(TOP_LOGPROBS_MAX))?;
        }
        self.check_without_output(&request.tokens)
    }

    pub(crate) fn check_embed(&self, request: &EmbedRequest) -> Result<(), RefuseReason> {
        self.check_without_output(&request.tokens)
    }

    /// Checks the tokens of a request that generates nothing.
    fn check_without_output(&self, tokens: &[u32]) -> Result<(), RefuseReason> {
        let prompt_tokens = tokens.len();
        self.check_tokens("tokens", tokens)?;
        if prompt_tokens == 0 {
            return Err(RefuseReason::EmptyPrompt);
        }
        if prompt_tokens > self.context_tokens {
            return Err(RefuseReason::PromptTooLong { prompt_tokens, context_tokens: self.context_tokens });
        }
        self.check_fits(prompt_tokens)
    }

    /// Checks that the cache holds this many tokens of a sequence at once.
    fn check_fits(&self, tokens: usize) -> Result<(), RefuseReason> {
        let needed = self.blocks_of(tokens.div_ceil(self.block_tokens));
        if needed > self.blocks {
            let (block_tokens, blocks) = (self.block_tokens, self.blocks);
            return Err(RefuseReason::NeverFits { tokens, needed, block_tokens, blocks });
        }
        Ok(())
    }

    /// Most blocks that a sequence with this many table entries holds if it runs alone.
    fn blocks_of(&self, entries: usize) -> usize {
        self.groups
            .iter()
            .map(|group| group.blocks_held_max(entries, self.step_tokens, self.block_tokens))
            .sum()
    }

    /// Tokens that fit in the blocks of the longest sequence that can run alone, up to the context
    /// length.
    fn tokens_max(&self) -> usize {
        // A binary search: more tokens never need fewer blocks.
        let (mut fit, mut beyond) = (0, self.context_tokens.div_ceil(self.block_tokens) + 1);
        while beyond - fit > 1 {
            let entries = fit.midpoint(beyond);
            match self.blocks_of(entries) <= self.blocks {
                true => fit = entries,
                false => beyond = entries,
            }
        }
        fit * self.block_tokens
    }

    fn check_tokens(&self, field: &'static str, tokens: &[u32]) -> Result<(), RefuseReason> {
        match tokens.iter().position(|&token| token as usize >= self.vocab_size) {
            None => Ok(()),
            Some(index) => {
                Err(RefuseReason::TokenId { field, index, token: tokens[index], vocab_size: self.vocab_size })
            }
        }
    }
}

fn check_range(field: &'static str, value: f32, min: f32, max: f32) -> Result<(), SamplingParamError> {
    match value >= min && value <= max {
        true => Ok(()),
        false => Err(SamplingParamError::Range { field, value, min, max }),
    }
}
