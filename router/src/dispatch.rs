//! Gets a choice admitted by a worker: the least loaded first, the next one if that refuses, a named refusal if all do.

use std::sync::Arc;
use std::time::Duration;

use proto::worker::v1::GenerateFrame;
use tokio::time::Instant;
use tonic::{Code, Streaming};

use crate::admission::{NeverFits, Refused};
use crate::fleet::{Fleet, Peer, Place};
use crate::params::RequestGrammar;
use crate::resume::{Failure, Progress, WAIT_FOR_WORKER};
use crate::wire::{Call, Frame, is_the_workers_word, retry_after};

/// A worker answers between two steps, and a step of a large model on few cores takes seconds. (A process that hangs
/// altogether answers no ping, and its connection breaks earlier.)
const ADMISSION_WAIT: Duration = Duration::from_secs(60);
/// While every worker is busy, a resumed choice asks again this often.
const BUSY_RETRY: Duration = Duration::from_millis(100);

/// A full worker's queue moves within seconds, a lost worker is restarted within one.
pub(crate) const RETRY_AFTER: Duration = Duration::from_secs(1);

/// By this metadata a worker says which field it refuses, and whose bound was reached.
const FIELD: &str = "ballast-field";
const BOUND: &str = "ballast-bound";

/// A stream that a worker has admitted, and the choice's place there.
#[derive(Debug)]
pub(crate) struct Attempt {
    pub(crate) place: Place,
    pub(crate) frames: Streaming<GenerateFrame>,
}

/// Why nobody takes a request. Decided before a byte of the response is sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("no worker of this model is ready")]
    NoWorker,
    #[error("overloaded: {detail}")]
    Overloaded { detail: String, retry_after: Duration },
    /// The tenant's own bound: others still get in.
    #[error("too many requests: {detail}")]
    TenantLimit { detail: String, retry_after: Duration },
    #[error("the request can never be served: {0}")]
    NeverFits(#[from] NeverFits),
    #[error("{detail}")]
    Invalid { detail: String },
    #[error("`{param}`: {detail}")]
    Grammar { param: &'static str, detail: String },
    #[error("the request's deadline passed before it was admitted")]
    Deadline,
    #[error("the worker failed: {detail}")]
    Failed { detail: String },
}

impl From<Refused> for Refusal {
    fn from(refused: Refused) -> Self {
        let detail = refused.to_string();
        match refused {
            Refused::NoWorker => Refusal::NoWorker,
            Refused::Deadline => Refusal::Deadline,
            Refused::QueueFull { retry_after, .. } | Refused::StreamsFull { retry_after, .. } => {
                Refusal::Overloaded { detail, retry_after }
            }
            Refused::TenantQueueFull { retry_after, .. } => Refusal::TenantLimit { detail, retry_after },
        }
    }
}

impl Refusal {
    /// For metrics.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Refusal::NoWorker => "no_worker",
            Refusal::Overloaded { .. } => "overloaded",
            Refusal::TenantLimit { .. } => "tenant_limit",
            Refusal::NeverFits(_) => "never_fits",
            Refusal::Invalid { .. } | Refusal::Grammar { .. } => "invalid",
            Refusal::Deadline => "deadline",
            Refusal::Failed { .. } => "failed",
        }
    }

    /// When to come again, for those that pass.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        match self {
            Refusal::Overloaded { retry_after, .. } | Refusal::TenantLimit { retry_after, .. } => {
                Some(*retry_after)
            }
            Refusal::NoWorker => Some(RETRY_AFTER),
            _ => None,
        }
    }
}

