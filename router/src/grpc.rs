//! The public gRPC service `ballast.v1.Inference`: the same requests as over HTTP, with typed messages.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, stream};
use proto::v1::{self as wire, generate_frame, generate_request, inference_server};
use serde_json::{Map, Value, json};
use tokio::time::Instant;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Request, Response, Status};

use crate::admission::Tenant;
use crate::choice::{Event, Finish, Outcome};
use crate::dispatch::{RETRY_AFTER, Refusal};
use crate::fleet::ResolveError;
use crate::generate::{Generator, Job, Origin, Prompts};
use crate::http::RequestId;
use crate::model::{ChatError, Model};
use crate::params::{RequestGrammar, RequestParamError, RequestParams, token_ids};
use crate::resume::Failure;
use crate::tenant::{self, BadTenant};

pub(crate) struct Inference {
    pub(crate) generator: Generator,
}

type Frames = Pin<Box<dyn Stream<Item = Result<wire::GenerateFrame, Status>> + Send>>;

#[tonic::async_trait]
impl inference_server::Inference for Inference {
    type GenerateStream = Frames;

    async fn generate(&self, request: Request<wire::GenerateRequest>) -> Result<Response<Frames>, Status> {
        let arrived = Instant::now();
        let timeout = grpc_timeout(request.metadata());
        let tenant = self.tenant(request.metadata(), &request.get_ref().tenant)?;
        let request = request.into_inner();
        let model = self.resolve(&request.model)?;
        let (param, tokens, at_text_start) = prompt(&model, request.prompt)?;
        let params = RequestParams {
            max_tokens: Some(i64::from(request.max_tokens)).filter(|&max| max > 0),
            min_tokens: Some(i64::from(request.min_tokens)),
            stop: request.stop,
            stop_tokens: request.stop_tokens.into_iter().map(i64::from).collect(),
            ignore_eos: request.ignore_eos,
            n: Some(i64::from(request.n)).filter(|&n| n > 0),
            top_logprobs: request.top_logprobs.map(i64::from),
            grammar: request.grammar.map(|source| RequestGrammar { param: "grammar", source }),
            priority: Some(i64::from(request.priority)),
            cache_salt: Some(request.cache_salt),
            deadline_ms: deadline_ms(timeout, request.deadline_ms),
            ..sampling(request.sampling.unwrap_or_default())
        };
        let prompts = Prompts { param, tokens: vec![tokens], at_text_start };
        let origin = Origin { request_id: RequestId::draw().0, arrived, tenant };
        let job = Job::new(model, prompts, params, origin)?;
        let events = self.generator.start(&job).await?;
        let started = wire::Started {
            model: job.model.name().to_owned(),
            prompt_tokens: job.prompts().flatten().copied().collect(),
            seed: job.params().sampling.seed,
        };
        let prompt_tokens = started.prompt_tokens.len() as u32;
        let first = stream::iter([Ok(frame(generate_frame::Frame::Started(started)))]);
        let choices_left = job.choices();
        let rest = stream::unfold((events, choices_left), move |(mut events, choices_left)| async move {
            if choices_left == 0 {
                return None;
            }
            match events.recv().await {
                Some(Event::Piece(piece)) => {
                    let piece = wire::OutputDelta {
                        choice: piece.choice,
                        tokens: piece.tokens,
                        text: piece.text,
                        logprobs: piece.logprobs.into_iter().map(Into::into).collect(),
                    };
                    Some((Ok(frame(generate_frame::Frame::Delta(piece))), (events, choices_left)))
                }
                Some(Event::Ended { choice, outcome: Ok(outcome) }) => {
                    let finished = finished(choice, prompt_tokens, outcome);
                    Some((Ok(frame(generate_frame::Frame::Finished(finished))), (events, choices_left - 1)))
                }
                Some(Event::Ended { outcome: Err(failure), .. }) => Some((Err(failure.into()), (events, 0))),
                None => Some((Err(Status::unavailable("the router is stopping")), (events, 0))),
            }
        });
        Ok(Response::new(Box::pin(stream::StreamExt::chain(first, rest))))
    }

    async fn tokenize(
        &self,
        request: Request<wire::TokenizeRequest>,
    ) -> Result<Response<wire::TokenizeReply>, Status> {
        let request = request.into_inner();
        let model = self.resolve(&request.model)?;
        let tokens = model.text.encode(&request.text, !request.no_special);
        let tokens = tokens.map_err(|error| Status::invalid_argument(error.to_string()))?;
        Ok(Response::new(wire::TokenizeReply { tokens }))
    }

    async fn detokenize(
        &self,
        request: Request<wire::DetokenizeRequest>,
    ) -> Result<Response<wire::DetokenizeReply>, Status> {
        let request = request.into_inner();
        let model = self.resolve(&request.model)?;
        let ids = checked_ids(&model, "tokens", &request.tokens)?;
        Ok(Response::new(wire::DetokenizeReply { text: model.text.decode(&ids) }))
    }

