// SPDX-License-Identifier: Apache-2.0

//! Embeddings of the prompts of a request. Workers pool with `Embed`, and generate nothing.
//!
//! 1. A request holds permits for the prompts that workers compute at once.
//! 2. A worker that is lost costs time only: another worker computes the same vector (I5).
//! 3. Dropping the future drops the calls, which cancels them on the workers.

use bytes::Bytes;
use futures::{StreamExt, stream};
use proto::v1::Pooling;
use proto::worker::v1::{EmbedReply, EmbedRequest};
use tokio::time::{Instant, timeout_at};
use tonic::Status;
use traces::Span;

use crate::access::ModelAccess;
use crate::dispatch::call_outcome;
use crate::generate::{GenerationRequest, Generator};
use crate::metrics;
use crate::model::ServedModel;
use crate::opening::{OpeningStep, RefusalCollector, RequestRefusal};
use crate::registry::{PlacedStream, WorkerHandle};
use crate::routing::{ModelKey, PromptPrefix, StreamDemand};
use crate::usage::RequestUsage;
use crate::wire::traced_call;
use crate::worker_search::WorkerSearch;

/// Prompts of one request that workers compute at once. Other requests get the rest of the workers.
const PROMPTS_AT_ONCE: usize = 16;
/// Values in the vectors of one reply. As JSON, a value takes about 12 bytes.
pub(crate) const EMBEDDED_VALUES_MAX: usize = 1 << 22;

/// What a request wants of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PooledUse {
    Embeddings,
    /// With a classifier, or by the angle between two embeddings.
    Relevance,
}

/// The model does not pool as the request needs it.
#[derive(Debug, thiserror::Error)]
#[error("the model `{model}` {lacks}; models of this fleet that do: {}", if .known.is_empty() { "none".to_owned() } else { .known.join(", ") })]
pub(crate) struct NotPooledError {
    model: String,
    lacks: &'static str,
    known: Vec<String>,
}

impl PooledUse {
    fn is_served_by(self, pooling: Pooling) -> bool {
        match pooling {
            Pooling::Unspecified => false,
            Pooling::Mean | Pooling::Last => true,
            Pooling::Rank => self == Self::Relevance,
        }
    }

    fn lacks(self) -> &'static str {
        match self {
            Self::Embeddings => "makes no embeddings",
            Self::Relevance => "scores no pairs of texts and makes no embeddings",
        }
    }
}

/// The vectors of a request's prompts, in order, as the model gives them.
#[derive(Debug)]
pub(crate) struct PooledPrompts {
    pub(crate) vectors: Vec<Vec<f32>>,
    pub(crate) prompt_tokens: usize,
}

/// Cuts an input to its first tokens. The token that ends a text stays the last one: pooling of the
/// last token relies on it.
pub(crate) fn truncate_input(model: &ServedModel, tokens: &mut Vec<u32>, kept: usize) {
    let Some(&last) = tokens.last().filter(|_| tokens.len() > kept) else { return };
    tokens.truncate(kept);
    if let Some(end) = tokens.last_mut().filter(|_| model.text.end_of_generation().contains(&last)) {
        *end = last;
    }
}

/// The first `dimensions` values. `normalize`: scaled to length 1.
pub(crate) fn finish_embedding(mut values: Vec<f32>, dimensions: Option<u32>, normalize: bool) -> Vec<f32> {
    values.truncate(dimensions.map_or(values.len(), |dimensions| dimensions as usize));
    let length = length_of(&values);
    if normalize && length > 0.0 {
        values.iter_mut().for_each(|value| *value = (f64::from(*value) / length) as f32);
    }
    values
}

/// In a fixed order, so that each router gives the same bits.
pub(crate) fn length_of(values: &[f32]) -> f64 {
    values.iter().map(|&value| f64::from(value) * f64::from(value)).sum::<f64>().sqrt()
}

impl Generator {
    /// Checks that the model pools as the request needs it.
    pub(crate) fn check_pooled(
        &self,
        model: &ServedModel,
        wanted: PooledUse,
        access: &ModelAccess,
    ) -> Result<(), NotPooledError> {
        if wanted.is_served_by(model.description.pooling) {
            return Ok(());
        }
        let snapshots = self.registry.snapshot_for(access);
        let served = snapshots.iter().filter(|known| wanted.is_served_by(known.model.description.pooling));
        let mut known: Vec<String> = served.map(|known| known.model.name().to_owned()).collect();
        known.dedup();
        Err(NotPooledError { model: model.name().to_owned(), lacks: wanted.lacks(), known })
    }

    /// Pools each prompt of the request.
    pub(crate) async fn embed(&self, request: &GenerationRequest) -> Result<PooledPrompts, RequestRefusal> {
        let replies = self.admit_and_embed(request).await.inspect_err(|refusal| {
            request.origin().trace.record_refusal(refusal.reason());
            metrics::record_refusal(request.model.name(), request.class(), refusal.reason());
        })?;
        request.record_prompts();
        if let Some(log) = &self.usage_log {
            let usage = RequestUsage::begin(log, request);
            usage.record_cached(replies.iter().map(|reply| u64::from(reply.cached_tokens)).sum());
        }
        let prompt_tokens = request.prompts().map(<[u32]>::len).sum();
        Ok(PooledPrompts { vectors: replies.into_iter().map(|reply| reply.values).collect(), prompt_tokens })
    }

