//! Between messages of `ballast.worker.v1` and the engine's types. Ranges are the engine's to check.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use engine::kv::block_key::Name;
use engine::kv::events::{Event, NOTHING_KNOWN, Update};
use engine::{
    Dry, DryBreakers, FinishReason, Mirostat, MirostatVersion, Output, RefuseReason, Request, RequestId,
    SamplerState, SamplingParams, ScoreKind, ScoreRequest, StopConditions, TOP_LOGPROBS_MAX, TokenOutput,
    Usage,
};
use grammar::GrammarSource;
use proto::v1::grammar::Kind;
use proto::v1::{self as public};
use proto::worker::v1::{self as wire, generate_frame, kv_event, score_frame};
use tonic::Status;
use tonic::metadata::MetadataValue;

use crate::engine_loop::SubmitError;
use crate::grammar_compiler::GrammarError;
use crate::token_channel::StreamAbort;

/// A frame of logits.
const FRAME_BYTES_MAX: usize = 1 << 20;
/// A frame of cache events, each some 45 bytes.
const FRAME_EVENTS_MAX: usize = 8192;

/// A field that no request of the engine can be made of.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RequestFieldError {
    #[error("prompt_tokens is {prompt_tokens}, but there are {tokens} tokens")]
    PromptTokens { prompt_tokens: u32, tokens: usize },
    #[error("top_logprobs is {asked}, allowed are 0 to {TOP_LOGPROBS_MAX}")]
    TopLogprobs { asked: u32 },
    #[error("grammar is empty")]
    EmptyGrammar,
    #[error("mirostat is {asked}, allowed are 0 to 2")]
    Mirostat { asked: u32 },
    #[error("sampler_state has {bytes} bytes, at most {} are allowed", SamplerState::BYTES_MAX)]
    SamplerState { bytes: usize },
}

/// `now` is the engine's clock.
pub(crate) fn request_from_wire(
    wire: wire::GenerateRequest,
    id: RequestId,
    now: Duration,
) -> Result<Request, RequestFieldError> {
    let tokens = wire.tokens.len();
    let prior_output = tokens
        .checked_sub(wire.prompt_tokens as usize)
        .ok_or(RequestFieldError::PromptTokens { prompt_tokens: wire.prompt_tokens, tokens })?;
    let sampler_state = SamplerState::from_bytes(&wire.sampler_state)
        .ok_or(RequestFieldError::SamplerState { bytes: wire.sampler_state.len() })?;
    Ok(Request {
        id,
        prompt: wire.tokens,
        prior_output,
        sampling: sampling(wire.sampling.unwrap_or_default(), wire.dry_breakers.unwrap_or_default())?,
        stop: StopConditions {
            max_tokens: Some(wire.max_tokens).filter(|&max| max > 0),
            min_tokens: wire.min_tokens,
            stop_tokens: wire.stop_tokens,
        },
        logprobs: wire.top_logprobs.map(top_logprobs).transpose()?,
        choice: wire.choice,
        sampler_state,
        deadline: deadline(wire.deadline_ms, now),
        priority: wire.priority,
        tenant: wire.tenant,
        scope: prefix::Scope { salt: wire.cache_salt.into_bytes(), extra: Vec::new() },
    })
}

pub(crate) fn score_request_from_wire(
    wire: wire::ScoreRequest,
    id: RequestId,
    now: Duration,
) -> Result<ScoreRequest, RequestFieldError> {
    let kind = match wire.top_logprobs {
        None => ScoreKind::Logits,
        Some(top) => ScoreKind::Logprobs { top: top_logprobs(top)? },
    };
    Ok(ScoreRequest { id, tokens: wire.tokens, kind, deadline: deadline(wire.deadline_ms, now), priority: 0 })
}

fn top_logprobs(asked: u32) -> Result<u8, RequestFieldError> {
    u8::try_from(asked).map_err(|_| RequestFieldError::TopLogprobs { asked })
}

fn deadline(deadline_ms: u64, now: Duration) -> Option<Duration> {
    (deadline_ms > 0).then(|| now.saturating_add(Duration::from_millis(deadline_ms)))
}