    async fn list_models(
        &self,
        _: Request<wire::ListModelsRequest>,
    ) -> Result<Response<wire::ListModelsReply>, Status> {
        let entry = |served: &crate::fleet::Served| wire::Model {
            name: served.model.name().to_owned(),
            digest: served.model.digest_hex(),
            context_tokens: served.model.about.context_tokens,
            workers: served.workers.len() as u32,
            weight_bytes: served.model.about.weight_bytes,
        };
        let models = self.generator.fleet.served().iter().map(entry).collect();
        Ok(Response::new(wire::ListModelsReply { models }))
    }
}

impl Inference {
    fn resolve(&self, name: &str) -> Result<Arc<Model>, Status> {
        Ok(self.generator.fleet.resolve(Some(name).filter(|name| !name.is_empty()))?)
    }

    /// A gateway's word comes before the caller's.
    fn tenant(&self, metadata: &MetadataMap, named: &str) -> Result<Tenant, Status> {
        let header = |name: &str| metadata.get(name).map(MetadataValue::as_bytes);
        let named = Some(named.as_bytes()).filter(|named| !named.is_empty());
        Ok(self.generator.tenants.of(header(tenant::HEADER).or(named), header("authorization"))?)
    }
}

/// The earlier of the call's own deadline and the message's, which is none at 0. What is left of one is at least 1 ms.
fn deadline_ms(timeout: Option<Duration>, asked: u64) -> Option<i64> {
    let timeout = timeout.map(|timeout| timeout.as_millis().max(1));
    let asked = (asked > 0).then_some(u128::from(asked));
    let least = timeout.into_iter().chain(asked).min()?;
    Some(i64::try_from(least).unwrap_or(i64::MAX))
}

/// The prompt's name, its ids, and whether the output is a text of its own.
fn prompt(
    model: &Model,
    prompt: Option<generate_request::Prompt>,
) -> Result<(&'static str, Vec<u32>, bool), Status> {
    match prompt {
        Some(generate_request::Prompt::Text(text)) => {
            let tokens = model.text.encode(&text, true);
            Ok(("text", tokens.map_err(|error| Status::invalid_argument(format!("`text`: {error}")))?, false))
        }
        Some(generate_request::Prompt::Tokens(tokens)) => {
            Ok(("tokens", checked_ids(model, "tokens", &tokens.ids)?, false))
        }
        Some(generate_request::Prompt::Chat(chat)) => {
            let messages: Vec<Value> =
                chat.messages.into_iter().map(|m| json!({"role": m.role, "content": m.content})).collect();
            Ok(("chat", model.text.encode_chat(&messages, true, &Map::new())?, true))
        }
        None => Err(Status::invalid_argument("`prompt` is missing: give text, tokens or chat")),
    }
}

/// The call's own deadline (gRPC over HTTP/2, "Timeout"); tonic looks at it for the beginning of the answer only. A
/// malformed one is none.
fn grpc_timeout(metadata: &MetadataMap) -> Option<Duration> {
    let text = metadata.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let count: u64 = digits.parse().ok().filter(|_| (1..=8).contains(&digits.len()))?;
    match unit {
        "H" => Some(Duration::from_secs(count * 3600)),
        "M" => Some(Duration::from_secs(count * 60)),
        "S" => Some(Duration::from_secs(count)),
        "m" => Some(Duration::from_millis(count)),
        "u" => Some(Duration::from_micros(count)),
        "n" => Some(Duration::from_nanos(count)),
        _ => None,
    }
}

fn checked_ids(model: &Model, param: &'static str, ids: &[u32]) -> Result<Vec<u32>, Status> {
    let ids: Vec<i64> = ids.iter().copied().map(i64::from).collect();
    Ok(token_ids(param, &ids, model.limits())?)
}

fn sampling(wire: wire::Sampling) -> RequestParams {
    RequestParams {
        temperature: wire.temperature.map(f64::from),
        top_k: wire.top_k.map(i64::from),
        top_p: wire.top_p.map(f64::from),
        min_p: wire.min_p.map(f64::from),
        dynatemp_range: wire.dynatemp_range.map(f64::from),
        dynatemp_exponent: wire.dynatemp_exponent.map(f64::from),
        top_n_sigma: wire.top_n_sigma.map(f64::from),
        typical_p: wire.typical_p.map(f64::from),
        xtc_probability: wire.xtc_probability.map(f64::from),
        xtc_threshold: wire.xtc_threshold.map(f64::from),
        mirostat: wire.mirostat.map(i64::from),
        mirostat_tau: wire.mirostat_tau.map(f64::from),
        mirostat_eta: wire.mirostat_eta.map(f64::from),
        dry_multiplier: wire.dry_multiplier.map(f64::from),
        dry_base: wire.dry_base.map(f64::from),
        dry_allowed_length: wire.dry_allowed_length.map(i64::from),
        dry_penalty_last_n: wire.dry_penalty_last_n.map(i64::from),
        dry_sequence_breakers: wire.dry_sequence_breakers.map(|breakers| breakers.values),
        repetition_penalty: wire.repetition_penalty.map(f64::from),
        presence_penalty: wire.presence_penalty.map(f64::from),
        frequency_penalty: wire.frequency_penalty.map(f64::from),
        logit_bias: wire.logit_bias.into_iter().map(|(id, bias)| (i64::from(id), f64::from(bias))).collect(),
        seed: wire.seed,
        ..RequestParams::default()
    }
}

