// SPDX-License-Identifier: Apache-2.0

//! Admits a checked request as a whole and starts the tasks of its choices.
//!
//! The router sends nothing to the client before a worker has admitted every choice of the request.
//! So overload and invalid requests are refusals with a status, and never errors in mid-response.

use std::sync::Arc;
use std::time::Duration;

use futures::future::{Either, try_join_all};
use prost::Message;
use proto::worker::v1::GenerateRequest;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::access_control::KeyedRequest;
use crate::admission::{AdmissionRequest, CapacityExceeded, ModelCapacity, PriorityClass, Tenant};
use crate::admission_control::{AdmissionController, StreamPermits};
use crate::choice::{BegunChoice, ChoiceEvent, ChoiceOutcome, ChoiceTask, FinishCause};
use crate::dispatch::{Dispatcher, OpenStream};
use crate::failover::ChoiceProgress;
use crate::grammar_check::GrammarChecker;
use crate::intake::RequestBytes;
use crate::metrics;
use crate::model::ServedModel;
use crate::opening::RequestRefusal;
use crate::params::{CheckedParams, RequestParamError, RequestParams, TokenLimits};
use crate::quarantine::{ContentHasher, ContentKey};
use crate::registry::{PlacedStream, WorkerRegistry};
use crate::request_trace::RequestTrace;
use crate::routing::{ModelKey, PromptPrefix, SessionKey};
use crate::tenant::TenantResolver;
use crate::text_stream::TextStream;
use crate::usage::RequestUsage;
use crate::usage_log::UsageLog;
use crate::wire::ChoiceCall;

/// Deltas of each choice that the router buffers for a slow client. Then the worker has to wait
/// too.
const BUFFERED_DELTAS_MAX: usize = 128;
/// Maximum number of choices of one request, over all prompts.
pub(crate) const CHOICES_MAX: usize = 128;

/// Maximum number of inputs of one request for embeddings: OpenAI's limit.
pub(crate) const EMBEDDING_INPUTS_MAX: usize = 2048;

/// A checked request.
#[derive(Debug)]
pub(crate) struct GenerationRequest {
    pub(crate) model: Arc<ServedModel>,
    /// Each prompt with its parameters: `max_tokens` depends on the prompt's length.
    prompts: Vec<(Arc<[u32]>, Arc<CheckedParams>)>,
    at_text_start: bool,
    /// Control tokens that appear in the text.
    visible_tokens: Arc<[u32]>,
    /// The client receives output while it is generated.
    is_streamed: bool,
    origin: RequestOrigin,
}

/// Names what belongs together, as a hint for routing. In gRPC it is metadata.
pub(crate) const SESSION_HEADER: &str = "x-session-id";

/// The id, trace, arrival time and tenant of a request.
#[derive(Clone, Debug)]
pub(crate) struct RequestOrigin {
    pub(crate) trace: RequestTrace,
    pub(crate) arrived: Instant,
    pub(crate) tenant: Tenant,
    /// The header [`SESSION_HEADER`].
    pub(crate) session: Option<Box<str>>,
    /// The bytes that the request holds, until its last choice ends.
    pub(crate) bytes: Option<RequestBytes>,
    /// The request under its API key, which counts it until its last choice ends.
    pub(crate) active: Option<KeyedRequest>,
}

impl RequestOrigin {
    /// The body is gone. From now on the request holds its tokens and its grammar.
    pub(crate) fn keep_bytes(&self, prompts: &[Vec<u32>], params: &RequestParams) {
        let tokens: usize = prompts.iter().map(|prompt| size_of_val(&prompt[..])).sum();
        let grammar = params.grammar.as_ref().map_or(0, |grammar| grammar.source.encoded_len());
        if let Some(bytes) = &self.bytes {
            bytes.shrink_to(tokens + grammar);
        }
    }
}

/// The token ids of the prompts.
#[derive(Debug)]
pub(crate) struct TokenizedPrompts {
    /// Name of the prompt field in the API that the request came through.
    pub(crate) param: &'static str,
    pub(crate) tokens: Vec<Vec<u32>>,
    /// The output is a text of its own and does not continue the prompt.
    pub(crate) at_text_start: bool,
}

