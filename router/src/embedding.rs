// SPDX-License-Identifier: Apache-2.0

//! Embeddings of the prompts of a request. Workers pool with `Embed`, and generate nothing.
//!
//! 1. Each prompt that a worker computes holds a permit. With its vector it gives the permit back,
//!    and the next prompt waits for its turn among the requests of all tenants.
//! 2. A worker that is lost costs time only: another worker computes the same vector (I5).
//! 3. Dropping the future drops the calls, which cancels them on the workers.

mod charges;

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use futures::{StreamExt, stream};
use proto::v1::Pooling;
use proto::worker::v1::{EmbedReply, EmbedRequest};
use tokio::time::{Instant, sleep_until, timeout_at};
use tonic::Status;
use traces::Span;

use self::charges::InputCharges;
use crate::access::ModelAccess;
use crate::admission::{CapacityExceeded, ModelCapacity};
use crate::admission_control::StreamPermits;
use crate::dispatch::call_outcome;
use crate::generate::{GenerationRequest, Generator};
use crate::metrics;
use crate::model::ServedModel;
use crate::opening::{OpeningStep, RefusalCollector, RequestRefusal};
use crate::registry::{PlacedStream, WorkerHandle};
use crate::routing::{ModelKey, PromptPrefix, StreamDemand};
use crate::wire::traced_call;
use crate::worker_attempts::WorkerAttempts;
use crate::worker_search::WorkerSearch;

/// Prompts of one request that workers compute at once. Other requests get the rest of the workers.
const PROMPTS_AT_ONCE: usize = 16;
/// Values in the vectors of one reply. As JSON, a value takes about 12 bytes.
pub(crate) const EMBEDDED_VALUES_MAX: usize = 1 << 22;

/// How long a request that has begun waits before it asks a full queue again.
const FULL_QUEUE_WAIT: Duration = Duration::from_millis(100);

/// An entry of a field of the request, for errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InputName {
    pub(crate) field: &'static str,
    /// `None`: the field is the only entry.
    pub(crate) index: Option<usize>,
}

impl fmt::Display for InputName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.index {
            Some(index) => write!(f, "`{}[{index}]`", self.field),
            None => write!(f, "`{}`", self.field),
        }
    }
}

/// Why a request gets no vectors.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EmbedError {
    #[error(transparent)]
    Refused(#[from] RequestRefusal),
    #[error(
        "{input} makes a prompt of {tokens} tokens, which needs {needed} KV blocks of {block_tokens} tokens; the \
         largest KV cache of a worker has {blocks}: send a shorter text or give the workers a larger KV cache"
    )]
    KvCacheExceeded { input: InputName, tokens: usize, needed: u64, block_tokens: u32, blocks: u64 },
}

impl EmbedError {
    fn reason(&self) -> &'static str {
        match self {
            Self::Refused(refusal) => refusal.reason(),
            // As of a completion that exceeds the KV cache.
            Self::KvCacheExceeded { .. } => "capacity_exceeded",
        }
    }
}

