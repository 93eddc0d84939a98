// SPDX-License-Identifier: Apache-2.0

//! The output of the engine: tokens, scores and the end of each request.

use crate::request::input::RequestId;
use crate::sample::constraint::ConstraintError;
use crate::sample::error::SampleError;
use crate::sample::sampler_state::SamplerState;

#[derive(Clone, Debug, PartialEq)]
pub enum EngineOutput {
    /// The scheduler admitted the request for the first time. It holds KV blocks from now on.
    Admitted {
        id: RequestId,
        cached_tokens: usize,
    },
    Token(TokenOutput),
    /// `ScoreKind::Logits`: the logits after `tokens[position]`, in order of position.
    Logits {
        id: RequestId,
        position: usize,
        logits: Vec<f32>,
    },
    /// `ScoreKind::Logprobs`: the score of `tokens[position]`, given all tokens before it.
    /// `position` starts at 1.
    Scored {
        id: RequestId,
        position: usize,
        token: u32,
        logprob: f32,
        top: Vec<(u32, f32)>,
    },
    /// The pooled vector of an [`EmbedRequest`](crate::EmbedRequest), as the model gives it: not
    /// normalized.
    Embedding {
        id: RequestId,
        values: Vec<f32>,
    },
    /// How far a [`BeamRequest`](crate::BeamRequest) is: tokens of each running sequence, and of
    /// all sequences so far, also of those that it dropped. After the first token, now and then,
    /// and before its outputs.
    BeamProgress {
        id: RequestId,
        length: usize,
        computed_tokens: u64,
    },
    /// The outputs of a [`BeamRequest`](crate::BeamRequest), the highest score first.
    Beams {
        id: RequestId,
        beams: Vec<Beam>,
    },
    Finished {
        id: RequestId,
        reason: FinishReason,
        usage: TokenUsage,
    },
}

/// One output of a beam search.
#[derive(Clone, Debug, PartialEq)]
pub struct Beam {
    pub tokens: Vec<BeamToken>,
    /// The stop token that ended the output. `None`: its length.
    pub stop_token: Option<u32>,
    /// Sum of log probabilities, that of the stop token included, divided by
    /// `tokens.len() ^ length_penalty`.
    pub score: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct BeamToken {
    pub token: u32,
    /// As in [`TokenOutput`].
    pub logprob: f32,
    pub top: Vec<(u32, f32)>,
}

/// One output token. A stop token is not reported as output: [`FinishReason::Stop`] names it.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenOutput {
    pub id: RequestId,
    pub token: u32,
    /// Absolute position: the first output token of a request without prior output has position
    /// `prompt.len()`.
    pub position: usize,
    /// Natural log of the softmax of the raw logits, before bias, penalties, filters and
    /// temperature.
    pub logprob: Option<f32>,
    /// The most probable tokens of the same distribution in descending order. Among equals the
    /// lower id comes first.
    pub top: Vec<(u32, f32)>,
    /// A request that resumes after this token passes it as
    /// [`Request::sampler_state`](crate::Request::sampler_state).
    pub sampler_state: SamplerState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The sampler drew this stop token.
    Stop(u32),
    /// The request's constraint allows no further token: the output is complete.
    Complete,
    /// The output reached `max_tokens` or the context length. If `max_tokens` is open, the KV
    /// budget is a limit too.
    Length,
    /// All positions of a [`ScoreRequest`](crate::ScoreRequest) are done.
    Scored,
    /// The vector of an [`EmbedRequest`](crate::EmbedRequest) is complete.
    Embedded,
    /// The outputs of a [`BeamRequest`](crate::BeamRequest) are complete.
    Searched,
    Cancelled,
    Deadline,
    /// The step that computed this request failed. `Engine::step` returned the cause.
    StepFailed,
    /// No token can be sampled from the logits of this request.
    BadLogits(SampleError),
    /// The request's constraint failed to give a token mask.
    Constraint(ConstraintError),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenUsage {
    /// Without prior output.
    pub prompt_tokens: usize,
    /// With prior output, without the stop token.
    pub output_tokens: usize,
    /// Prompt tokens, prior output included, that the first admission found in the prefix cache.
    pub cached_tokens: usize,
}
