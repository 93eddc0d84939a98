// SPDX-License-Identifier: Apache-2.0

//! Opens the stream of a choice on a worker: tries the workers in the order of the routing policy,
//! and returns a named refusal if all refuse.

use std::sync::Arc;
use std::time::Duration;

use proto::worker::v1::GenerateFrame;
use tokio::time::Instant;
use tonic::{Code, Streaming};
use traces::Span;

use crate::failover::{ChoiceError, ChoiceProgress};
use crate::opening::{CallOutcome, OpeningStep, RETRY_AFTER, RefusalCollector, Reopening, RequestRefusal};
use crate::params::RequestGrammar;
use crate::quarantine::{KILLED_TOGETHER, LossVerdict};
use crate::quarantine_control::{QuarantineController, StreamStay};
use crate::registry::{PlacedStream, WorkerHandle, WorkerRegistry};
use crate::request_trace::LoggedRequest;
use crate::routing::{StreamDemand, WorkerId};
use crate::wire::{ChoiceCall, WorkerFrame, is_from_worker, may_have_arrived, retry_after, traced_call};
use crate::worker_search::WorkerSearch;

/// A worker answers between two steps, and a step of a large model on few cores takes seconds. A
/// process that hangs altogether answers no ping, so its connection breaks earlier.
const ADMISSION_WAIT: Duration = Duration::from_secs(60);
/// Metadata in which a worker names the field that it refuses, and the limit that was reached.
const FIELD_METADATA: &str = "ballast-field";
const LIMIT_METADATA: &str = "ballast-bound";

/// The stream of a choice on the worker that admitted it.
#[derive(Debug)]
pub(crate) struct OpenStream {
    pub(crate) placed: PlacedStream,
    pub(crate) stay: StreamStay,
    pub(crate) frames: Streaming<GenerateFrame>,
    /// The call of the worker.
    pub(crate) span: Span,
}

/// How a choice has lost its worker in mid-stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LostStream<'a> {
    /// For its trace.
    pub(crate) cause: &'a str,
    pub(crate) at: Instant,
}

impl LostStream<'_> {
    /// Whether the next worker may have died of what the last one died of. A choice that ends
    /// workers in mid-stream ends the next one in a step, after it was admitted. So one that is
    /// sent to the next worker at once, and is not admitted there, has not ended that one. If the
    /// quarantine heard of this loss, the choice would have to wait before it tries a third worker.
    fn is_recent(&self) -> bool {
        self.at.elapsed() < KILLED_TOGETHER
    }
}

/// What opens streams and calls workers. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Dispatcher {
    pub(crate) registry: Arc<WorkerRegistry>,
    pub(crate) quarantine: Arc<QuarantineController>,
}