fn sampling(
    wire: public::Sampling,
    breakers: wire::DryBreakers,
) -> Result<SamplingParams, RequestFieldError> {
    let neutral = SamplingParams::default();
    let version = match wire.mirostat.unwrap_or(0) {
        0 => None,
        1 => Some(MirostatVersion::One),
        2 => Some(MirostatVersion::Two),
        asked => return Err(RequestFieldError::Mirostat { asked }),
    };
    let mut logit_bias: Vec<(u32, f32)> = wire.logit_bias.into_iter().collect();
    // A map has no order of its own.
    logit_bias.sort_by_key(|&(token, _)| token);
    Ok(SamplingParams {
        temperature: wire.temperature.unwrap_or(neutral.temperature),
        dynatemp_range: wire.dynatemp_range.unwrap_or(neutral.dynatemp_range),
        dynatemp_exponent: wire.dynatemp_exponent.unwrap_or(neutral.dynatemp_exponent),
        top_n_sigma: wire.top_n_sigma.unwrap_or(neutral.top_n_sigma),
        top_k: wire.top_k.unwrap_or(neutral.top_k),
        typical_p: wire.typical_p.unwrap_or(neutral.typical_p),
        top_p: wire.top_p.unwrap_or(neutral.top_p),
        min_p: wire.min_p.unwrap_or(neutral.min_p),
        xtc_probability: wire.xtc_probability.unwrap_or(neutral.xtc_probability),
        xtc_threshold: wire.xtc_threshold.unwrap_or(neutral.xtc_threshold),
        mirostat: version.map(|version| Mirostat {
            version,
            tau: wire.mirostat_tau.unwrap_or(MIROSTAT_TAU),
            eta: wire.mirostat_eta.unwrap_or(MIROSTAT_ETA),
        }),
        repetition_penalty: wire.repetition_penalty.unwrap_or(neutral.repetition_penalty),
        presence_penalty: wire.presence_penalty.unwrap_or(neutral.presence_penalty),
        frequency_penalty: wire.frequency_penalty.unwrap_or(neutral.frequency_penalty),
        dry: wire.dry_multiplier.filter(|&multiplier| multiplier != 0.0).map(|multiplier| Dry {
            multiplier,
            base: wire.dry_base.unwrap_or(DRY_BASE),
            allowed_length: wire.dry_allowed_length.unwrap_or(DRY_ALLOWED_LENGTH),
            last_n: wire.dry_penalty_last_n,
            breakers: dry_breakers(breakers),
        }),
        logit_bias,
        seed: wire.seed.unwrap_or(neutral.seed),
    })
}

/// As `ballast.proto` says; llama.cpp's.
const MIROSTAT_TAU: f32 = 5.0;
const MIROSTAT_ETA: f32 = 0.1;
const DRY_BASE: f32 = 1.75;
const DRY_ALLOWED_LENGTH: u32 = 2;

fn dry_breakers(wire: wire::DryBreakers) -> DryBreakers {
    let singles = wire.tokens.into_iter().map(|token| vec![token]);
    DryBreakers::new(singles.chain(wire.sequences.into_iter().map(|sequence| sequence.ids)))
}

pub(crate) fn admitted(ahead: usize) -> wire::GenerateFrame {
    let admitted = wire::Admitted { requests_ahead: u32::try_from(ahead).unwrap_or(u32::MAX) };
    wire::GenerateFrame { frame: Some(generate_frame::Frame::Admitted(admitted)) }
}

/// `None` for outputs that the router has no use for.
pub(crate) fn generate_frame(output: Output) -> Option<wire::GenerateFrame> {
    let frame = match output {
        Output::Token(token) => generate_frame::Frame::Tokens(tokens(token)),
        Output::Finished { reason, usage, .. } => generate_frame::Frame::Finished(finished(reason, usage)),
        Output::Admitted { .. } | Output::Logits { .. } | Output::Scored { .. } => return None,
    };
    Some(wire::GenerateFrame { frame: Some(frame) })
}

fn tokens(token: TokenOutput) -> wire::Tokens {
    let logprob = token.logprob.map(|logprob| token_logprob(logprob, token.top));
    wire::Tokens {
        ids: vec![token.token],
        logprobs: logprob.into_iter().collect(),
        sampler_state: Bytes::copy_from_slice(token.sampler_state.as_bytes()),
    }
}

fn token_logprob(logprob: f32, top: Vec<(u32, f32)>) -> public::TokenLogprob {
    let (top_tokens, top_logprobs) = top.into_iter().unzip();
    public::TokenLogprob { logprob, top_tokens, top_logprobs }
}

fn finished(reason: FinishReason, usage: Usage) -> wire::Finished {
    let mut finished = wire::Finished { cached_tokens: usage.cached_tokens as u32, ..Default::default() };
    match reason {
        FinishReason::Stop(token) => {
            finished.set_reason(public::FinishReason::Stop);
            finished.stop_token = Some(token);
        }
        FinishReason::Complete => finished.set_reason(public::FinishReason::Stop),
        _ => finished.set_reason(public::FinishReason::Length),
    }
    finished
}