fn frame(frame: generate_frame::Frame) -> wire::GenerateFrame {
    wire::GenerateFrame { frame: Some(frame) }
}

fn finished(choice: u32, prompt_tokens: u32, outcome: Outcome) -> wire::Finished {
    let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
    let mut finished = wire::Finished {
        choice,
        usage: Some(wire::Usage {
            prompt_tokens,
            completion_tokens: outcome.output_tokens,
            cached_tokens: outcome.cached_tokens,
            first_token_ms: milliseconds(outcome.first_token.unwrap_or(outcome.total)),
            total_ms: milliseconds(outcome.total),
            resumes: outcome.resumes,
        }),
        ..wire::Finished::default()
    };
    finished.set_reason(match outcome.finish {
        Finish::Length => wire::FinishReason::Length,
        Finish::StopString(_) | Finish::StopToken(_) => wire::FinishReason::Stop,
    });
    match outcome.finish {
        Finish::StopString(stop) => finished.stop = Some(stop),
        Finish::StopToken(token) => finished.stop_token = token,
        Finish::Length => {}
    }
    finished
}

impl From<RequestParamError> for Status {
    fn from(error: RequestParamError) -> Self {
        Status::invalid_argument(error.to_string())
    }
}

impl From<ChatError> for Status {
    fn from(error: ChatError) -> Self {
        Status::invalid_argument(error.to_string())
    }
}

impl From<ResolveError> for Status {
    fn from(error: ResolveError) -> Self {
        let message = error.to_string();
        match error {
            ResolveError::Unknown { .. } => Status::not_found(message),
            ResolveError::Ambiguous { .. } => Status::invalid_argument(message),
            ResolveError::None => retry_after(Status::unavailable(message), Some(RETRY_AFTER)),
        }
    }
}

impl From<BadTenant> for Status {
    fn from(error: BadTenant) -> Self {
        Status::invalid_argument(error.to_string())
    }
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        let message = refusal.to_string();
        let status = match &refusal {
            Refusal::NoWorker | Refusal::Overloaded { .. } => Status::unavailable(message),
            Refusal::TenantLimit { .. } => Status::resource_exhausted(message),
            Refusal::NeverFits(_) | Refusal::Invalid { .. } | Refusal::Grammar { .. } => {
                Status::invalid_argument(message)
            }
            Refusal::Deadline => Status::deadline_exceeded(message),
            Refusal::Failed { .. } => Status::internal(message),
        };
        retry_after(status, refusal.retry_after())
    }
}

impl From<Failure> for Status {
    fn from(failure: Failure) -> Self {
        let message = failure.to_string();
        match failure {
            Failure::NoWorker { .. } | Failure::Poison { .. } => Status::unavailable(message),
            Failure::Deadline => Status::deadline_exceeded(message),
            Failure::SlowClient => Status::aborted(message),
            Failure::Worker { .. } | Failure::Protocol { .. } => Status::internal(message),
        }
    }
}

fn retry_after(mut status: Status, time: Option<Duration>) -> Status {
    if let Some(time) = time {
        status.metadata_mut().insert("retry-after", MetadataValue::from(time.as_secs()));
    }
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_calls_timeout_is_read_in_all_its_units() {
        let timeout = |text: &str| {
            let mut metadata = MetadataMap::new();
            metadata.insert("grpc-timeout", text.parse().unwrap());
            grpc_timeout(&metadata)
        };
        assert_eq!(timeout("2H"), Some(Duration::from_secs(7200)));
        assert_eq!(timeout("90S"), Some(Duration::from_secs(90)));
        assert_eq!(timeout("250m"), Some(Duration::from_millis(250)));
        assert_eq!(timeout("99999999n"), Some(Duration::from_nanos(99_999_999)));
        for malformed in ["", "5", "S", "123456789S", "-1S", "1.5S", "5x"] {
            assert_eq!(timeout(malformed), None, "{malformed}");
        }
        assert_eq!(grpc_timeout(&MetadataMap::new()), None);
    }
}
