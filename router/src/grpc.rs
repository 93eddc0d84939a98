// SPDX-License-Identifier: Apache-2.0

//! The public gRPC service `ballast.v1.Inference`. It accepts the same requests as the HTTP API.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, stream};
use proto::v1::{self as wire, generate_frame, generate_request, inference_server};
use serde_json::json;
use tokio::time::Instant;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Request, Response, Status};

use crate::access::{ApiKey, ModelAccess};
use crate::access_control::KeyedRequest;
use crate::admission::Tenant;
use crate::choice::{ChoiceEvent, ChoiceOutcome, FinishCause};
use crate::failover::ChoiceError;
use crate::generate::{GenerationRequest, Generator, RequestOrigin, SESSION_HEADER, TokenizedPrompts};
use crate::http;
use crate::intake::RequestBytes;
use crate::model::{ChatError, Conversation, ServedModel};
use crate::model_wait::ModelQuery;
use crate::opening::{RETRY_AFTER, RequestRefusal};
use crate::params::{RequestGrammar, RequestParamError, RequestParams, token_ids};
use crate::registry::{ModelSnapshot, ResolveError, UnheardModel};
use crate::request_trace::RequestTrace;
use crate::tenant::{self, TenantNameError};

mod embeddings;

pub(crate) struct InferenceService {
    pub(crate) generator: Generator,
}

type InferenceStream = Pin<Box<dyn Stream<Item = Result<wire::GenerateFrame, Status>> + Send>>;

#[tonic::async_trait]
impl inference_server::Inference for InferenceService {
    type GenerateStream = InferenceStream;

    async fn generate(
        &self,
        request: Request<wire::GenerateRequest>,
    ) -> Result<Response<InferenceStream>, Status> {
        let timeout = grpc_timeout(request.metadata());
        let origin = self.origin(&request, &request.get_ref().tenant)?;
        let own = earlier_deadline_ms(timeout, request.get_ref().deadline_ms);
        let own = own.map_or(Duration::MAX, |ms| Duration::from_millis(ms.unsigned_abs()));
        let wait = (origin.tenant.clone(), self.generator.deadline_of(&origin, own));
        let (model, message) = self.resolve(request, |request| &request.model, wait).await?;
        let request = run_tokenizer(prompt_bytes(&message), move || {
            generation_request(model, message, timeout, origin)
        });
        let request = request.await?;
        let events = self.generator.start(&request).await?;
        let started = wire::Started {
            model: request.model.name().to_owned(),
            prompt_tokens: request.prompts().flatten().copied().collect(),
            seed: request.params().sampling.seed,
        };
        let prompt_tokens = started.prompt_tokens.len() as u32;
        let first = stream::iter([Ok(frame(generate_frame::Frame::Started(started)))]);
        let choices_left = request.choices();
        let rest = stream::unfold((events, choices_left), move |(mut events, choices_left)| async move {
            if choices_left == 0 {
                return None;
            }
            match events.recv().await {
                Some(ChoiceEvent::Output(delta)) => {
                    let delta = wire::OutputDelta {
                        choice: delta.choice,
                        tokens: delta.tokens,
                        text: delta.text,
                        logprobs: delta.logprobs.into_iter().map(Into::into).collect(),
                    };
                    Some((Ok(frame(generate_frame::Frame::Delta(delta))), (events, choices_left)))
                }
                Some(ChoiceEvent::Ended { choice, outcome: Ok(outcome) }) => {
                    let finished = finished(choice, prompt_tokens, outcome);
                    Some((Ok(frame(generate_frame::Frame::Finished(finished))), (events, choices_left - 1)))
                }
                Some(ChoiceEvent::Ended { outcome: Err(error), .. }) => {
                    Some((Err(error.into()), (events, 0)))
                }
                None => Some((Err(Status::unavailable("the router is stopping")), (events, 0))),
            }
        });
        Ok(Response::new(Box::pin(stream::StreamExt::chain(first, rest))))
    }