impl GenerationRequest {
    pub(crate) fn new(
        model: Arc<ServedModel>,
        prompts: TokenizedPrompts,
        mut params: RequestParams,
        origin: RequestOrigin,
    ) -> Result<Self, RequestParamError> {
        let TokenizedPrompts { param, tokens, at_text_start } = prompts;
        if model.text.tokenizer().is_err() {
            params.check_without_text()?;
        }
        // Before the model's own defaults, which a beam search ignores.
        params.check_beams()?;
        params.fill_from(&model.description.sampling_defaults);
        let mut checked = Vec::with_capacity(tokens.len());
        let may_end = params.allowed_tokens.is_empty()
            || model
                .text
                .end_of_generation()
                .iter()
                .any(|&id| params.allowed_tokens.contains(&i64::from(id)));
        for mut prompt in tokens {
            truncate(&mut prompt, &params, model.limits())?;
            let mut checked_params = params.clone().check(model.limits(), param, prompt.len())?;
            if !may_end {
                // Only the limit ends the output.
                checked_params.min_tokens = checked_params.max_tokens;
            }
            // All prompts of a request share one seed, so each gives the output that it gives
            // alone.
            params.seed = Some(checked_params.sampling.seed);
            checked.push((prompt.into(), Arc::new(checked_params)));
        }
        let count = checked.len() * checked.first().map_or(0, |(_, params)| params.best_of as usize);
        if count > CHOICES_MAX {
            return Err(RequestParamError::TooManyEntries { param: "n", count, max: CHOICES_MAX });
        }
        if count == 0 {
            return Err(RequestParamError::EmptyPrompt { param });
        }
        let prompt_tokens = checked.iter().map(|(prompt, _): &(Arc<[u32]>, _)| prompt.len()).sum();
        origin.trace.record_prompts(model.name(), prompt_tokens, count);
        let visible_tokens = Arc::new([]);
        Ok(Self { model, prompts: checked, at_text_start, visible_tokens, is_streamed: true, origin })
    }

    /// A request whose prompts are pooled into one vector each. It generates nothing.
    pub(crate) fn pooled(
        model: Arc<ServedModel>,
        prompts: TokenizedPrompts,
        params: RequestParams,
        origin: RequestOrigin,
    ) -> Result<Self, RequestParamError> {
        let TokenizedPrompts { param, tokens, at_text_start } = prompts;
        let (limits, count) = (model.limits(), tokens.len());
        let context = limits.context_tokens;
        if count > EMBEDDING_INPUTS_MAX {
            return Err(RequestParamError::TooManyEntries { param, count, max: EMBEDDING_INPUTS_MAX });
        }
        if tokens.is_empty() || tokens.iter().any(Vec::is_empty) {
            return Err(RequestParamError::EmptyPrompt { param });
        }
        let is_too_long = |prompt: &&Vec<u32>| prompt.len() > context as usize;
        if let Some(prompt) = tokens.iter().find(is_too_long).map(Vec::len) {
            return Err(RequestParamError::ContextExceeded { param, context, prompt, output: None });
        }
        // Nothing is generated, so that the length of the prompt does not limit anything else.
        let params = Arc::new(RequestParams { max_tokens: Some(1), ..params }.check(limits, param, 1)?);
        origin.trace.record_prompts(model.name(), tokens.iter().map(Vec::len).sum(), count);
        let prompts = tokens.into_iter().map(|prompt| (prompt.into(), params.clone())).collect();
        let visible_tokens = Arc::new([]);
        Ok(Self { model, prompts, at_text_start, visible_tokens, is_streamed: false, origin })
    }

    /// Makes control tokens appear in the text with their names.
    pub(crate) fn with_visible_tokens(self, ids: Vec<u32>) -> Self {
        Self { visible_tokens: ids.into(), ..self }
    }

    pub(crate) fn with_streaming(self, is_streamed: bool) -> Self {
        Self { is_streamed, ..self }
    }

    pub(crate) fn origin(&self) -> &RequestOrigin {
        &self.origin
    }

    pub(crate) fn prompts(&self) -> impl ExactSizeIterator<Item = &[u32]> {
        self.prompts.iter().map(|(prompt, _)| &**prompt)
    }

    /// The parameters of the first prompt. Those of other prompts differ in `max_tokens` only.
    pub(crate) fn params(&self) -> &CheckedParams {
        &self.prompts[0].1
    }

    pub(crate) fn class(&self) -> PriorityClass {
        PriorityClass::of_priority(self.params().priority)
    }

