// SPDX-License-Identifier: Apache-2.0

//! Opens the stream of a choice on a worker: tries the workers in the order of the routing policy,
//! and returns a named refusal if all refuse.

use std::sync::Arc;
use std::time::Duration;

use proto::worker::v1::GenerateFrame;
use tokio::time::Instant;
use tonic::{Code, Streaming};

use crate::admission::{AdmissionError, CapacityExceeded};
use crate::failover::{ChoiceError, ChoiceProgress, WAIT_FOR_WORKER};
use crate::params::RequestGrammar;
use crate::quarantine::{LossVerdict, QuarantineEntry};
use crate::quarantine_control::{LoggedRequest, QuarantineController, StreamStay};
use crate::registry::{PlacedStream, WorkerHandle, WorkerRegistry};
use crate::routing::WorkerId;
use crate::wire::{ChoiceCall, WorkerFrame, is_from_worker, may_have_arrived, retry_after};
use crate::worker_search::WorkerSearch;

/// A worker answers between two steps, and a step of a large model on few cores takes seconds. A
/// process that hangs altogether answers no ping, so its connection breaks earlier.
const ADMISSION_WAIT: Duration = Duration::from_secs(60);
/// How often a resumed choice asks again while every worker is busy.
const BUSY_RETRY: Duration = Duration::from_millis(100);
/// The wait for a worker is divided into steps, so that a pause of this process is not counted.
const WAIT_STEP: Duration = Duration::from_secs(1);

/// A full worker's queue moves within seconds, and a lost worker restarts within one second.
pub(crate) const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Metadata in which a worker names the field that it refuses, and the limit that was reached.
const FIELD_METADATA: &str = "ballast-field";
const LIMIT_METADATA: &str = "ballast-bound";

/// The stream of a choice on the worker that admitted it.
#[derive(Debug)]
pub(crate) struct OpenStream {
    pub(crate) placed: PlacedStream,
    pub(crate) stay: StreamStay,
    pub(crate) frames: Streaming<GenerateFrame>,
}

/// Why a request is refused. The router refuses a request before it sends any byte of the response.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RequestRefusal {
    #[error("no worker of this model is ready")]
    NoWorker,
    #[error("overloaded: {detail}")]
    Overloaded { detail: String, retry_after: Duration },
    /// The tenant reached its own limit. Requests of other tenants are still admitted.
    #[error("too many requests: {detail}")]
    TenantLimit { detail: String, retry_after: Duration },
    #[error("no worker can serve the request: {0}")]
    CapacityExceeded(#[from] CapacityExceeded),
    #[error("{detail}")]
    Invalid { detail: String },
    #[error("`{param}`: {detail}")]
    Grammar { param: &'static str, detail: String },
    #[error("the request's deadline passed before it was admitted")]
    DeadlineExceeded,
    #[error("the worker failed: {detail}")]
    WorkerError { detail: String },
    #[error(
        "requests with this content ended {} workers and are refused for {} s; other requests are served",
        .0.losses, .0.remaining.as_secs()
    )]
    Quarantined(QuarantineEntry),
}

impl From<AdmissionError> for RequestRefusal {
    fn from(error: AdmissionError) -> Self {
        let detail = error.to_string();
        match error {
            AdmissionError::NoWorker => RequestRefusal::NoWorker,
            AdmissionError::DeadlineExceeded => RequestRefusal::DeadlineExceeded,
            AdmissionError::QueueFull { retry_after, .. }
            | AdmissionError::TooManyStreams { retry_after, .. } => {
                RequestRefusal::Overloaded { detail, retry_after }
            }
            AdmissionError::TenantQueueFull { retry_after, .. } => {
                RequestRefusal::TenantLimit { detail, retry_after }
            }
        }
    }
}