    async fn embed(
        &self,
        request: Request<wire::EmbedRequest>,
    ) -> Result<Response<wire::EmbedReply>, Status> {
        Ok(Response::new(embeddings::embed(self, request).await?))
    }

    async fn rerank(
        &self,
        request: Request<wire::RerankRequest>,
    ) -> Result<Response<wire::RerankReply>, Status> {
        Ok(Response::new(embeddings::rerank(self, request).await?))
    }

    async fn tokenize(
        &self,
        request: Request<wire::TokenizeRequest>,
    ) -> Result<Response<wire::TokenizeReply>, Status> {
        let wait = self.tokenizer_wait(request.metadata());
        let (model, request) = self.resolve(request, |request| &request.model, wait).await?;
        let tokens = run_tokenizer(request.text.len(), move || {
            let tokens = model.text.encode(&request.text, !request.no_special);
            tokens.map_err(|error| Status::invalid_argument(error.to_string()))
        });
        Ok(Response::new(wire::TokenizeReply { tokens: tokens.await? }))
    }

    async fn detokenize(
        &self,
        request: Request<wire::DetokenizeRequest>,
    ) -> Result<Response<wire::DetokenizeReply>, Status> {
        let wait = self.tokenizer_wait(request.metadata());
        let (model, request) = self.resolve(request, |request| &request.model, wait).await?;
        let text = run_tokenizer(size_of_val(&request.tokens[..]), move || {
            let ids = check_ids(&model, "tokens", &request.tokens)?;
            model.text.decode(&ids).map_err(|error| Status::invalid_argument(error.to_string()))
        });
        Ok(Response::new(wire::DetokenizeReply { text: text.await? }))
    }

    async fn list_models(
        &self,
        request: Request<wire::ListModelsRequest>,
    ) -> Result<Response<wire::ListModelsReply>, Status> {
        let access = model_access(&request);
        let entry = |snapshot: &ModelSnapshot| wire::Model {
            name: snapshot.model.name().to_owned(),
            aliases: access
                .names_of(&snapshot.model)
                .filter(|name| *name != snapshot.model.name())
                .map(str::to_owned)
                .collect(),
            digest: snapshot.model.digest_hex(),
            context_tokens: snapshot.model.description.context_tokens,
            workers: snapshot.workers.len() as u32,
            weight_bytes: snapshot.model.description.weight_bytes,
            sampling_defaults: Some(snapshot.model.description.sampling_defaults.clone()),
            requests: u32::try_from(snapshot.requests).unwrap_or(u32::MAX),
            is_current: snapshot.is_current,
            pooling: snapshot.model.description.pooling.into(),
            embedding_length: snapshot.model.description.embedding_length,
        };
        let unheard = |model: UnheardModel| wire::Model {
            aliases: model.names.into_iter().filter(|name| *name != model.name).collect(),
            name: model.name,
            is_current: true,
            ..wire::Model::default()
        };
        let registry = &self.generator.registry;
        let (heard, idle) = (registry.snapshot_for(&access), registry.unheard_idle_models(&access));
        let models = heard.iter().map(entry).chain(idle.into_iter().map(unheard)).collect();
        Ok(Response::new(wire::ListModelsReply { models }))
    }
}

impl InferenceService {
    /// The model that the request names, and its message. The request waits for a model that the
    /// router has not heard, for its tenant and until its deadline.
    async fn resolve<T>(
        &self,
        request: Request<T>,
        name: impl Fn(&T) -> &String,
        (tenant, deadline): (Tenant, Instant),
    ) -> Result<(Arc<ServedModel>, T), Status> {
        let access = model_access(&request);
        let message = request.into_inner();
        let name = Some(name(&message).as_str()).filter(|name| !name.is_empty());
        self.generator.wait_for_model(ModelQuery { name, access: &access, tenant, deadline }).await?;
        Ok((self.generator.registry.resolve(name, &access)?, message))
    }