    /// The session that the client names, in the header or in the body.
    pub(crate) fn session(&self) -> Option<SessionKey> {
        let name = self.origin.session.as_deref().or(self.params().session.as_deref())?;
        let tenant = match &self.origin.tenant {
            Tenant::Named(name) => name,
            Tenant::Unnamed => "",
        };
        Some(SessionKey::new(tenant, name.as_bytes()))
    }

    /// Number of choices that the fleet generates. Choice `c` of prompt `p` has index
    /// `p * best_of + c` in the response.
    pub(crate) fn choices(&self) -> usize {
        self.prompts.len() * self.params().best_of as usize
    }

    /// Sequences that workers run for the request.
    fn streams(&self) -> u32 {
        let params = self.params();
        self.choices() as u32 / params.choices_per_call() * params.streams_per_call()
    }

    /// Counts the prompts, in metrics and for the API key.
    pub(crate) fn record_prompts(&self) {
        for prompt in self.prompts() {
            metrics::record_prompt_tokens(self.model.name(), prompt.len());
            if let Some(active) = &self.origin.active {
                active.record_prompt(prompt.len());
            }
        }
    }

    /// The events of a request that generates nothing: each choice ends at once.
    pub(crate) fn without_output(&self, usage_log: Option<&Arc<UsageLog>>) -> mpsc::Receiver<ChoiceEvent> {
        let usage = usage_log.map(|log| RequestUsage::begin(log, self));
        let (events, receiver) = mpsc::channel(self.choices());
        for choice in 0..self.choices() as u32 {
            let outcome = ChoiceOutcome {
                finish: FinishCause::Length,
                output_tokens: 0,
                cached_tokens: 0,
                resumes: 0,
                time_to_first_token: None,
                total_time: self.origin.arrived.elapsed(),
            };
            let sent = events.try_send(ChoiceEvent::Ended { choice, outcome: Ok(outcome) });
            sent.expect("the channel has a slot for each choice");
            if let Some(usage) = &usage {
                usage.begin_choice(choice).finish_empty();
            }
        }
        self.record_prompts();
        receiver
    }

    /// One call for each choice, for workers that serve the model under this key. `tenant` is the
    /// tenant's number for workers.
    pub(crate) fn choice_calls(
        &self,
        model: &ModelKey,
        tenant: u64,
        capacity: ModelCapacity,
        hasher: &ContentHasher,
    ) -> Vec<ChoiceCall> {
        let mut calls = Vec::with_capacity(self.choices());
        let dry_breakers: Arc<[Vec<u32>]> = match &self.params().sampling.dry {
            Some(dry) => self.model.text.dry_breakers(&dry.breakers),
            None => Arc::new([]),
        };
        for (prompt, params) in &self.prompts {
            let end_of_generation: &[u32] =
                if params.ignore_eos { &[] } else { self.model.text.end_of_generation() };
            let stop_tokens: Arc<[u32]> = [&params.stop_tokens, end_of_generation].concat().into();
            let mut params = params.clone();
            if let (Some(beams), false) = (params.beams, params.is_max_tokens_given) {
                let most = capacity.beam_tokens_max(prompt.len() as u64, beams.width);
                let params = Arc::make_mut(&mut params);
                // The worker would give each beam the whole cache.
                (params.max_tokens, params.is_max_tokens_given) = (params.max_tokens.min(most), true);
            }
            let mut call = ChoiceCall {
                trace: self.origin.trace.clone(),
                model: model.clone(),
                prompt: prompt.clone(),
                prefix: PromptPrefix::new(&params.cache_salt, prompt),
                session: self.session(),
                params: params.clone(),
                stop_tokens,
                dry_breakers: dry_breakers.clone(),
                choice: 0,
                tenant,
                content: ContentKey::default(),
                _bytes: self.origin.bytes.clone(),
            };
            let content = call.to_wire(&ChoiceProgress::new(params.max_tokens), None);
            let search = params.beams.map(|beams| beams.to_wire(GenerateRequest::default(), params.n));
            call.content = hasher.key_of_request(&call.model, content, search.as_ref());
            // A beam search finds all choices of a prompt with one call.
            let choices = (0..params.best_of).step_by(params.choices_per_call() as usize);
            calls.extend(choices.map(|choice| ChoiceCall { choice, ..call.clone() }));
        }
        calls
    }
}