impl RequestRefusal {
    /// Label value for metrics.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            RequestRefusal::NoWorker => "no_worker",
            RequestRefusal::Overloaded { .. } => "overloaded",
            RequestRefusal::TenantLimit { .. } => "tenant_limit",
            RequestRefusal::CapacityExceeded(_) => "capacity_exceeded",
            RequestRefusal::Invalid { .. } | RequestRefusal::Grammar { .. } => "invalid",
            RequestRefusal::DeadlineExceeded => "deadline",
            RequestRefusal::WorkerError { .. } => "failed",
            RequestRefusal::Quarantined(_) => "quarantined",
        }
    }

    /// When the client should try again. `None` if the refusal is permanent.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        match self {
            RequestRefusal::Overloaded { retry_after, .. }
            | RequestRefusal::TenantLimit { retry_after, .. } => Some(*retry_after),
            RequestRefusal::NoWorker => Some(RETRY_AFTER),
            _ => None,
        }
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
    ) -> Result<OpenStream, RequestRefusal> {
        let mut workers = WorkerSearch::new(&self.quarantine, call.content, deadline, placed);
        let mut refusal = RequestRefusal::NoWorker;
        let place = |tried: &[WorkerId]| {
            let prefix = call.prefix();
            self.registry.place_stream(&call.demand(progress.output().len(), &prefix), tried, None)
        };
        while let Some((mut placed, stay)) = workers.next(place, |placed| placed.worker.id).await? {
            let time_left = match deadline.map(|at| at.saturating_duration_since(Instant::now())) {
                Some(Duration::ZERO) => return Err(RequestRefusal::DeadlineExceeded),
                time_left => time_left,
            };
            let request = call.to_wire(progress, time_left);
            let admission = async {
                let mut frames = placed.worker.client.generate(request).await?.into_inner();
                let first = frames.message().await?.map(WorkerFrame::try_from);
                Ok::<_, tonic::Status>((first, frames))
            };
            let request = LoggedRequest { request_id: &call.request_id, model: &call.model.name };
            let output_tokens = progress.output().len();
            let status = match service::patience::timeout(ADMISSION_WAIT, admission).await {
                Ok(Ok((Some(Ok(WorkerFrame::Admitted)), frames))) => {
                    return Ok(OpenStream { placed, stay, frames });
                }
                Ok(Ok((None, _))) => {
                    tracing::warn!(worker = %placed.worker.name, "worker lost: its stream ended without a frame");
                    self.registry.remove(placed.worker.id);
                    record_loss(&stay, output_tokens, request)?;
                    continue;
                }
                Ok(Ok(_)) => {
                    let detail = format!("the first frame of {} is not `admitted`", placed.worker.name);
                    return Err(RequestRefusal::WorkerError { detail });
                }
                Ok(Err(status)) => status,
                Err(_) => {
                    tracing::warn!(worker = %placed.worker.name, "no answer to a request within {ADMISSION_WAIT:?}");
                    continue;
                }
            };
            let lost = self.check_loss(&stay, &status, output_tokens, request);
            let grammar = call.params.grammar.as_ref();
            let temporary = classify_refusal(&self.registry, &placed.worker, &status, grammar)?;
            lost?;
            refusal = temporary.unwrap_or(refusal);
        }
        Err(refusal)
    }

    /// If `status` says that the worker died while it had the request, reports that to the
    /// quarantine. `Err`: the request is in quarantine now.
    pub(crate) fn check_loss(
        &self,
        stay: &StreamStay,
        status: &tonic::Status,
        output_tokens: usize,
        request: LoggedRequest<'_>,
    ) -> Result<(), RequestRefusal> {
        if is_from_worker(status) || !may_have_arrived(status) {
            return Ok(());
        }
        record_loss(stay, output_tokens, request)
    }

    /// Opens the stream of a choice that lost its worker. Tries all workers again and again until
    /// one admits the choice or [`WAIT_FOR_WORKER`] is over. `cause` is why the worker was lost.
    pub(crate) async fn reopen_stream(
        &self,
        call: &ChoiceCall,
        progress: &ChoiceProgress,
        deadline: Option<Instant>,
        cause: String,
    ) -> Result<OpenStream, ChoiceError> {
        let mut changes = self.registry.subscribe();
        let mut waited = Duration::ZERO;
        loop {
            changes.mark_unchanged();
            let began = Instant::now();
            let wait = match self.open_stream(call, progress, deadline, None).await {
                Ok(stream) => return Ok(stream),
                Err(RequestRefusal::NoWorker) => WAIT_STEP,
                Err(RequestRefusal::Overloaded { .. } | RequestRefusal::TenantLimit { .. }) => BUSY_RETRY,
                Err(RequestRefusal::DeadlineExceeded) => return Err(ChoiceError::DeadlineExceeded),
                Err(RequestRefusal::Quarantined(QuarantineEntry { losses, .. })) => {
                    return Err(ChoiceError::Quarantined { losses, detail: cause });
                }
                Err(refusal) => return Err(ChoiceError::WorkerError { detail: refusal.to_string() }),
            };
            let asked = Instant::now();
            tokio::select! {
                // The sender lives as long as the registry.
                _ = changes.changed() => {}
                () = tokio::time::sleep(wait) => {}
            }
            // If this process was stopped meanwhile, only one step counts.
            waited += asked.duration_since(began) + asked.elapsed().min(WAIT_STEP);
            if waited >= WAIT_FOR_WORKER {
                return Err(ChoiceError::NoWorker { detail: cause });
            }
        }
    }
}