/// One round over the workers of the call's model, from the one that has `place` on.
pub(crate) async fn open(
    fleet: &Arc<Fleet>,
    call: &Call,
    progress: &Progress,
    deadline: Option<Instant>,
    mut place: Option<Place>,
) -> Result<Attempt, Refusal> {
    let mut tried = Vec::new();
    let mut refusal = Refusal::NoWorker;
    while let Some(mut place) = place.take().or_else(|| fleet.place(&call.model, &tried, None)) {
        tried.push(place.peer.worker);
        let time_left = match deadline.map(|at| at.saturating_duration_since(Instant::now())) {
            Some(Duration::ZERO) => return Err(Refusal::Deadline),
            time_left => time_left,
        };
        let request = call.to_wire(progress, time_left);
        let admission = async {
            let mut frames = place.peer.client.generate(request).await?.into_inner();
            let first = frames.message().await?.map(Frame::try_from);
            Ok::<_, tonic::Status>((first, frames))
        };
        let status = match tokio::time::timeout(ADMISSION_WAIT, admission).await {
            Ok(Ok((Some(Ok(Frame::Admitted)), frames))) => return Ok(Attempt { place, frames }),
            Ok(Ok(_)) => {
                let detail = format!("{} did not begin its answer with `admitted`", place.peer.worker_name);
                return Err(Refusal::Failed { detail });
            }
            Ok(Err(status)) => status,
            Err(_) => {
                tracing::warn!(worker = %place.peer.worker_name, "no answer to a request within {ADMISSION_WAIT:?}");
                continue;
            }
        };
        if let Some(passing) = verdict(fleet, &place.peer, &status, call.params.grammar.as_ref())? {
            refusal = passing;
        }
    }
    Err(refusal)
}

/// What a worker's refusal means. `Ok`: another one may do it, and this is to be said if none does; `Err`: all would say so.
pub(crate) fn verdict(
    fleet: &Fleet,
    peer: &Peer,
    status: &tonic::Status,
    grammar: Option<&RequestGrammar>,
) -> Result<Option<Refusal>, Refusal> {
    let detail = status.message().to_owned();
    let says = |key: &str, value: &str| status.metadata().get(key).is_some_and(|said| said == value);
    match status.code() {
        _ if !is_the_workers_word(status) => {
            tracing::warn!(worker = %peer.worker_name, error = service::exit::one_line(status), "worker lost");
            fleet.leave(peer.worker);
            Ok(None)
        }
        Code::ResourceExhausted => {
            let retry_after = retry_after(status).unwrap_or(RETRY_AFTER);
            Ok(Some(match says(BOUND, "tenant") {
                true => Refusal::TenantLimit { detail, retry_after },
                false => Refusal::Overloaded { detail, retry_after },
            }))
        }
        // It drains, attaches, or is another one than we took it for: its link will find out.
        Code::Unavailable | Code::FailedPrecondition | Code::Cancelled => Ok(None),
        Code::InvalidArgument => Err(match grammar {
            Some(grammar) if says(FIELD, "grammar") => Refusal::Grammar { param: grammar.param, detail },
            _ => Refusal::Invalid { detail },
        }),
        Code::DeadlineExceeded => Err(Refusal::Deadline),
        code => Err(Refusal::Failed { detail: format!("{code:?}: {detail}") }),
    }
}

/// For a choice that lost its worker to `cause`: rounds until one takes it or [`WAIT_FOR_WORKER`] is over.
pub(crate) async fn reopen(
    fleet: &Arc<Fleet>,
    call: &Call,
    progress: &Progress,
    deadline: Option<Instant>,
    cause: String,
) -> Result<Attempt, Failure> {
    let mut changes = fleet.changes();
    let give_up = Instant::now() + WAIT_FOR_WORKER;
    loop {
        changes.mark_unchanged();
        let wait = match open(fleet, call, progress, deadline, None).await {
            Ok(attempt) => return Ok(attempt),
            Err(Refusal::NoWorker) => WAIT_FOR_WORKER,
            Err(Refusal::Overloaded { .. } | Refusal::TenantLimit { .. }) => BUSY_RETRY,
            Err(Refusal::Deadline) => return Err(Failure::Deadline),
            Err(refusal) => return Err(Failure::Worker { detail: refusal.to_string() }),
        };
        let wake = give_up.min(Instant::now() + wait);
        tokio::select! {
            // The sender lives as long as the fleet.
            _ = changes.changed() => {}
            () = tokio::time::sleep_until(wake) => {}
        }
        if Instant::now() >= give_up {
            return Err(Failure::NoWorker { detail: cause });
        }
    }
}
