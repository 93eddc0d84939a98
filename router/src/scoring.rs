// SPDX-License-Identifier: Apache-2.0

//! Log probabilities of the tokens of a prompt. A worker computes them with `Score`, and generates
//! nothing.
//!
//! 1. A scored prompt holds a permit of its model, as a choice does.
//! 2. A worker that is lost costs time only: another worker computes the same numbers (I5).

use bytes::Bytes;
use proto::worker::v1::{ScoreRequest, score_frame};
use tokio::time::{Instant, timeout_at};
use tonic::Status;
use traces::Span;

use crate::dispatch::call_outcome;
use crate::generate::{GenerationRequest, Generator};
use crate::metrics;
use crate::opening::{OpeningStep, RefusalCollector, RequestRefusal};
use crate::registry::WorkerHandle;
use crate::request_trace::RequestTrace;
use crate::routing::ModelKey;
use crate::wire::{Logprob, traced_call};
use crate::worker_search::WorkerSearch;

/// Log probabilities of one request: each token of each prompt, with its alternatives. As JSON, an
/// entry takes about 100 bytes.
pub(crate) const SCORED_ENTRIES_MAX: usize = 1 << 20;

/// The tokens of one prompt from the second on. The first has nothing before it.
pub(crate) type PromptScores = Vec<Logprob>;

impl Generator {
    /// Scores each prompt of the request, with the `top` most likely alternatives of each token.
    pub(crate) async fn score(
        &self,
        request: &GenerationRequest,
        top: u32,
    ) -> Result<Vec<PromptScores>, RequestRefusal> {
        let scored = self.admit_and_score(request, top).await;
        if let Err(refusal) = &scored {
            request.origin().trace.record_refusal(refusal.reason());
            metrics::record_refusal(request.model.name(), request.class(), refusal.reason());
        }
        scored
    }

    async fn admit_and_score(
        &self,
        request: &GenerationRequest,
        top: u32,
    ) -> Result<Vec<PromptScores>, RequestRefusal> {
        let deadline = self.deadline(request);
        // One prompt after the other: a request of many prompts leaves the workers to others.
        let mut attempts = self.worker_attempts(request, 1);
        let (mut model, mut permit) = attempts.next().await?;
        let mut scores = Vec::with_capacity(request.prompts().len());
        for prompt in request.prompts() {
            let prompt_scores = loop {
                match self.score_prompt(request, &model, prompt, top, deadline).await {
                    Ok(scores) => break scores,
                    Err(refusal) => {
                        drop(permit);
                        attempts.refused(refusal).await?;
                        (model, permit) = attempts.next().await?;
                    }
                }
            };
            scores.push(prompt_scores);
        }
        Ok(scores)
    }

    /// Asks one worker after the other.
    async fn score_prompt(
        &self,
        request: &GenerationRequest,
        key: &ModelKey,
        prompt: &[u32],
        top: u32,
        deadline: Instant,
    ) -> Result<PromptScores, RequestRefusal> {
        if prompt.len() < 2 {
            // No token has another one before it.
            return Ok(PromptScores::new());
        }
        let quarantine = &self.dispatcher.quarantine;
        let content = quarantine.hasher.key_of_scored_prompt(key, prompt);
        let mut workers = WorkerSearch::new(quarantine, content, Some(deadline), None);
        let mut refusals = RefusalCollector::default();
        let place = |tried: &[_]| self.registry.choose_worker(key, tried);
        let trace = &request.origin().trace;
        let (logged, mut cause) = (trace.logged(request.model.name()), None);
        while let Some((mut worker, stay)) = workers.next(place, |worker| worker.id).await? {
            let mut span = trace.worker_call(&worker.name, cause);
            let call = score_request(trace, key, prompt, top, deadline);
            let outcome = match read_scores(&mut worker, call, &span, deadline).await {
                Ok(scores) => {
                    stay.record_output(1);
                    return Ok(scores);
                }
                Err(status) => call_outcome(&worker, &status, None, logged),
            };
            if let Some(failure) = outcome.failure() {
                span.fail(failure);
                cause = Some(failure);
            }
            let verdict = self.dispatcher.record_loss(&outcome, worker.id, &stay, 0, logged);
            if let OpeningStep::Refuse(refusal) = refusals.handle(outcome, verdict) {
                return Err(refusal);
            }
        }
        Err(refusals.into_refusal().unwrap_or_else(|| RequestRefusal::no_worker(&key.name)))
    }
}

fn score_request(
    trace: &RequestTrace,
    key: &ModelKey,
    prompt: &[u32],
    top: u32,
    deadline: Instant,
) -> ScoreRequest {
    let time_left = deadline.saturating_duration_since(Instant::now());
    ScoreRequest {
        fingerprint: Bytes::copy_from_slice(&key.fingerprint.0),
        tokens: prompt.to_vec(),
        top_logprobs: Some(top),
        // 0 means no limit.
        deadline_ms: (time_left.as_millis() as u64).max(1),
        request_id: trace.id().to_string(),
    }
}

async fn read_scores(
    worker: &mut WorkerHandle,
    call: ScoreRequest,
    span: &Span,
    deadline: Instant,
) -> Result<PromptScores, Status> {
    let tokens = call.tokens.len();
    let read = async {
        let mut frames = worker.client.score(traced_call(call, span)).await?.into_inner();
        let mut scores = PromptScores::with_capacity(tokens);
        while let Some(frame) = frames.message().await? {
            let Some(score_frame::Frame::Scored(scored)) = frame.frame else {
                return Err(Status::internal("a frame without log probabilities"));
            };
            scores.extend(scored.logprobs.into_iter().map(Logprob::from));
            if scores.len() >= tokens {
                return Err(Status::internal("more log probabilities than tokens"));
            }
        }
        match scores.len() + 1 == tokens {
            true => Ok(scores),
            false => Err(Status::unavailable("fewer log probabilities than tokens")),
        }
    };
    match timeout_at(deadline, read).await {
        Ok(scores) => scores,
        Err(_) => Err(Status::deadline_exceeded("the deadline passed")),
    }
}
