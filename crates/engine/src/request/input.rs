// SPDX-License-Identifier: Apache-2.0

//! The input of the engine: requests in token ids, without text or wire types.
//!
//! The caller passes a [`Request`] to `Engine::submit`, which queues or refuses it at once.
//! `Engine::step` then returns outputs that carry the request's id. Every queued request ends with
//! exactly one `Finished` output, its last.

use crate::sample::params::SamplingParams;
use crate::sample::sampler_state::SamplerState;
use models::Pooling;
use std::fmt;
use std::time::Duration;

/// Chosen by the caller, unique among active requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {}", self.0)
    }
}

/// One choice of a client's request. For `n > 1` the caller submits `n` requests that differ in
/// `id` and `choice`.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    pub id: RequestId,
    /// The prompt. In a resumed stream, the output that the client already has follows it.
    pub prompt: Vec<u32>,
    /// Number of tokens at the end of `prompt` that are such output. They count as output for
    /// `max_tokens`, `min_tokens` and the penalties. A resumed request repeats all other fields
    /// unchanged and continues with the same tokens.
    pub prior_output: usize,
    pub sampling: SamplingParams,
    pub stop: StopConditions,
    /// Report the log-probability of each token and of this many most probable tokens (0 to
    /// [`TOP_LOGPROBS_MAX`]).
    pub logprobs: Option<u8>,
    /// Index among the choices of one prompt. It is part of the random number key.
    pub choice: u32,
    /// For a resumed request, the sampler state of the last token frame; else empty.
    pub sampler_state: SamplerState,
    /// On the clock of `Engine::step`. When it passes, the request ends with `Deadline`.
    pub deadline: Option<Duration>,
    /// Lower runs first. Requests of equal priority share fairly between tenants; those of one
    /// tenant run in order of arrival.
    pub priority: i32,
    /// Tenant for fair share. 0 stands for all requests without a tenant.
    pub tenant: u64,
    /// Only requests with an equal scope share cached blocks.
    pub scope: prefix::Scope,
}

impl Request {
    /// A request for up to `max_tokens` tokens after `prompt`, with defaults for everything else.
    pub fn new(id: RequestId, prompt: Vec<u32>, max_tokens: u32) -> Self {
        Self {
            id,
            prompt,
            prior_output: 0,
            sampling: SamplingParams::default(),
            stop: StopConditions { max_tokens: Some(max_tokens), ..StopConditions::default() },
            logprobs: None,
            choice: 0,
            sampler_state: SamplerState::default(),
            deadline: None,
            priority: 0,
            tenant: 0,
            scope: prefix::Scope::default(),
        }
    }
}

/// Tokens to be scored: for perplexity, evaluation or prompt logprobs.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoreRequest {
    pub id: RequestId,
    pub tokens: Vec<u32>,
    pub kind: ScoreKind,
    pub deadline: Option<Duration>,
    pub priority: i32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoreKind {
    /// All logits after every position: `tokens.len()` rows.
    Logits,
    /// For every position but the last: the log-probability of the next token, and the `top` most
    /// probable tokens.
    Logprobs { top: u8 },
}

/// A text whose hidden states become one vector.
#[derive(Clone, Debug, PartialEq)]
pub struct EmbedRequest {
    pub id: RequestId,
    pub tokens: Vec<u32>,
    pub pooling: Pooling,
    pub deadline: Option<Duration>,
    pub priority: i32,
    pub tenant: u64,
    pub scope: prefix::Scope,
}

/// A request for the most probable outputs of a prompt. Nothing is random.
#[derive(Clone, Debug, PartialEq)]
pub struct BeamRequest {
    pub id: RequestId,
    pub prompt: Vec<u32>,
    pub params: BeamParams,
    pub stop: StopConditions,
    /// As in [`Request::logprobs`]. Without it, the result names no alternatives.
    pub logprobs: Option<u8>,
    pub deadline: Option<Duration>,
    pub priority: i32,
    pub tenant: u64,
    pub scope: prefix::Scope,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BeamParams {
    /// Sequences that run at once, from 1 to [`BEAM_WIDTH_MAX`].
    pub width: usize,
    /// Outputs of the result, from 1 to `width`.
    pub choices: usize,
    /// Exponent of the length by which the sum of log probabilities is divided. 0: the sum itself.
    /// Above 0, longer outputs win; below, shorter ones.
    pub length_penalty: f32,
    /// The search ends as soon as `width` outputs have ended with a stop token.
    pub early_stopping: bool,
}

/// Most sequences of one beam search. Each takes a seat among those that run at once.
pub const BEAM_WIDTH_MAX: usize = 16;
/// `length_penalty` is within this distance of 0.
pub const LENGTH_PENALTY_MAX: f32 = 10.0;

/// When generation ends. The router handles stop strings: it cancels the request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopConditions {
    /// Most output tokens, prior output included. `None`: as many as the context and the KV budget
    /// hold.
    pub max_tokens: Option<u32>,
    /// Until the output has this many tokens, stop tokens cannot be sampled.
    pub min_tokens: u32,
    /// Each of these tokens ends the output. The caller adds the model's end-of-sequence tokens,
    /// unless the client ignores them: the engine has no vocabulary.
    pub stop_tokens: Vec<u32>,
}

/// Most alternatives reported per token, as in the OpenAI API.
pub const TOP_LOGPROBS_MAX: u8 = 20;