impl Dispatcher {
    /// Tries each worker of the call's model once. `placed` is the first try, if the caller has
    /// placed the stream already.
    pub(crate) async fn open_stream(
        &self,
        call: &ChoiceCall,
        progress: &ChoiceProgress,
        deadline: Option<Instant>,
        placed: Option<PlacedStream>,
        lost: Option<LostStream<'_>>,
    ) -> Result<OpenStream, RequestRefusal> {
        let mut cause = lost.map(|lost| lost.cause);
        let mut workers = WorkerSearch::new(&self.quarantine, call.content, deadline, placed);
        let mut refusals = RefusalCollector::default();
        let place = |tried: &[WorkerId]| {
            let demand = call.demand(progress.output().len());
            let spread_by_deaths = self.quarantine.deaths_to_spread(call.content);
            self.registry.place_stream(&StreamDemand { spread_by_deaths, ..demand }, tried, None)
        };
        while let Some((mut placed, stay)) = workers.next(place, |placed| placed.worker.id).await? {
            let time_left = match deadline.map(|at| at.saturating_duration_since(Instant::now())) {
                Some(Duration::ZERO) => return Err(RequestRefusal::DeadlineExceeded),
                time_left => time_left,
            };
            let is_after_death = lost.is_some_and(|lost| lost.is_recent());
            let mut span = call.trace.worker_call(&placed.worker.name, cause);
            let generation = call.to_wire(progress, time_left);
            let admission = async {
                let client = &mut placed.worker.client;
                let opened = match call.params.beams {
                    None => client.generate(traced_call(generation, &span)).await,
                    Some(beams) => {
                        let search = beams.to_wire(generation, call.params.n);
                        client.search_beams(traced_call(search, &span)).await
                    }
                };
                let mut frames = opened?.into_inner();
                let first = frames.message().await?.map(WorkerFrame::try_from);
                Ok::<_, tonic::Status>((first, frames))
            };
            let worker = &placed.worker.name;
            let request = call.logged();
            let (request_id, trace_id) = (request.request_id, request.trace_id());
            let (outcome, frames) = match service::patience::timeout(ADMISSION_WAIT, admission).await {
                Ok(Ok((Some(Ok(WorkerFrame::Admitted)), frames))) => (CallOutcome::Admitted, Some(frames)),
                Ok(Ok((None, _))) => {
                    tracing::warn!(%request_id, trace_id, %worker, "worker lost: its stream ended without a frame");
                    (CallOutcome::WorkerDied { had_request: true }, None)
                }
                Ok(Ok(_)) => {
                    let detail = format!("the first frame of {worker} is not `admitted`");
                    (CallOutcome::Refused(RequestRefusal::WorkerError { detail }), None)
                }
                Ok(Err(status)) => {
                    (call_outcome(&placed.worker, &status, call.params.grammar.as_ref(), request), None)
                }
                Err(_) => {
                    tracing::warn!(%request_id, trace_id, %worker, "no answer to a request within {ADMISSION_WAIT:?}");
                    (CallOutcome::NoAnswer, None)
                }
            };
            let outcome = match outcome {
                CallOutcome::WorkerDied { had_request } => {
                    CallOutcome::WorkerDied { had_request: had_request && !is_after_death }
                }
                outcome => outcome,
            };
            let verdict =
                self.record_loss(&outcome, placed.worker.id, &stay, progress.output().len(), request);
            if let Some(failure) = outcome.failure() {
                span.fail(failure);
                cause = Some(failure);
            }
            match (refusals.handle(outcome, verdict), frames) {
                (OpeningStep::Open, Some(frames)) => return Ok(OpenStream { placed, stay, frames, span }),
                (OpeningStep::Refuse(refusal), _) => return Err(refusal),
                (OpeningStep::TryNext | OpeningStep::Open, _) => {}
            }
        }
        Err(refusals.into_refusal().unwrap_or_else(|| RequestRefusal::no_worker(&call.model.name)))
    }

    /// If the worker died, removes it, and asks the quarantine whether the request may have killed
    /// it.
    pub(crate) fn record_loss(
        &self,
        outcome: &CallOutcome,
        worker: WorkerId,
        stay: &StreamStay,
        output_tokens: usize,
        request: LoggedRequest<'_>,
    ) -> LossVerdict {
        let CallOutcome::WorkerDied { had_request } = outcome else { return LossVerdict::Resume };
        self.registry.remove(worker);
        match had_request {
            true => stay.record_loss(output_tokens, request),
            false => LossVerdict::Resume,
        }
    }

    /// Opens the stream of a choice that lost its worker. Tries all workers again and again until
    /// one admits the choice, its deadline passes, or it has waited for `limit`. `cause` is why the
    /// worker was lost.
    pub(crate) async fn reopen_stream(
        &self,
        call: &ChoiceCall,
        progress: &ChoiceProgress,
        deadline: Option<Instant>,
        cause: String,
        limit: impl Fn() -> Duration,
    ) -> Result<OpenStream, ChoiceError> {
        let mut changes = self.registry.subscribe();
        let at = Instant::now();
        let mut reopening = Reopening::new(call.model.name.clone(), cause.clone());
        loop {
            changes.mark_unchanged();
            let began = Instant::now();
            let lost = Some(LostStream { cause: &cause, at });
            let wait = match self.open_stream(call, progress, deadline, None, lost).await {
                Ok(stream) => return Ok(stream),
                Err(refusal) => reopening.refused(refusal)?,
            };
            let asked = Instant::now();
            let retry = deadline.map_or(asked + wait, |deadline| deadline.min(asked + wait));
            tokio::select! {
                // The sender lives as long as the registry.
                _ = changes.changed() => {}
                () = tokio::time::sleep_until(retry) => {}
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(ChoiceError::DeadlineExceeded);
            }
            reopening.count_wait(asked.duration_since(began), asked.elapsed(), limit())?;
        }
    }
}

