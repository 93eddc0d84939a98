// SPDX-License-Identifier: Apache-2.0

//! Converts between the router's own values and the messages of `ballast.worker.v1`.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use proto::v1 as public;
use proto::worker::v1::{self as wire, generate_frame};
use tonic::{Code, Request, Status};
use traces::Span;

use crate::failover::{ChoiceError, ChoiceProgress, StreamLoss};
use crate::intake::RequestBytes;
use crate::params::{CheckedBeams, CheckedParams, CheckedSampling};
use crate::quarantine::ContentKey;
use crate::request_trace::{LoggedRequest, RequestTrace};
use crate::routing::{ModelKey, PromptPrefix, SessionKey, StreamDemand};

/// A choice of a prompt: everything that a worker needs to know except the output so far.
#[derive(Clone, Debug)]
pub(crate) struct ChoiceCall {
    pub(crate) trace: RequestTrace,
    pub(crate) model: ModelKey,
    pub(crate) prompt: Arc<[u32]>,
    /// Of the prompt, under the request's cache salt.
    pub(crate) prefix: PromptPrefix,
    pub(crate) session: Option<SessionKey>,
    pub(crate) params: Arc<CheckedParams>,
    /// The client's stop tokens and, unless `ignore_eos` is set, the model's end-of-generation
    /// tokens.
    pub(crate) stop_tokens: Arc<[u32]>,
    /// The DRY sequence breakers as token sequences of the model.
    pub(crate) dry_breakers: Arc<[Vec<u32>]>,
    pub(crate) choice: u32,
    /// The tenant's number for workers.
    pub(crate) tenant: u64,
    /// Equal for all choices of a prompt.
    pub(crate) content: ContentKey,
    /// Counts prompt and grammar in the budget.
    pub(crate) _bytes: Option<RequestBytes>,
}

impl ChoiceCall {
    pub(crate) fn logged(&self) -> LoggedRequest<'_> {
        self.trace.logged(&self.model.name)
    }

    /// What the choice needs from a worker after `output_tokens`.
    pub(crate) fn demand(&self, output_tokens: usize) -> StreamDemand<'_> {
        let output = output_tokens as u64;
        StreamDemand {
            model: &self.model,
            input_tokens: self.prompt.len() as u64 + output,
            output_tokens_max: u64::from(self.params.max_tokens).saturating_sub(output)
                * u64::from(self.params.streams_per_call()),
            prefix: &self.prefix,
            session: self.session,
            spread_by_deaths: None,
        }
    }

    pub(crate) fn to_wire(
        &self,
        progress: &ChoiceProgress,
        time_left: Option<Duration>,
    ) -> wire::GenerateRequest {
        let mut tokens = Vec::with_capacity(self.prompt.len() + progress.output().len());
        tokens.extend_from_slice(&self.prompt);
        tokens.extend_from_slice(progress.output());
        wire::GenerateRequest {
            request_id: self.trace.id().to_string(),
            fingerprint: Bytes::copy_from_slice(&self.model.fingerprint.0),
            tokens,
            prompt_tokens: self.prompt.len() as u32,
            max_tokens: if self.params.is_max_tokens_given { self.params.max_tokens } else { 0 },
            min_tokens: self.params.min_tokens,
            sampling: Some(sampling(&self.params.sampling)),
            choice: self.choice,
            stop_tokens: self.stop_tokens.to_vec(),
            top_logprobs: self.params.top_logprobs,
            // 0 means no limit, so the rest of a limit is at least 1.
            deadline_ms: time_left.map_or(0, |left| (left.as_millis() as u64).max(1)),
            sampler_state: progress.sampler_state(),
            grammar: self.params.grammar.as_ref().map(|grammar| grammar.source.clone()),
            dry_breakers: (!self.dry_breakers.is_empty()).then(|| dry_breakers(&self.dry_breakers)),
            tenant: self.tenant,
            priority: self.params.priority,
            cache_salt: self.params.cache_salt.clone(),
        }
    }
}

impl CheckedBeams {
    pub(crate) fn to_wire(self, generation: wire::GenerateRequest, choices: u32) -> wire::SearchBeamsRequest {
        let Self { width, length_penalty, early_stopping } = self;
        let generation = Some(generation);
        wire::SearchBeamsRequest { generation, beam_width: width, choices, length_penalty, early_stopping }
    }
}

/// A call of a worker in the trace of its request.
pub(crate) fn traced_call<T>(message: T, span: &Span) -> Request<T> {
    let mut call = Request::new(message);
    span.context().write_to(call.metadata_mut().as_mut());
    call
}

fn dry_breakers(breakers: &[Vec<u32>]) -> wire::DryBreakers {
    let (singles, longer): (Vec<_>, Vec<_>) = breakers.iter().partition(|sequence| sequence.len() == 1);
    wire::DryBreakers {
        tokens: singles.into_iter().flatten().copied().collect(),
        sequences: longer.into_iter().map(|sequence| public::TokenIds { ids: sequence.clone() }).collect(),
    }
}

