//! What goes into the engine and what comes out of it: token ids in, token ids out, no text and no wire types.
//!
//! The caller feeds [`Request`]s through `Engine::submit`, which queues or refuses at once, and gets [`EngineOutput`]s from
//! `Engine::step`, each with the request's id. Every queued request ends with exactly one `Finished`, its last output.

use crate::sample::params::SamplingParams;
use crate::sample::sampler_state::SamplerState;
use std::fmt;
use std::time::Duration;

/// Chosen by the caller, unique among its live requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {}", self.0)
    }
}

/// One sequence to continue. For `n > 1` choices the caller submits `n` requests that differ in `id` and `choice`.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    pub id: RequestId,
    /// Prompt and, when a stream is resumed, the output that the client already has, in order.
    pub prompt: Vec<u32>,
    /// How many of the last tokens of `prompt` are such output. They count in `max_tokens`, `min_tokens` and the
    /// penalties as output; so a resumed request repeats its other fields unchanged and goes on with the same tokens.
    pub prior_output: usize,
    pub sampling: SamplingParams,
    pub stop: StopConditions,
    /// Report each token's log-probability and that many of the most probable tokens (0 to [`TOP_LOGPROBS_MAX`]).
    pub logprobs: Option<u8>,
    /// Index among the choices of one prompt: part of the key of random numbers.
    pub choice: u32,
    /// The sampler state of the last token frame when resumed, else empty.
    pub sampler_state: SamplerState,
    /// On the clock of `now`: when it passes, the request ends with `Deadline`.
    pub deadline: Option<Duration>,
    /// Lower runs first; equal ones fairly by tenant, those of one tenant in order of arrival (`queue`).
    pub priority: i32,
    /// Whose request it is; 0 stands for all that do not say.
    pub tenant: u64,
    /// Who may share cached prompt blocks with this request.
    pub scope: prefix::Scope,
}

impl Request {
    /// Up to `max_tokens` tokens behind `prompt`, and nothing beyond that asked for.
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

/// Tokens whose successors' scores are wanted: perplexity, evaluation, prompt logprobs.
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
    /// The whole logits row after every position: `tokens.len()` rows.
    Logits,
    /// For every position but the last: log-probability of the token that follows, and the `top` most probable.
    Logprobs { top: u8 },
}

/// When generation ends. Stop strings are the router's business: it cancels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopConditions {
    /// Most output tokens, prior output included. `None`: as many as context and KV budget hold.
    pub max_tokens: Option<u32>,
    /// Until so many output tokens exist, stop tokens cannot be drawn.
    pub min_tokens: u32,
    /// Each of these ends the output. The model's own end-of-sequence tokens are among them, unless the client wants
    /// them ignored: the engine has no vocabulary.
    pub stop_tokens: Vec<u32>,
}

/// Most alternatives reported per token, as in the OpenAI API.
pub const TOP_LOGPROBS_MAX: u8 = 20;