    /// `tenant` is the field of the message.
    fn origin<T>(&self, request: &Request<T>, tenant: &str) -> Result<RequestOrigin, Status> {
        let arrived = Instant::now();
        let active = request.extensions().get::<KeyedRequest>().cloned();
        let key = active.as_ref().map(KeyedRequest::key);
        let tenant = self.resolve_tenant(request.metadata(), tenant, key)?;
        let bytes = request.extensions().get::<RequestBytes>().cloned();
        let trace = request.extensions().get::<RequestTrace>();
        let trace = trace.expect("`identify` runs around every route").clone();
        let session = request.metadata().get(SESSION_HEADER);
        let session = session.map(|name| String::from_utf8_lossy(name.as_bytes()).into());
        Ok(RequestOrigin { trace, arrived, tenant, session, bytes, active })
    }

    /// Tenant and deadline of a call that needs only a tokenizer.
    fn tokenizer_wait(&self, metadata: &MetadataMap) -> (Tenant, Instant) {
        let timeout = grpc_timeout(metadata).unwrap_or(Duration::MAX).min(self.generator.request_timeout);
        (Tenant::Unnamed, Instant::now() + timeout)
    }

    /// The header of a gateway overrides the caller's field.
    fn resolve_tenant(
        &self,
        metadata: &MetadataMap,
        field: &str,
        key: Option<&ApiKey>,
    ) -> Result<Tenant, Status> {
        let header = |name: &str| metadata.get(name).map(MetadataValue::as_bytes);
        let field = Some(field.as_bytes()).filter(|field| !field.is_empty());
        let presented = tenant::bearer_key(header("authorization"));
        Ok(self.generator.tenants.resolve(header(tenant::HEADER).or(field), presented, key)?)
    }
}

fn model_access<T>(request: &Request<T>) -> ModelAccess {
    KeyedRequest::models(request.extensions().get::<KeyedRequest>())
}

/// The earlier of the call's deadline and the message's deadline, at least 1 ms. 0 means none.
fn earlier_deadline_ms(timeout: Option<Duration>, field: u64) -> Option<i64> {
    let timeout = timeout.map(|timeout| timeout.as_millis().max(1));
    let field = (field > 0).then_some(u128::from(field));
    let earlier = timeout.into_iter().chain(field).min()?;
    Some(i64::try_from(earlier).unwrap_or(i64::MAX))
}

/// The name of the prompt field, the token ids, and whether the output is a text of its own.
/// Runs `work` where it does not stop the streams of others.
async fn run_tokenizer<T: Send + 'static>(
    input_bytes: usize,
    work: impl FnOnce() -> Result<T, Status> + Send + 'static,
) -> Result<T, Status> {
    let done = http::run_tokenizer(input_bytes, move || Ok::<_, http::ApiError>(work())).await;
    // Its only own error: the router is stopping.
    done.unwrap_or_else(|error| Err(Status::unavailable(error.to_string())))
}

fn prompt_bytes(message: &wire::GenerateRequest) -> usize {
    match &message.prompt {
        Some(generate_request::Prompt::Text(text)) => text.len(),
        Some(generate_request::Prompt::Chat(chat)) => {
            chat.messages.iter().map(|message| message.content.len()).sum()
        }
        Some(generate_request::Prompt::Tokens(_)) | None => 0,
    }
}

fn tokenize_prompt(
    model: &ServedModel,
    prompt: Option<generate_request::Prompt>,
) -> Result<(&'static str, Vec<u32>, bool), Status> {
    match prompt {
        Some(generate_request::Prompt::Text(text)) => {
            let tokens = model.text.encode(&text, true);
            Ok(("text", tokens.map_err(|error| Status::invalid_argument(format!("`text`: {error}")))?, false))
        }
        Some(generate_request::Prompt::Tokens(tokens)) => {
            Ok(("tokens", check_ids(model, "tokens", &tokens.ids)?, false))
        }
        Some(generate_request::Prompt::Chat(chat)) => {
            let messages = chat.messages.into_iter().map(|m| json!({"role": m.role, "content": m.content}));
            let conversation = Conversation {
                messages: messages.collect(),
                add_generation_prompt: true,
                ..Conversation::default()
            };
            Ok(("chat", model.text.encode_chat(&conversation)?.tokens, true))
        }
        None => Err(Status::invalid_argument("`prompt` is missing: give text, tokens or chat")),
    }
}