fn sampling(sampling: &CheckedSampling) -> public::Sampling {
    let mut wire = public::Sampling {
        top_k: Some(sampling.top_k),
        mirostat: sampling.mirostat.map(|mirostat| mirostat.version),
        mirostat_tau: sampling.mirostat.map(|mirostat| mirostat.tau),
        mirostat_eta: sampling.mirostat.map(|mirostat| mirostat.eta),
        dry_multiplier: sampling.dry.as_ref().map(|dry| dry.multiplier),
        dry_base: sampling.dry.as_ref().map(|dry| dry.base),
        dry_allowed_length: sampling.dry.as_ref().map(|dry| dry.allowed_length),
        dry_penalty_last_n: sampling.dry.as_ref().and_then(|dry| dry.penalty_last_n),
        // The worker gets token sequences in `dry_breakers`.
        dry_sequence_breakers: None,
        logit_bias: sampling.logit_bias.iter().copied().collect(),
        seed: Some(sampling.seed),
        ..public::Sampling::default()
    };
    macro_rules! copy_floats {
        (floats: [$($name:ident $constant:ident),*], $($rest:tt)*) => {
            $(wire.$name = Some(sampling.$name);)*
        };
    }
    sampling_params::with_parameter_names!(copy_floats);
    wire
}

/// A log probability with the most likely alternatives, descending.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Logprob {
    pub(crate) logprob: f32,
    pub(crate) top: Vec<(u32, f32)>,
}

/// A frame of a worker's stream.
#[derive(Debug)]
pub(crate) enum WorkerFrame {
    Admitted,
    Tokens {
        ids: Vec<u32>,
        logprobs: Vec<Logprob>,
        sampler_state: Bytes,
    },
    Finished {
        is_stop: bool,
        stop_token: Option<u32>,
        cached_tokens: u32,
    },
    /// Tokens of each running sequence, and of all sequences so far.
    BeamProgress {
        length: u32,
        computed_tokens: u64,
    },
}

impl TryFrom<wire::GenerateFrame> for WorkerFrame {
    type Error = ChoiceError;

    fn try_from(frame: wire::GenerateFrame) -> Result<Self, ChoiceError> {
        match frame.frame {
            Some(generate_frame::Frame::Admitted(_)) => Ok(WorkerFrame::Admitted),
            Some(generate_frame::Frame::Tokens(tokens)) => {
                if !tokens.logprobs.is_empty() && tokens.logprobs.len() != tokens.ids.len() {
                    return Err(ChoiceError::Protocol {
                        violation: "the number of log probabilities differs from the number of tokens",
                    });
                }
                Ok(WorkerFrame::Tokens {
                    ids: tokens.ids,
                    logprobs: tokens.logprobs.into_iter().map(Logprob::from).collect(),
                    sampler_state: tokens.sampler_state,
                })
            }
            Some(generate_frame::Frame::Finished(finished)) => {
                let is_stop = match finished.reason() {
                    public::FinishReason::Stop => true,
                    public::FinishReason::Length => false,
                    public::FinishReason::Unspecified => {
                        return Err(ChoiceError::Protocol { violation: "`finished` without a reason" });
                    }
                };
                Ok(WorkerFrame::Finished {
                    is_stop,
                    stop_token: finished.stop_token,
                    cached_tokens: finished.cached_tokens,
                })
            }
            Some(generate_frame::Frame::BeamProgress(progress)) => {
                let wire::BeamProgress { length, computed_tokens } = progress;
                Ok(WorkerFrame::BeamProgress { length, computed_tokens })
            }
            None => Err(ChoiceError::Protocol { violation: "a frame without content" }),
        }
    }
}

impl From<public::TokenLogprob> for Logprob {
    fn from(wire: public::TokenLogprob) -> Self {
        Self { logprob: wire.logprob, top: wire.top_tokens.into_iter().zip(wire.top_logprobs).collect() }
    }
}

impl From<Logprob> for public::TokenLogprob {
    fn from(logprob: Logprob) -> Self {
        let (top_tokens, top_logprobs) = logprob.top.into_iter().unzip();
        Self { logprob: logprob.logprob, top_tokens, top_logprobs }
    }
}

/// True if the worker sent this status. A status that the transport made up has the broken
/// connection as its source.
pub(crate) fn is_from_worker(status: &Status) -> bool {
    std::error::Error::source(status).is_none()
}

/// True if the call may have reached the worker. It has not if no process listens any more, or if
/// the connection had ended before.
pub(crate) fn may_have_arrived(status: &Status) -> bool {
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        let is_unsent = error.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_canceled);
        if error.is::<tonic::ConnectError>() || is_unsent {
            return false;
        }
        cause = error.source();
    }
    true
}

/// The time after which a full worker expects to have capacity.
pub(crate) fn retry_after(status: &Status) -> Option<Duration> {
    let seconds = status.metadata().get("retry-after")?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds))
}

/// The text of the innermost error. Those around it name layers of the transport only.
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut innermost = error;
    while let Some(cause) = innermost.source() {
        innermost = cause;
    }
    innermost.to_string().replace('\n', " ")
}

/// What a status in mid-stream means for the stream.
pub(crate) fn stream_loss(status: Status) -> StreamLoss {
    if !is_from_worker(&status) {
        return StreamLoss::WorkerDied { detail: root_cause(&status) };
    }
    let detail = status.message().to_owned();
    match status.code() {
        Code::Unavailable => StreamLoss::WorkerDrains { detail },
        Code::DeadlineExceeded => StreamLoss::DeadlineExceeded,
        Code::InvalidArgument => StreamLoss::InvalidRequest { detail },
        // The process is ending: HTTP/2 resets its streams before it closes the connection.
        Code::Cancelled | Code::Unknown => StreamLoss::WorkerDied { detail },
        _ => StreamLoss::WorkerError { detail },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_connection_is_told_by_its_innermost_error() {
        let reset = std::io::Error::other("connection reset");
        let loss = stream_loss(Status::from_error(Box::new(reset)));
        assert_eq!(loss, StreamLoss::WorkerDied { detail: "connection reset".to_owned() });
    }
}