/// Gathers the outputs of a score into frames of at most 1 MiB.
#[derive(Default)]
pub(crate) struct ScoreFrames {
    logits: BytesMut,
    scored: Vec<public::TokenLogprob>,
}

impl ScoreFrames {
    pub(crate) fn push(&mut self, output: Output) {
        match output {
            Output::Logits { logits, .. } => {
                self.logits.reserve(logits.len() * size_of::<f32>());
                for value in logits {
                    self.logits.extend_from_slice(&value.to_le_bytes());
                }
            }
            Output::Scored { logprob, top, .. } => self.scored.push(token_logprob(logprob, top)),
            Output::Admitted { .. } | Output::Token(_) | Output::Finished { .. } => {}
        }
    }

    pub(crate) fn is_full(&self) -> bool {
        // Up to 20 alternatives take some 200 bytes.
        self.logits.len() >= FRAME_BYTES_MAX || self.scored.len() >= FRAME_BYTES_MAX / 256
    }

    /// The next frame of what is there, if anything is.
    pub(crate) fn take(&mut self) -> Option<wire::ScoreFrame> {
        let frame = if !self.logits.is_empty() {
            let bytes = self.logits.len().min(FRAME_BYTES_MAX);
            score_frame::Frame::Logits(self.logits.split_to(bytes).freeze())
        } else if !self.scored.is_empty() {
            let logprobs = std::mem::take(&mut self.scored);
            score_frame::Frame::Scored(wire::ScoredTokens { logprobs })
        } else {
            return None;
        };
        Some(wire::ScoreFrame { frame: Some(frame) })
    }
}

/// Where a request may be refused for its grammar, this says so: the grammar has other names on other surfaces.
const FIELD_KEY: &str = "ballast-field";
/// Seconds until a refused request would find room.
const RETRY_AFTER_KEY: &str = "retry-after";
/// Whose bound a full queue's is, where it is not everybody's.
const BOUND_KEY: &str = "ballast-bound";
/// What waits for a step or a compiler moves within this time, and a worker that stops is replaced within it.
const DEFAULT_RETRY_AFTER: Duration = Duration::from_secs(1);

/// A refusal that passes.
pub(crate) fn retryable(mut status: Status, after: Duration) -> Status {
    status.metadata_mut().insert(RETRY_AFTER_KEY, MetadataValue::from(after.as_secs()));
    status
}

/// Not ready, or not any more.
pub(crate) fn unavailable(message: impl Into<String>) -> Status {
    retryable(Status::unavailable(message), DEFAULT_RETRY_AFTER)
}

