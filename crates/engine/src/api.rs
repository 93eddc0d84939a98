//! What goes into the engine and what comes out of it: token ids in, token ids out, no text and no wire types.
//!
//! The caller feeds [`Request`]s through `Engine::submit`, which queues or refuses at once, and gets [`Output`]s from
//! `Engine::step`, each with the request's id. Every queued request ends with exactly one `Finished`, its last output.

use crate::draft::DraftStats;
use crate::{ConstraintError, SampleError, SamplingParams};
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

/// What a resumed sampler must know beside tokens, seed and position; at most 32 bytes, carried by the router unread.
/// Random numbers are keyed by position and need none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SamplerState {
    bytes: [u8; SamplerState::BYTES_MAX],
    len: u8,
}

impl SamplerState {
    pub const BYTES_MAX: usize = 32;

    /// `None` when longer than [`Self::BYTES_MAX`].
    pub fn from_bytes(state: &[u8]) -> Option<Self> {
        let mut bytes = [0; Self::BYTES_MAX];
        bytes.get_mut(..state.len())?.copy_from_slice(state);
        Some(Self { bytes, len: state.len() as u8 })
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Output {
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
        usage: Usage,
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
pub struct Usage {
    /// Without prior output.
    pub prompt_tokens: usize,
    /// With prior output, without the stop token.
    pub output_tokens: usize,
    /// Prompt tokens (prior output among them) found in the prefix cache when first admitted.
    pub cached_tokens: usize,
}

/// What one call of `Engine::step` did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepReport {
    /// Rows of the batch: tokens whose keys and values were computed. 0: there was nothing to do.
    pub rows: usize,
    /// Rows that continued an output by one token.
    pub decode_rows: usize,
    /// Rows of drafted tokens.
    pub draft_rows: usize,
    /// Sequences in the batch.
    pub sequences: usize,
    pub admitted: usize,
    pub preempted: usize,
    pub finished: usize,
    pub tokens_sampled: usize,
}

/// How the cache's memory is used, now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvUse {
    /// Memory behind the cache.
    pub bytes: u64,
    /// Token places in the tables of running sequences for the first group of layers, a shared block counted for each.
    pub places: usize,
    /// Those of them that hold nothing yet: fragmentation.
    pub unfilled: usize,
}

/// Gauges of now and counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    pub running: usize,
    pub waiting: usize,
    /// Usable blocks, without the trash block.
    pub kv_blocks: usize,
    pub kv_block_tokens: usize,
    pub kv_block_bytes: usize,
    /// Groups of layers: a token takes a place in a block of each.
    pub kv_groups: usize,
    /// Blocks that a live request holds.
    pub kv_blocks_used: usize,
    /// Blocks that may be taken at once; cached ones among them.
    pub kv_blocks_free: usize,
    /// Free blocks that still hold a findable prefix.
    pub kv_blocks_cached: usize,
    pub steps: u64,
    /// Rows that were not decodes: prompts, and what a preemption made necessary again.
    pub prompt_tokens_computed: u64,
    pub prompt_tokens_cached: u64,
    /// Reported ones: without stop tokens.
    pub output_tokens: u64,
    pub preemptions: u64,
    /// Cached blocks that were taken for something else.
    pub evictions: u64,
    /// Number of the next event of the cache: of so many less one has been told ([`crate::events`]).
    pub kv_events: u64,
    /// Requests that went on from another's computed prompt.
    pub forks: u64,
    /// Rows that were there before their constraint could say what is allowed: the request waited, nobody else.
    pub late_rows: u64,
    pub drafts: DraftStats,
    pub finished: u64,
    pub refused: u64,
}