/// Reports a dead worker to the quarantine. `Err`: the request is in quarantine now.
fn record_loss(
    stay: &StreamStay,
    output_tokens: usize,
    request: LoggedRequest<'_>,
) -> Result<(), RequestRefusal> {
    match stay.record_loss(output_tokens, request) {
        LossVerdict::Resume => Ok(()),
        LossVerdict::Quarantine { entry, .. } => Err(RequestRefusal::Quarantined(entry)),
    }
}

/// What the refusal of a worker means.
///
/// `Err`: every worker would refuse the request. `Ok`: another worker may admit it. If none does,
/// the router answers with the refusal in `Ok`.
pub(crate) fn classify_refusal(
    registry: &WorkerRegistry,
    worker: &WorkerHandle,
    status: &tonic::Status,
    grammar: Option<&RequestGrammar>,
) -> Result<Option<RequestRefusal>, RequestRefusal> {
    let detail = status.message().to_owned();
    let has_metadata =
        |key: &str, value: &str| status.metadata().get(key).is_some_and(|found| found == value);
    match status.code() {
        _ if !is_from_worker(status) => {
            tracing::warn!(worker = %worker.name, error = service::exit::one_line(status), "worker lost");
            registry.remove(worker.id);
            Ok(None)
        }
        Code::ResourceExhausted => {
            let retry_after = retry_after(status).unwrap_or(RETRY_AFTER);
            Ok(Some(match has_metadata(LIMIT_METADATA, "tenant") {
                true => RequestRefusal::TenantLimit { detail, retry_after },
                false => RequestRefusal::Overloaded { detail, retry_after },
            }))
        }
        // The worker drains, attaches, or has another fingerprint. Its link will notice.
        Code::Unavailable | Code::FailedPrecondition | Code::Cancelled => Ok(None),
        Code::InvalidArgument => Err(match grammar {
            Some(grammar) if has_metadata(FIELD_METADATA, "grammar") => {
                RequestRefusal::Grammar { param: grammar.param, detail }
            }
            _ => RequestRefusal::Invalid { detail },
        }),
        Code::DeadlineExceeded => Err(RequestRefusal::DeadlineExceeded),
        code => Err(RequestRefusal::WorkerError { detail: format!("{code:?}: {detail}") }),
    }
}

#[cfg(test)]
mod tests {
    use proto::worker::v1::worker_client::WorkerClient;
    use tonic::Status;
    use tonic::transport::Endpoint;

    use super::*;
    use crate::routing::RoutingMode;

    /// What a refusal of a worker with this status means.
    fn classify(
        status: &Status,
        grammar: Option<&RequestGrammar>,
    ) -> Result<Option<RequestRefusal>, RequestRefusal> {
        let client = WorkerClient::new(Endpoint::from_static("http://localhost").connect_lazy());
        let worker = WorkerHandle { id: WorkerId(1), name: "worker-0".to_owned(), client };
        classify_refusal(&WorkerRegistry::new(RoutingMode::Packed), &worker, status, grammar)
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
