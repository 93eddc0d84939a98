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
use crate::registry::{PlacedStream, WorkerHandle, WorkerRegistry};
use crate::routing::WorkerId;
use crate::wire::{ChoiceCall, WorkerFrame, is_from_worker, retry_after};

/// A worker answers between two steps, and a step of a large model on few cores takes seconds. A
/// process that hangs altogether answers no ping, so its connection breaks earlier.
const ADMISSION_WAIT: Duration = Duration::from_secs(60);
/// How often a resumed choice asks again while every worker is busy.
const BUSY_RETRY: Duration = Duration::from_millis(100);

/// A full worker's queue moves within seconds, and a lost worker restarts within one second.
pub(crate) const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Metadata in which a worker names the field that it refuses, and the limit that was reached.
const FIELD_METADATA: &str = "ballast-field";
const LIMIT_METADATA: &str = "ballast-bound";

/// The stream of a choice on the worker that admitted it.
#[derive(Debug)]
pub(crate) struct OpenStream {
    pub(crate) placed: PlacedStream,
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

/// Tries each worker of the call's model once. `placed` is the first try, if the caller has placed
/// the stream already.
pub(crate) async fn open_stream(
    registry: &Arc<WorkerRegistry>,
    call: &ChoiceCall,
    progress: &ChoiceProgress,
    deadline: Option<Instant>,
    mut placed: Option<PlacedStream>,
) -> Result<OpenStream, RequestRefusal> {
    let mut tried = Vec::new();
    let mut refusal = RequestRefusal::NoWorker;
    let mut place_next = |tried: &[WorkerId]| {
        let first = placed.take();
        first.or_else(|| {
            let prefix = call.prefix();
            registry.place_stream(&call.demand(progress.output().len(), &prefix), tried, None)
        })
    };
    while let Some(mut placed) = place_next(&tried) {
        tried.push(placed.worker.id);
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
        let status = match tokio::time::timeout(ADMISSION_WAIT, admission).await {
            Ok(Ok((Some(Ok(WorkerFrame::Admitted)), frames))) => return Ok(OpenStream { placed, frames }),
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
        let grammar = call.params.grammar.as_ref();
        if let Some(temporary) = classify_refusal(registry, &placed.worker, &status, grammar)? {
            refusal = temporary;
        }
    }
    Err(refusal)
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

/// Opens the stream of a choice that lost its worker. Tries all workers again and again until one
/// admits the choice or [`WAIT_FOR_WORKER`] is over. `cause` is why the worker was lost.
pub(crate) async fn reopen_stream(
    registry: &Arc<WorkerRegistry>,
    call: &ChoiceCall,
    progress: &ChoiceProgress,
    deadline: Option<Instant>,
    cause: String,
) -> Result<OpenStream, ChoiceError> {
    let mut changes = registry.subscribe();
    let give_up = Instant::now() + WAIT_FOR_WORKER;
    loop {
        changes.mark_unchanged();
        let wait = match open_stream(registry, call, progress, deadline, None).await {
            Ok(stream) => return Ok(stream),
            Err(RequestRefusal::NoWorker) => WAIT_FOR_WORKER,
            Err(RequestRefusal::Overloaded { .. } | RequestRefusal::TenantLimit { .. }) => BUSY_RETRY,
            Err(RequestRefusal::DeadlineExceeded) => return Err(ChoiceError::DeadlineExceeded),
            Err(refusal) => return Err(ChoiceError::WorkerError { detail: refusal.to_string() }),
        };
        let wake = give_up.min(Instant::now() + wait);
        tokio::select! {
            // The sender lives as long as the registry.
            _ = changes.changed() => {}
            () = tokio::time::sleep_until(wake) => {}
        }
        if Instant::now() >= give_up {
            return Err(ChoiceError::NoWorker { detail: cause });
        }
    }
}
