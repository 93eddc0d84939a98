//! What comes out of the engine.

use crate::request::input::RequestId;
use crate::sample::constraint::ConstraintError;
use crate::sample::error::SampleError;
use crate::sample::sampler_state::SamplerState;

#[derive(Clone, Debug, PartialEq)]
pub enum EngineOutput {
    /// The request left the queue for the first time and holds KV blocks.
    Admitted {
        id: RequestId,
        cached_tokens: usize,
    },
    Token(TokenOutput),
    /// `ScoreKind::Logits`: the row after `tokens[position]`. Rows come in order of position.
    Logits {
        id: RequestId,
        position: usize,
        logits: Vec<f32>,
    },
    /// `ScoreKind::Logprobs`: of `tokens[position]`, given all before it; `position` counts from 1.
    Scored {
        id: RequestId,
        position: usize,
        token: u32,
        logprob: f32,
        top: Vec<(u32, f32)>,
    },
    Finished {
        id: RequestId,
        reason: FinishReason,
        usage: TokenUsage,
    },
}

/// One token of output. The token that ended the output is not among them: [`FinishReason::Stop`] names it.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenOutput {
    pub id: RequestId,
    pub token: u32,
    /// Absolute: the first output token of a request without prior output has position `prompt.len()`.
    pub position: usize,
    /// Natural logarithm of the softmax of the raw logits, before bias, penalties, truncation and temperature.
    pub logprob: Option<f32>,
    /// The most probable tokens of the same distribution, descending, lower id first among equals.
    pub top: Vec<(u32, f32)>,
    /// To be given back in [`Request::sampler_state`] by whoever resumes after this token.
    pub sampler_state: SamplerState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// This stop token was drawn.
    Stop(u32),
    /// The request's constraint allows nothing more: the output is whole.
    Complete,
    /// `max_tokens`, the context length or, when `max_tokens` was left open, the KV budget is reached.
    Length,
    /// All positions of a [`ScoreRequest`] are done.
    Scored,
    Cancelled,
    Deadline,
    /// The step that computed this request failed; `Engine::step` returned the cause.
    StepFailed,
    /// The step gave this request logits that no token can be drawn from.
    BadLogits(SampleError),
    /// The request's constraint could not say what may be drawn.
    Constraint(ConstraintError),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenUsage {
    /// Without prior output.
    pub prompt_tokens: usize,
    /// With prior output, without the stop token.
    pub output_tokens: usize,
    /// Prompt tokens (prior output among them) found in the prefix cache when first admitted.
    pub cached_tokens: usize,
}