/// A prompt of a request, for one call after the other.
#[derive(Clone, Copy)]
struct EmbedInput<'a> {
    request: &'a GenerationRequest,
    charges: &'a InputCharges<'a>,
    index: usize,
    prompt: &'a [u32],
    deadline: Instant,
}

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

    /// The most tokens of an input that the model and the largest worker of it can hold.
    pub(crate) fn input_tokens_max(&self, model: &ServedModel) -> u32 {
        let context = model.description.context_tokens;
        let capacity = self.registry.capacity(model.key());
        match u64::from(capacity.kv_block_tokens).saturating_mul(capacity.kv_blocks) {
            // No worker, or one that does not say.
            0 => context,
            kv_tokens => u32::try_from(kv_tokens).unwrap_or(u32::MAX).min(context),
        }
    }

    /// Pools each prompt of the request. `name_of` names the input of a prompt for errors.
    pub(crate) async fn embed(
        &self,
        request: &GenerationRequest,
        name_of: impl Fn(usize) -> InputName,
    ) -> Result<PooledPrompts, EmbedError> {
        let found = match self.check_inputs(request, name_of) {
            Ok(()) => {
                let charges = InputCharges::new(request, self.usage_log.as_ref());
                let replies = self.admit_and_embed(request, &charges).await;
                charges.finish(replies.is_ok());
                replies.map_err(EmbedError::from)
            }
            Err(error) => Err(error),
        };
        let replies = found.inspect_err(|error| {
            request.origin().trace.record_refusal(error.reason());
            metrics::record_refusal(request.model.name(), request.class(), error.reason());
        })?;
        let prompt_tokens = request.prompts().map(<[u32]>::len).sum();
        Ok(PooledPrompts { vectors: replies.into_iter().map(|reply| reply.values).collect(), prompt_tokens })
    }

    /// Refuses a request with a prompt that no worker can ever hold, before any is computed.
    fn check_inputs(
        &self,
        request: &GenerationRequest,
        name_of: impl Fn(usize) -> InputName,
    ) -> Result<(), EmbedError> {
        let capacity = self.registry.capacity(request.model.key());
        if capacity == ModelCapacity::default() {
            // The model has no worker now. Admission control decides how long to wait for one.
            return Ok(());
        }
        for (index, prompt) in request.prompts().enumerate() {
            match capacity.check(prompt.len() as u64, None, 1, 1) {
                Ok(()) => {}
                Err(CapacityExceeded::KvCache { needed, block_tokens, blocks, .. }) => {
                    let (input, tokens) = (name_of(index), prompt.len());
                    return Err(EmbedError::KvCacheExceeded { input, tokens, needed, block_tokens, blocks });
                }
                Err(exceeded) => return Err(RequestRefusal::from(exceeded).into()),
            }
        }
        Ok(())
    }

    async fn admit_and_embed(
        &self,
        request: &GenerationRequest,
        charges: &InputCharges<'_>,
    ) -> Result<Vec<EmbedReply>, RequestRefusal> {
        let deadline = self.deadline(request);
        let running = self.registry.capacity(request.model.key()).running_max as usize;
        let at_once = request.prompts().len().min(PROMPTS_AT_ONCE).min(running.max(1));
        let (model, mut permits) = self.worker_attempts(request, at_once as u32).next().await?;
        let mut calls = Vec::with_capacity(request.prompts().len());
        for (index, prompt) in request.prompts().enumerate() {
            let input = EmbedInput { request, charges, index, prompt, deadline };
            let admitted = (index < at_once).then(|| (model.clone(), permits.split(1)));
            calls.push(async move { (index, self.embed_input(input, admitted).await) });
        }
        let mut calls = std::pin::pin!(stream::iter(calls).buffer_unordered(at_once));
        let mut replies: Vec<Option<EmbedReply>> = vec![None; request.prompts().len()];
        while let Some((index, reply)) = calls.next().await {
            replies[index] = Some(reply?);
        }
        Ok(replies.into_iter().flatten().collect())
    }

    /// Computes one prompt with a permit of its own: the one in `admitted`, or another one.
    async fn embed_input(
        &self,
        input: EmbedInput<'_>,
        mut admitted: Option<(ModelKey, StreamPermits)>,
    ) -> Result<EmbedReply, RequestRefusal> {
        let mut attempts = self.worker_attempts(input.request, 1);
        loop {
            let (model, permit) = match admitted.take() {
                Some(admitted) => admitted,
                None => admit_again(&attempts, input.deadline).await?,
            };
            let refusal = match self.embed_prompt(input, &model).await {
                Ok(reply) => return Ok(reply),
                Err(refusal) => refusal,
            };
            drop(permit);
            attempts.refused(refusal).await?;
        }
    }

    /// Asks one worker after the other.
    async fn embed_prompt(
        &self,
        input: EmbedInput<'_>,
        key: &ModelKey,
    ) -> Result<EmbedReply, RequestRefusal> {
        let EmbedInput { request, charges, index, prompt, deadline } = input;
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
            let charge = charges.begin_call(index, prompt.len());
            let outcome = match read_reply(&mut placed.worker, call, &span, deadline).await {
                Ok(reply) => {
                    charge.answered(reply.cached_tokens);
                    stay.record_output(1);
                    return Ok(reply);
                }
                Err(status) => call_outcome(&placed.worker, &status, None, logged),
            };
            charge.failed(&outcome);
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

/// Waits for a permit of a request that has begun. What it has computed would be lost if a full
/// queue refused it, so it asks again until its deadline.
async fn admit_again(
    attempts: &WorkerAttempts<'_>,
    deadline: Instant,
) -> Result<(ModelKey, StreamPermits), RequestRefusal> {
    loop {
        match attempts.next().await {
            Err(RequestRefusal::Overloaded { .. } | RequestRefusal::TenantLimit { .. }) => {}
            admitted => return admitted,
        }
        let again = Instant::now() + FULL_QUEUE_WAIT;
        if again >= deadline {
            return Err(RequestRefusal::DeadlineExceeded);
        }
        sleep_until(again).await;
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