pub(crate) fn grammar_source(wire: public::Grammar) -> Result<GrammarSource, RequestFieldError> {
    let lenient = wire.lenient;
    Ok(match wire.kind.ok_or(RequestFieldError::EmptyGrammar)? {
        Kind::JsonSchema(schema) => GrammarSource::JsonSchema { schema, lenient },
        Kind::JsonObject(public::JsonObject {}) => {
            GrammarSource::JsonSchema { schema: r#"{"type": "object"}"#.to_owned(), lenient }
        }
        Kind::Regex(regex) => GrammarSource::Regex(regex),
        Kind::Lark(lark) => GrammarSource::Lark(lark),
        Kind::Gbnf(gbnf) => GrammarSource::Gbnf(gbnf),
        Kind::Choice(choice) => GrammarSource::Choice(choice.values),
    })
}

impl From<GrammarError> for Status {
    fn from(error: GrammarError) -> Self {
        let message = service::exit::one_line(&error);
        match error {
            GrammarError::Refused(_) | GrammarError::PriorOutput(_) => {
                let mut status = Status::invalid_argument(message);
                status.metadata_mut().insert(FIELD_KEY, MetadataValue::from_static("grammar"));
                status
            }
            GrammarError::QueueFull | GrammarError::QueueTimeout => {
                retryable(Status::resource_exhausted(message), DEFAULT_RETRY_AFTER)
            }
            GrammarError::Stopped => unavailable(message),
            // The last two would cost the next worker a thread as well: they do not pass.
            GrammarError::Vocabulary { .. }
            | GrammarError::Thread(_)
            | GrammarError::TimedOut
            | GrammarError::Panicked => Status::internal(message),
        }
    }
}

impl From<RequestFieldError> for Status {
    fn from(error: RequestFieldError) -> Self {
        Status::invalid_argument(error.to_string())
    }
}

/// An update of `log` in frames. Only behind the last one can another call go on: half a snapshot is none.
pub(crate) fn kv_event_frames(log: u64, update: Update) -> impl Iterator<Item = wire::KvEventsFrame> {
    let Update { events, next } = update;
    (0..events.len()).step_by(FRAME_EVENTS_MAX).map(move |at| {
        let end = events.len().min(at + FRAME_EVENTS_MAX);
        let next = if end == events.len() { next } else { NOTHING_KNOWN };
        wire::KvEventsFrame {
            log_id: log,
            next_event: next,
            events: events[at..end].iter().map(kv_event).collect(),
        }
    })
}

fn kv_event(event: &Event) -> wire::KvEvent {
    let block = |name: &Name| wire::KvBlock {
        hash: Bytes::copy_from_slice(name.hash.as_bytes()),
        group: u32::from(name.group),
    };
    let event = match event {
        Event::Stored(name) => kv_event::Event::Stored(block(name)),
        Event::Removed(name) => kv_event::Event::Removed(block(name)),
        Event::Cleared => kv_event::Event::Cleared(wire::AllBlocksCleared {}),
    };
    wire::KvEvent { event: Some(event) }
}

impl From<SubmitError> for Status {
    fn from(error: SubmitError) -> Self {
        let message = error.to_string();
        match error {
            SubmitError::Refused(RefuseReason::QueueFull { retry_after, .. }) => {
                retryable(Status::resource_exhausted(message), retry_after)
            }
            SubmitError::Refused(RefuseReason::TenantQueueFull { retry_after, .. }) => {
                let mut status = retryable(Status::resource_exhausted(message), retry_after);
                status.metadata_mut().insert(BOUND_KEY, MetadataValue::from_static("tenant"));
                status
            }
            SubmitError::CommandQueueFull | SubmitError::TooManySubscribers => {
                retryable(Status::resource_exhausted(message), DEFAULT_RETRY_AFTER)
            }
            SubmitError::Refused(RefuseReason::Draining) | SubmitError::Stopped => unavailable(message),
            SubmitError::Refused(RefuseReason::DuplicateId(_)) => Status::internal(message),
            SubmitError::Refused(_) => Status::invalid_argument(message),
        }
    }
}

impl From<StreamAbort> for Status {
    fn from(cut: StreamAbort) -> Self {
        let message = cut.to_string();
        match cut {
            StreamAbort::Deadline => Status::deadline_exceeded(message),
            StreamAbort::Drained | StreamAbort::DeviceLost { .. } => Status::unavailable(message),
            StreamAbort::TooSlow | StreamAbort::ChannelFull => Status::aborted(message),
            StreamAbort::StepFailed { .. } | StreamAbort::BadLogits(_) | StreamAbort::Grammar(_) => {
                Status::internal(message)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id() -> RequestId {
        RequestId(1)
    }

    #[test]
    fn prior_output_is_what_follows_the_prompt() {
        let wire = wire::GenerateRequest { tokens: vec![1, 2, 3, 4], prompt_tokens: 3, ..Default::default() };
        assert_eq!(request_from_wire(wire.clone(), id(), Duration::ZERO).unwrap().prior_output, 1);
        let wrong = wire::GenerateRequest { prompt_tokens: 5, ..wire };
        assert_eq!(
            request_from_wire(wrong, id(), Duration::ZERO),
            Err(RequestFieldError::PromptTokens { prompt_tokens: 5, tokens: 4 })
        );
    }

    #[test]
    fn what_the_engine_cannot_hold_is_refused() {
        let wire = wire::GenerateRequest { tokens: vec![1], prompt_tokens: 1, ..Default::default() };
        let top = wire::GenerateRequest { top_logprobs: Some(256), ..wire.clone() };
        assert_eq!(
            request_from_wire(top, id(), Duration::ZERO),
            Err(RequestFieldError::TopLogprobs { asked: 256 })
        );
        let state = wire::GenerateRequest { sampler_state: vec![0; 33].into(), ..wire };
        assert_eq!(
            request_from_wire(state, id(), Duration::ZERO),
            Err(RequestFieldError::SamplerState { bytes: 33 })
        );
    }

    #[test]
    fn a_deadline_counts_from_now_and_zero_is_none() {
        let wire = wire::GenerateRequest { tokens: vec![1], prompt_tokens: 1, ..Default::default() };
        let now = Duration::from_secs(5);
        assert_eq!(request_from_wire(wire.clone(), id(), now).unwrap().deadline, None);
        let wire = wire::GenerateRequest { deadline_ms: 20, ..wire };
        assert_eq!(request_from_wire(wire, id(), now).unwrap().deadline, Some(Duration::from_millis(5020)));
    }

    #[test]
    fn tenant_priority_and_salt_reach_the_engine() {
        let wire = wire::GenerateRequest {
            tokens: vec![1],
            prompt_tokens: 1,
            tenant: 7,
            priority: -2,
            cache_salt: "secret".to_owned(),
            ..Default::default()
        };
        let request = request_from_wire(wire, id(), Duration::ZERO).unwrap();
        assert_eq!((request.tenant, request.priority, &request.scope.salt[..]), (7, -2, &b"secret"[..]));
    }

    #[test]
    fn every_refusal_that_passes_says_when_to_come_again_and_no_other_does() {
        use tonic::Code::{Internal, InvalidArgument, ResourceExhausted, Unavailable};
        let retry_after = Duration::from_secs(7);
        let full = RefuseReason::QueueFull { waiting: 3, max: 3, retry_after };
        let own = RefuseReason::TenantQueueFull { waiting: 3, max: 3, retry_after };
        let refused = |why| Status::from(SubmitError::Refused(why));
        for (status, code, seconds, bound) in [
            (refused(full), ResourceExhausted, Some("7"), None),
            (refused(own), ResourceExhausted, Some("7"), Some("tenant")),
            (SubmitError::CommandQueueFull.into(), ResourceExhausted, Some("1"), None),
            (SubmitError::TooManySubscribers.into(), ResourceExhausted, Some("1"), None),
            (refused(RefuseReason::Draining), Unavailable, Some("1"), None),
            (SubmitError::Stopped.into(), Unavailable, Some("1"), None),
            (GrammarError::QueueFull.into(), ResourceExhausted, Some("1"), None),
            (GrammarError::QueueTimeout.into(), ResourceExhausted, Some("1"), None),
            (GrammarError::Stopped.into(), Unavailable, Some("1"), None),
            (GrammarError::TimedOut.into(), Internal, None, None),
            (GrammarError::Panicked.into(), Internal, None, None),
            (refused(RefuseReason::EmptyPrompt), InvalidArgument, None, None),
            (RequestFieldError::EmptyGrammar.into(), InvalidArgument, None, None),
        ] {
            let said = |key: &str| status.metadata().get(key).map(|value| value.to_str().unwrap());
            assert_eq!(
                (status.code(), said(RETRY_AFTER_KEY), said(BOUND_KEY)),
                (code, seconds, bound),
                "{status}"
            );
        }
    }

    #[test]
    fn nobody_goes_on_from_half_a_snapshot() {
        let name = |number: usize| Name { hash: [number as u8; 32].into(), group: 3 };
        let stored = (0..2 * FRAME_EVENTS_MAX).map(|number| Event::Stored(name(number)));
        let events: Vec<Event> = std::iter::once(Event::Cleared).chain(stored).collect();
        let frames: Vec<_> = kv_event_frames(7, Update { events: events.clone(), next: 99_999 }).collect();
        let heads: Vec<_> =
            frames.iter().map(|frame| (frame.log_id, frame.next_event, frame.events.len())).collect();
        assert_eq!(heads, [(7, 0, FRAME_EVENTS_MAX), (7, 0, FRAME_EVENTS_MAX), (7, 99_999, 1)]);
        let sent = frames.iter().flat_map(|frame| &frame.events);
        assert!(sent.eq(&events.iter().map(kv_event).collect::<Vec<_>>()));
        let Some(kv_event::Event::Stored(block)) = &frames[0].events[2].event else { panic!("{frames:?}") };
        assert_eq!((&block.hash[..], block.group), (&[1; 32][..], 3));
    }

    #[test]
    fn logits_come_in_order_in_frames_of_a_mebibyte() {
        let mut frames = ScoreFrames::default();
        let rows = [vec![1.5f32; 200_000], vec![-2.0; 200_000], vec![3.0; 5]];
        let mut bytes = Vec::new();
        for (position, row) in rows.iter().enumerate() {
            frames.push(Output::Logits { id: id(), position, logits: row.clone() });
        }
        while let Some(frame) = frames.take() {
            let Some(score_frame::Frame::Logits(piece)) = frame.frame else { panic!("logits") };
            assert!(piece.len() <= FRAME_BYTES_MAX);
            bytes.extend_from_slice(&piece);
        }
        let values: Vec<f32> =
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        assert_eq!(values, rows.concat());
    }
}