/// Drops the first tokens of a prompt that `truncate_prompt_tokens` makes shorter.
fn truncate(
    prompt: &mut Vec<u32>,
    params: &RequestParams,
    limits: TokenLimits,
) -> Result<(), RequestParamError> {
    let Some(asked) = params.truncate_prompt_tokens else { return Ok(()) };
    let context = i64::from(limits.context_tokens);
    let kept = match asked {
        -1 => (context - params.max_tokens.unwrap_or(1)).max(1),
        kept if (1..=context).contains(&kept) => kept,
        _ => {
            return Err(RequestParamError::OutOfRange {
                param: "truncate_prompt_tokens",
                value: asked.to_string(),
                allowed: format!("-1 and 1 to {context}"),
            });
        }
    };
    prompt.drain(..prompt.len().saturating_sub(kept as usize));
    Ok(())
}

/// Starts requests. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Generator {
    pub(crate) registry: Arc<WorkerRegistry>,
    pub(crate) dispatcher: Dispatcher,
    pub(crate) admission: Arc<AdmissionController>,
    pub(crate) grammars: Arc<GrammarChecker>,
    pub(crate) tenants: TenantResolver,
    /// Maximum duration of a request.
    pub(crate) request_timeout: Duration,
    pub(crate) usage_log: Option<Arc<UsageLog>>,
}

/// A choice that a worker has admitted.
struct AdmittedChoice {
    call: ChoiceCall,
    stream: OpenStream,
    progress: ChoiceProgress,
}

impl Generator {
    /// Admits every choice of the request or none. The events end after the last choice's
    /// [`ChoiceEvent::Ended`]. Dropping the receiver cancels the remaining choices.
    pub(crate) async fn start(
        &self,
        request: &GenerationRequest,
    ) -> Result<mpsc::Receiver<ChoiceEvent>, RequestRefusal> {
        let started = self.admit_and_spawn(request).await;
        if let Err(refusal) = &started {
            request.origin.trace.record_refusal(refusal.reason());
            metrics::record_refusal(request.model.name(), request.class(), refusal.reason());
        }
        started
    }

    async fn admit_and_spawn(
        &self,
        request: &GenerationRequest,
    ) -> Result<mpsc::Receiver<ChoiceEvent>, RequestRefusal> {
        let deadline = self.deadline(request);
        self.check_capacity(request)?;
        let mut calls = self.calls_for(request, request.model.key())?;
        if let Some(grammar) = &request.params().grammar {
            let GenerationRequest { model, origin, .. } = request;
            self.grammars.check(model.key(), grammar, origin, deadline).await?;
        }
        let mut attempts = self.worker_attempts(request, request.streams());
        let (choices, permits) = loop {
            let (model, permits) = attempts.next().await?;
            if calls.iter().any(|call| call.model != model) {
                calls = self.calls_for(request, &model)?;
            }
            match self.open_streams(calls.clone(), deadline).await {
                Ok(choices) => break (choices, permits),
                Err(refusal) => {
                    drop(permits);
                    attempts.refused(refusal).await?;
                }
            }
        };
        let events = self.spawn_choices(request, choices, permits, deadline)?;
        request.record_prompts();
        Ok(events)
    }

    /// The calls of a request, unless its content is in quarantine.
    fn calls_for(
        &self,
        request: &GenerationRequest,
        model: &ModelKey,
    ) -> Result<Vec<ChoiceCall>, RequestRefusal> {
        let (tenant, quarantine) = (self.tenants.number(&request.origin.tenant), &self.dispatcher.quarantine);
        let capacity = self.registry.capacity(model);
        let calls = request.choice_calls(model, tenant, capacity, &quarantine.hasher);
        match calls.iter().find_map(|call| quarantine.find(call.content)) {
            Some(entry) => Err(RequestRefusal::Quarantined(entry)),
            None => Ok(calls),
        }
    }

    pub(crate) fn deadline(&self, request: &GenerationRequest) -> Instant {
        self.deadline_of(&request.origin, request.params().deadline.unwrap_or(Duration::MAX))
    }

    /// When a request with this timeout of its own ends.
    pub(crate) fn deadline_of(&self, origin: &RequestOrigin, timeout: Duration) -> Instant {
        origin.arrived + timeout.min(self.request_timeout)
    }

    /// What the request asks of admission control for this many streams.
    pub(crate) fn admission_request(
        &self,
        request: &GenerationRequest,
        model: ModelKey,
        permits: u32,
    ) -> AdmissionRequest {
        AdmissionRequest {
            model,
            tenant: request.origin.tenant.clone(),
            priority: request.params().priority,
            permits,
            deadline: self.admission.uptime_at(self.deadline(request)),
        }
    }