/// The call's deadline (gRPC over HTTP/2, "Timeout"), which tonic applies only to the first frame.
/// A malformed value counts as none.
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

fn check_ids(model: &ServedModel, param: &'static str, ids: &[u32]) -> Result<Vec<u32>, Status> {
    let ids: Vec<i64> = ids.iter().copied().map(i64::from).collect();
    Ok(token_ids(param, &ids, model.limits())?)
}

/// The checked request of a message. `timeout` is the call's.
pub(crate) fn generation_request(
    model: Arc<ServedModel>,
    message: wire::GenerateRequest,
    timeout: Option<Duration>,
    origin: RequestOrigin,
) -> Result<GenerationRequest, Status> {
    let (param, tokens, at_text_start) = tokenize_prompt(&model, message.prompt)?;
    let params = RequestParams {
        max_tokens: Some(i64::from(message.max_tokens)).filter(|&max| max > 0),
        min_tokens: Some(i64::from(message.min_tokens)),
        stop: message.stop,
        stop_tokens: message.stop_tokens.into_iter().map(i64::from).collect(),
        ignore_eos: message.ignore_eos,
        n: Some(i64::from(message.n)).filter(|&n| n > 0),
        beam_search: message.beam_search.is_some(),
        best_of: message.beam_search.map(|beams| i64::from(beams.width)).filter(|&width| width > 0),
        length_penalty: message.beam_search.and_then(|beams| beams.length_penalty).map(f64::from),
        early_stopping: message.beam_search.is_some_and(|beams| beams.early_stopping),
        top_logprobs: message.top_logprobs.map(i64::from),
        grammar: message.grammar.map(|source| RequestGrammar { param: "grammar", source }),
        priority: Some(i64::from(message.priority)),
        cache_salt: Some(message.cache_salt),
        deadline_ms: earlier_deadline_ms(timeout, message.deadline_ms),
        ..sampling_to_params(message.sampling.unwrap_or_default())
    };
    let tokens = vec![tokens];
    origin.keep_bytes(&tokens, &params);
    let prompts = TokenizedPrompts { param, tokens, at_text_start };
    Ok(GenerationRequest::new(model, prompts, params, origin)?)
}

fn sampling_to_params(wire: wire::Sampling) -> RequestParams {
    let mut params = RequestParams {
        dry_sequence_breakers: wire.dry_sequence_breakers.map(|breakers| breakers.values),
        logit_bias: wire.logit_bias.into_iter().map(|(id, bias)| (i64::from(id), f64::from(bias))).collect(),
        seed: wire.seed,
        ..RequestParams::default()
    };
    macro_rules! copy_fields {
        (
            floats: [$($float:ident $float_constant:ident),*],
            grouped_floats: [$($grouped:ident $grouped_constant:ident),*],
            integers: [$($integer:ident $integer_constant:ident),*],
        ) => {
            $(params.$float = wire.$float.map(f64::from);)*
            $(params.$grouped = wire.$grouped.map(f64::from);)*
            $(params.$integer = wire.$integer.map(i64::from);)*
        };
    }
    sampling_params::with_parameter_names!(copy_fields);
    params
}

fn frame(frame: generate_frame::Frame) -> wire::GenerateFrame {
    wire::GenerateFrame { frame: Some(frame) }
}