    async fn admit_and_embed(&self, request: &GenerationRequest) -> Result<Vec<EmbedReply>, RequestRefusal> {
        let deadline = self.deadline(request);
        let running = self.registry.capacity(request.model.key()).running_max as usize;
        let at_once = request.prompts().len().min(PROMPTS_AT_ONCE).min(running.max(1));
        let mut attempts = self.worker_attempts(request, at_once as u32);
        let mut replies: Vec<Option<EmbedReply>> = vec![None; request.prompts().len()];
        loop {
            let (model, permits) = attempts.next().await?;
            match self.embed_missing(request, &model, at_once, deadline, &mut replies).await {
                Ok(()) => return Ok(replies.into_iter().flatten().collect()),
                Err(refusal) => {
                    drop(permits);
                    attempts.refused(refusal).await?;
                }
            }
        }
    }

    async fn embed_missing(
        &self,
        request: &GenerationRequest,
        model: &ModelKey,
        at_once: usize,
        deadline: Instant,
        replies: &mut [Option<EmbedReply>],
    ) -> Result<(), RequestRefusal> {
        let mut missing = Vec::new();
        for (index, prompt) in request.prompts().enumerate().filter(|(index, _)| replies[*index].is_none()) {
            missing.push(async move { (index, self.embed_prompt(request, model, prompt, deadline).await) });
        }
        let mut calls = std::pin::pin!(stream::iter(missing).buffer_unordered(at_once));
        while let Some((index, reply)) = calls.next().await {
            replies[index] = Some(reply?);
        }
        Ok(())
    }

    /// Asks one worker after the other.
    async fn embed_prompt(
        &self,
        request: &GenerationRequest,
        key: &ModelKey,
        prompt: &[u32],
        deadline: Instant,
    ) -> Result<EmbedReply, RequestRefusal> {
        let quarantine = &self.dispatcher.quarantine;
        let content = quarantine.hasher.key_of_scored_prompt(key, prompt);
        let prefix = PromptPrefix::new(&request.params().cache_salt, prompt);
        let demand = StreamDemand {
            model: key,
            input_tokens: prompt.len() as u64,
            output_tokens_max: 0,
            prefix: &prefix,
            session: request.session(),
            spread_by_deaths: None,
        };
        let mut workers = WorkerSearch::new(quarantine, content, Some(deadline), None);
        let mut refusals = RefusalCollector::default();
        let place = |tried: &[_]| {
            let spread_by_deaths = quarantine.deaths_to_spread(content);
            self.registry.place_stream(&StreamDemand { spread_by_deaths, ..demand }, tried, None)
        };
        let trace = &request.origin().trace;
        let (logged, mut cause) = (trace.logged(request.model.name()), None);
        while let Some((mut placed, stay)) =
            workers.next(place, |placed: &PlacedStream| placed.worker.id).await?
        {
            let mut span = trace.worker_call(&placed.worker.name, cause);
            let call = self.embed_request(request, key, prompt, deadline);
            let outcome = match read_reply(&mut placed.worker, call, &span, deadline).await {
                Ok(reply) => {
                    stay.record_output(1);
                    return Ok(reply);
                }
                Err(status) => call_outcome(&placed.worker, &status, None, logged),
            };
            if let Some(failure) = outcome.failure() {
                span.fail(failure);
                cause = Some(failure);
            }
            let verdict = self.dispatcher.record_loss(&outcome, placed.worker.id, &stay, 0, logged);
            if let OpeningStep::Refuse(refusal) = refusals.handle(outcome, verdict) {
                return Err(refusal);
            }
        }
        Err(refusals.into_refusal().unwrap_or_else(|| RequestRefusal::no_worker(&key.name)))
    }

    fn embed_request(
        &self,
        request: &GenerationRequest,
        key: &ModelKey,
        prompt: &[u32],
        deadline: Instant,
    ) -> EmbedRequest {
        let time_left = deadline.saturating_duration_since(Instant::now());
        EmbedRequest {
            request_id: request.origin().trace.id().to_string(),
            fingerprint: Bytes::copy_from_slice(&key.fingerprint.0),
            tokens: prompt.to_vec(),
            pooling: request.model.description.pooling.into(),
            // 0 means no limit.
            deadline_ms: (time_left.as_millis() as u64).max(1),
            tenant: self.tenants.number(&request.origin().tenant),
            priority: request.params().priority,
            cache_salt: request.params().cache_salt.clone(),
        }
    }
}

async fn read_reply(
    worker: &mut WorkerHandle,
    call: EmbedRequest,
    span: &Span,
    deadline: Instant,
) -> Result<EmbedReply, Status> {
    match timeout_at(deadline, worker.client.embed(traced_call(call, span))).await {
        Ok(reply) => Ok(reply?.into_inner()),
        Err(_) => Err(Status::deadline_exceeded("the deadline passed")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_embedding_has_length_1_after_it_was_cut() {
        assert_eq!(finish_embedding(vec![3.0, 4.0, 12.0], Some(2), true), [0.6, 0.8]);
        assert_eq!(finish_embedding(vec![3.0, 4.0], None, false), [3.0, 4.0]);
        assert_eq!(finish_embedding(vec![0.0, 0.0], None, true), [0.0, 0.0]);
    }

    #[test]
    fn a_classifier_makes_no_embeddings_and_embeddings_score_pairs() {
        let served = |wanted: PooledUse| {
            [Pooling::Unspecified, Pooling::Mean, Pooling::Last, Pooling::Rank]
                .map(|pooling| wanted.is_served_by(pooling))
        };
        assert_eq!(served(PooledUse::Embeddings), [false, true, true, false]);
        assert_eq!(served(PooledUse::Relevance), [false, true, true, true]);
    }
}