    async fn open_streams(
        &self,
        calls: Vec<ChoiceCall>,
        deadline: Instant,
    ) -> Result<Vec<AdmittedChoice>, RequestRefusal> {
        let placed = self.place_choices(&calls);
        let opening = calls.into_iter().zip(placed).map(|(call, placed)| async move {
            let progress = ChoiceProgress::new(call.params.max_tokens);
            let stream = self.dispatcher.open_stream(&call, &progress, Some(deadline), placed, None).await?;
            Ok::<_, RequestRefusal>(AdmittedChoice { call, stream, progress })
        });
        try_join_all(opening).await
    }

    fn spawn_choices(
        &self,
        request: &GenerationRequest,
        choices: Vec<AdmittedChoice>,
        mut permits: StreamPermits,
        deadline: Instant,
    ) -> Result<mpsc::Receiver<ChoiceEvent>, RequestRefusal> {
        // Each choice reserves one slot for its `Ended` event before any choice sends a delta.
        let (events, receiver) = mpsc::channel(request.choices() * (BUFFERED_DELTAS_MAX + 1));
        let usage = self.usage_log.as_ref().map(|log| RequestUsage::begin(log, request));
        let begin = |call: &ChoiceCall, choice: u32| {
            let visible = request.visible_tokens.clone();
            let text = TextStream::new(&request.model, &call.params, request.at_text_start, visible)
                .map_err(|error| RequestRefusal::Invalid { detail: error.to_string() })?;
            let ended_permit = events.clone().try_reserve_owned().ok();
            let ended_permit = ended_permit.expect("the channel has a free slot for each choice");
            let usage = usage.as_ref().map(|usage| usage.begin_choice(choice));
            Ok::<_, RequestRefusal>(BegunChoice { text, usage, ended_permit })
        };
        let mut tasks = Vec::with_capacity(choices.len());
        let mut next_index = 0;
        for AdmittedChoice { call, stream, progress } in choices {
            let (index, permit) = (next_index, permits.split(call.params.streams_per_call()));
            next_index += call.params.choices_per_call();
            let first = begin(&call, call.choice)?;
            let others = (1..call.params.choices_per_call()).map(|choice| begin(&call, choice));
            let others = others.collect::<Result<Vec<_>, _>>()?;
            let task = ChoiceTask {
                index,
                model: request.model.clone(),
                dispatcher: self.dispatcher.clone(),
                call,
                arrived: request.origin.arrived,
                deadline: Some(deadline),
                is_streamed: request.is_streamed,
                events: events.clone(),
                active: request.origin.active.clone(),
                permit,
            };
            tasks.push(match task.call.params.beams {
                Some(_) => Either::Left(task.run_beams(stream, first, others)),
                None => Either::Right(task.run(stream, progress, first)),
            });
        }
        tasks.into_iter().for_each(|task| drop(tokio::spawn(task)));
        Ok(receiver)
    }

    /// Places the choices of a prompt on one worker, if it has capacity: it computes the prompt
    /// once.
    fn place_choices(&self, calls: &[ChoiceCall]) -> Vec<Option<PlacedStream>> {
        let mut previous = None;
        let placed = calls.iter().map(|call| {
            let preferred = previous.filter(|_| call.choice > 0);
            let placed = self.registry.place_stream(&call.demand(0), &[], preferred);
            previous = placed.as_ref().map(|placed| placed.worker.id);
            placed
        });
        placed.collect()
    }

    /// Refuses a request that no worker can ever hold.
    fn check_capacity(&self, request: &GenerationRequest) -> Result<(), CapacityExceeded> {
        let capacity = self.registry.capacity(request.model.key());
        if capacity == ModelCapacity::default() {
            // The model has no worker now. Admission control decides how long to wait for one.
            return Ok(());
        }
        let output = request.params().is_max_tokens_given.then_some(request.params().max_tokens);
        let longest = request.prompts().map(<[u32]>::len).max().unwrap_or(0);
        let choices_max = capacity.choices_max(request.class(), &request.origin.tenant);
        let streams_max = choices_max.min(self.admission.streams_max());
        capacity.check(longest as u64, output, request.streams(), streams_max)?;
        match request.params().beams {
            Some(beams) => capacity.check_beams(longest as u64, output, beams.width),
            None => Ok(()),
        }
    }
}