/// What the status of a worker's answer means.
pub(crate) fn call_outcome(
    worker: &WorkerHandle,
    status: &tonic::Status,
    grammar: Option<&RequestGrammar>,
    request: LoggedRequest<'_>,
) -> CallOutcome {
    let detail = status.message().to_owned();
    let has_metadata =
        |key: &str, value: &str| status.metadata().get(key).is_some_and(|found| found == value);
    match status.code() {
        _ if !is_from_worker(status) => {
            let error = service::exit::one_line(status);
            let (request_id, trace_id) = (request.request_id, request.trace_id());
            tracing::warn!(%request_id, trace_id, worker = %worker.name, error, "worker lost");
            CallOutcome::WorkerDied { had_request: may_have_arrived(status) }
        }
        Code::ResourceExhausted => {
            let retry_after = retry_after(status).unwrap_or(RETRY_AFTER);
            CallOutcome::Full(match has_metadata(LIMIT_METADATA, "tenant") {
                true => RequestRefusal::TenantLimit { detail, retry_after },
                false => RequestRefusal::Overloaded { detail, retry_after },
            })
        }
        Code::Unavailable | Code::FailedPrecondition | Code::Cancelled => CallOutcome::NotServing,
        Code::InvalidArgument => CallOutcome::Refused(match grammar {
            Some(grammar) if has_metadata(FIELD_METADATA, "grammar") => {
                RequestRefusal::Grammar { param: grammar.param, detail }
            }
            _ => RequestRefusal::Invalid { detail },
        }),
        Code::DeadlineExceeded => CallOutcome::Refused(RequestRefusal::DeadlineExceeded),
        code => CallOutcome::Refused(RequestRefusal::WorkerError { detail: format!("{code:?}: {detail}") }),
    }
}

#[cfg(test)]
mod tests {
    use proto::worker::v1::worker_client::WorkerClient;
    use tonic::Status;
    use tonic::transport::Endpoint;
    use traces::TraceContext;

    use super::*;
    use crate::request_trace::RequestTrace;

    /// What a refusal of a worker with this status means.
    fn classify(
        status: &Status,
        grammar: Option<&RequestGrammar>,
    ) -> Result<Option<RequestRefusal>, RequestRefusal> {
        let client = WorkerClient::new(Endpoint::from_static("http://localhost").connect_lazy());
        let worker = WorkerHandle { id: WorkerId(1), name: "worker-0".to_owned(), client };
        let mut refusals = RefusalCollector::default();
        let trace = RequestTrace::unrecorded("r".into(), TraceContext::default());
        let request = trace.logged("m");
        match refusals.handle(call_outcome(&worker, status, grammar, request), LossVerdict::Resume) {
            OpeningStep::Refuse(refusal) => Err(refusal),
            _ => Ok(refusals.into_refusal()),
        }
    }

    fn status(code: Code, metadata: &[(&'static str, &'static str)]) -> Status {
        let mut status = Status::new(code, "why");
        for (key, value) in metadata {
            status.metadata_mut().insert(*key, value.parse().unwrap());
        }
        status
    }

    #[tokio::test]
    async fn a_full_worker_is_a_temporary_refusal_with_its_pause() {
        let full = classify(&status(Code::ResourceExhausted, &[("retry-after", "7")]), None);
        let retry_after = Duration::from_secs(7);
        let detail = || "why".to_owned();
        assert_eq!(full, Ok(Some(RequestRefusal::Overloaded { detail: detail(), retry_after })));
        let tenant = status(Code::ResourceExhausted, &[(LIMIT_METADATA, "tenant")]);
        let limit = RequestRefusal::TenantLimit { detail: detail(), retry_after: RETRY_AFTER };
        assert_eq!(classify(&tenant, None), Ok(Some(limit)));
    }

    #[tokio::test]
    async fn a_worker_that_drains_leaves_the_request_to_others() {
        for code in [Code::Unavailable, Code::FailedPrecondition, Code::Cancelled] {
            assert_eq!(classify(&status(code, &[]), None), Ok(None), "{code:?}");
        }
    }

    #[tokio::test]
    async fn a_refusal_that_every_worker_would_repeat_is_final() {
        let grammar = RequestGrammar { param: "guided_regex", source: proto::v1::Grammar::default() };
        let detail = || "why".to_owned();
        let of_grammar = status(Code::InvalidArgument, &[(FIELD_METADATA, "grammar")]);
        let of_other_field = status(Code::InvalidArgument, &[(FIELD_METADATA, "prompt")]);
        let param = "guided_regex";
        assert_eq!(
            classify(&of_grammar, Some(&grammar)),
            Err(RequestRefusal::Grammar { param, detail: detail() })
        );
        for (refused, grammar) in [(&of_other_field, Some(&grammar)), (&of_grammar, None)] {
            assert_eq!(classify(refused, grammar), Err(RequestRefusal::Invalid { detail: detail() }));
        }
        let late = classify(&status(Code::DeadlineExceeded, &[]), None);
        assert_eq!(late, Err(RequestRefusal::DeadlineExceeded));
        let failed = classify(&status(Code::Internal, &[]), None);
        assert_eq!(failed, Err(RequestRefusal::WorkerError { detail: "Internal: why".to_owned() }));
    }
}