fn finished(choice: u32, prompt_tokens: u32, outcome: ChoiceOutcome) -> wire::Finished {
    let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
    let mut finished = wire::Finished {
        choice,
        usage: Some(wire::Usage {
            prompt_tokens,
            completion_tokens: outcome.output_tokens,
            cached_tokens: outcome.cached_tokens,
            first_token_ms: milliseconds(outcome.time_to_first_token.unwrap_or(outcome.total_time)),
            total_ms: milliseconds(outcome.total_time),
            resumes: outcome.resumes,
        }),
        ..wire::Finished::default()
    };
    finished.set_reason(match outcome.finish {
        FinishCause::Length => wire::FinishReason::Length,
        FinishCause::StopString(_) | FinishCause::StopToken(_) => wire::FinishReason::Stop,
    });
    match outcome.finish {
        FinishCause::StopString(stop) => finished.stop = Some(stop),
        FinishCause::StopToken(token) => finished.stop_token = token,
        FinishCause::Length => {}
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
            ResolveError::NoModel | ResolveError::NotAllKnown | ResolveError::Failed { .. } => {
                with_retry_after(Status::unavailable(message), Some(RETRY_AFTER))
            }
        }
    }
}

impl From<TenantNameError> for Status {
    fn from(error: TenantNameError) -> Self {
        Status::invalid_argument(error.to_string())
    }
}

impl From<RequestRefusal> for Status {
    fn from(refusal: RequestRefusal) -> Self {
        let message = refusal.to_string();
        let status = match &refusal {
            RequestRefusal::NoWorker { .. } | RequestRefusal::Overloaded { .. } => {
                Status::unavailable(message)
            }
            RequestRefusal::TenantLimit { .. } => Status::resource_exhausted(message),
            RequestRefusal::CapacityExceeded(_)
            | RequestRefusal::Invalid { .. }
            | RequestRefusal::Grammar { .. } => Status::invalid_argument(message),
            RequestRefusal::DeadlineExceeded => Status::deadline_exceeded(message),
            RequestRefusal::WorkerError { .. } => Status::internal(message),
            // Clients do not repeat this status.
            RequestRefusal::Quarantined(_) => Status::failed_precondition(message),
        };
        with_retry_after(status, refusal.retry_after())
    }
}

impl From<ChoiceError> for Status {
    fn from(error: ChoiceError) -> Self {
        let message = error.to_string();
        match error {
            ChoiceError::NoWorker { .. } | ChoiceError::TooManyLosses { .. } => Status::unavailable(message),
            ChoiceError::Quarantined { .. } => Status::failed_precondition(message),
            ChoiceError::InvalidRequest { .. } => Status::invalid_argument(message),
            ChoiceError::DeadlineExceeded => Status::deadline_exceeded(message),
            ChoiceError::SlowClient => Status::aborted(message),
            ChoiceError::WorkerError { .. } | ChoiceError::Protocol { .. } => Status::internal(message),
        }
    }
}

fn with_retry_after(mut status: Status, time: Option<Duration>) -> Status {
    if let Some(time) = time {
        status.metadata_mut().insert("retry-after", MetadataValue::from(time.as_secs()));
    }
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earlier_of_two_deadlines_holds_and_zero_means_none() {
        let milliseconds = |n| Some(Duration::from_millis(n));
        assert_eq!(earlier_deadline_ms(None, 0), None);
        assert_eq!(earlier_deadline_ms(None, 5), Some(5));
        assert_eq!(earlier_deadline_ms(milliseconds(9), 0), Some(9));
        assert_eq!(earlier_deadline_ms(milliseconds(9), 5), Some(5));
        assert_eq!(earlier_deadline_ms(milliseconds(3), 5), Some(3));
        assert_eq!(earlier_deadline_ms(Some(Duration::ZERO), 5), Some(1));
        assert_eq!(earlier_deadline_ms(None, u64::MAX), Some(i64::MAX));
    }

    #[test]
    fn grpc_timeouts_are_parsed_in_every_unit() {
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
