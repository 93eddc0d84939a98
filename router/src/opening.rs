// SPDX-License-Identifier: Apache-2.0

//! Opening a stream: which worker a request asks next, and what the answer of a worker means. Plain
//! values, which [`crate::dispatch`] and [`crate::worker_search`] drive.
//!
//! ```text
//! WorkerTries -- Enter --> call --> CallOutcome --> RefusalCollector -- Open ----> stream
//!      ^  \-- Blocked, Exhausted                        \           \- Refuse -> client
//!      '------------------------------------------------- TryNext
//! stream lost --> Reopening: asks all workers again and again for a bounded time
//! ```

use std::sync::Arc;
use std::time::Duration;

use crate::admission::{AdmissionError, CapacityExceeded, waited_text};
use crate::failover::ChoiceError;
use crate::quarantine::{Blocked, LossVerdict, QuarantineEntry};
use crate::routing::WorkerId;

pub use crate::worker_outlook::WorkerForecast;

/// How often a resumed choice asks again while every worker is busy.
const BUSY_RETRY: Duration = Duration::from_millis(100);
/// The wait for a worker is divided into steps, so that a pause of this process is not counted.
const WAIT_STEP: Duration = Duration::from_secs(1);
/// How long a request waits for a worker without trials of other requests. Then it enters any.
const ISOLATION_WAIT: Duration = Duration::from_secs(30);
/// A full worker's queue moves within seconds, and a lost worker restarts within one second.
pub(crate) const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Why a request is refused. The router refuses a request before it sends any byte of the response.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestRefusal {
    #[error("no worker of the model {model:?} is ready{}: {forecast}", waited_text(*.waited))]
    NoWorker { model: Arc<str>, forecast: WorkerForecast, waited: Duration, retry_after: Duration },
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

impl RequestRefusal {
    /// The refusal by admission control of a request for `model`, whose next worker is expected as
    /// `forecast` says.
    pub fn of_admission(error: AdmissionError, model: &Arc<str>, forecast: WorkerForecast) -> Self {
        let detail = error.to_string();
        match error {
            AdmissionError::NoWorker { waited, retry_after } => {
                RequestRefusal::NoWorker { model: model.clone(), forecast, waited, retry_after }
            }
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

    /// No worker of `model` was there to ask, or none that was asked answered.
    pub fn no_worker(model: &Arc<str>) -> Self {
        let forecast = WorkerForecast::NoneAnswered;
        RequestRefusal::NoWorker {
            model: model.clone(),
            forecast,
            waited: Duration::ZERO,
            retry_after: RETRY_AFTER,
        }
    }

    /// Label value for metrics.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            RequestRefusal::NoWorker { .. } => "no_worker",
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
            RequestRefusal::NoWorker { retry_after, .. }
            | RequestRefusal::Overloaded { retry_after, .. }
            | RequestRefusal::TenantLimit { retry_after, .. } => Some(*retry_after),
            _ => None,
        }
    }
}

/// The answer of a worker to the call of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallOutcome {
    Admitted,
    /// The connection broke, or the stream ended without a frame: the worker process is gone.
    /// `had_request`: the call may have reached it.
    WorkerDied {
        had_request: bool,
    },
    /// No answer came in time. The worker may be alive.
    NoAnswer,
    /// The worker drains, attaches, or has another fingerprint. Its link will notice.
    NotServing,
    /// The worker refuses the request for now. Another worker may admit it.
    Full(RequestRefusal),
    /// Every worker would refuse the request.
    Refused(RequestRefusal),
}

impl CallOutcome {
    /// Why the worker does not serve the request, for traces.
    pub(crate) fn failure(&self) -> Option<&'static str> {
        match self {
            CallOutcome::Admitted => None,
            CallOutcome::WorkerDied { .. } => Some("worker died"),
            CallOutcome::NoAnswer => Some("no answer"),
            CallOutcome::NotServing => Some("not serving"),
            CallOutcome::Full(refusal) | CallOutcome::Refused(refusal) => Some(refusal.reason()),
        }
    }
}

/// What follows from a [`CallOutcome`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OpeningStep {
    Open,
    TryNext,
    Refuse(RequestRefusal),
}

/// The refusal of a request that no worker admits.
#[derive(Debug, Default)]
pub struct RefusalCollector {
    temporary: Option<RequestRefusal>,
}

impl RefusalCollector {
    /// `verdict` is that of the quarantine, if the worker died with the request.
    pub fn handle(&mut self, outcome: CallOutcome, verdict: LossVerdict) -> OpeningStep {
        match outcome {
            CallOutcome::Admitted => return OpeningStep::Open,
            CallOutcome::Refused(refusal) => return OpeningStep::Refuse(refusal),
            CallOutcome::WorkerDied { .. } => {
                if let LossVerdict::Quarantine { entry, .. } = verdict {
                    return OpeningStep::Refuse(RequestRefusal::Quarantined(entry));
                }
            }
            CallOutcome::Full(refusal) => self.temporary = Some(refusal),
            CallOutcome::NoAnswer | CallOutcome::NotServing => {}
        }
        OpeningStep::TryNext
    }

    /// The last temporary refusal. `None` if no worker was there to refuse.
    pub fn into_refusal(self) -> Option<RequestRefusal> {
        self.temporary
    }
}

/// The next step of a search for a worker.
#[derive(Debug)]
pub enum WorkerChoice<P, S> {
    /// The request enters this worker.
    Enter(P, S),
    /// The quarantine keeps the request away from all workers that are left. Try again later.
    Blocked,
    /// Every worker was tried.
    Exhausted,
}

/// The workers that a search has tried.
#[derive(Debug, Default)]
pub struct WorkerTries {
    tried: Vec<WorkerId>,
    /// Workers that the content may not enter now.
    blocked: Vec<WorkerId>,
}

impl WorkerTries {
    /// `place` chooses a worker that is not among those in its argument; `enter` asks the
    /// quarantine. `first` was placed already.
    pub fn next<P, S>(
        &mut self,
        mut first: Option<P>,
        mut place: impl FnMut(&[WorkerId]) -> Option<P>,
        id_of: impl Fn(&P) -> WorkerId,
        mut enter: impl FnMut(WorkerId) -> Result<S, Blocked>,
    ) -> WorkerChoice<P, S> {
        while let Some(placed) =
            first.take().or_else(|| place(&[&self.tried[..], &self.blocked[..]].concat()))
        {
            let worker = id_of(&placed);
            match enter(worker) {
                Ok(stay) => {
                    self.tried.push(worker);
                    return WorkerChoice::Enter(placed, stay);
                }
                Err(Blocked) => self.blocked.push(worker),
            }
        }
        let was_blocked = !self.blocked.is_empty();
        self.blocked.clear();
        if was_blocked { WorkerChoice::Blocked } else { WorkerChoice::Exhausted }
    }
}

/// The time for which the quarantine has kept a request from all workers.
#[derive(Debug, Default)]
pub struct IsolationWait {
    waited: Duration,
}

impl IsolationWait {
    /// Whether the request enters workers with trials of others.
    pub fn is_over(&self) -> bool {
        self.waited >= ISOLATION_WAIT
    }

    /// How long to wait now. `change`: when a trial ends by itself.
    pub fn next_wait(&self, change: Duration) -> Duration {
        change.min(WAIT_STEP).min(ISOLATION_WAIT.saturating_sub(self.waited))
    }

    /// If this process was stopped meanwhile, only one step counts.
    pub fn count(&mut self, waited: Duration) {
        self.waited += waited.min(WAIT_STEP);
    }
}

/// The attempts to resume a choice of a model that lost its worker. `cause` says why it was lost.
#[derive(Debug)]
pub struct Reopening {
    model: Arc<str>,
    cause: String,
    waited: Duration,
}

impl Reopening {
    pub fn new(model: Arc<str>, cause: String) -> Self {
        Self { model, cause, waited: Duration::ZERO }
    }

    /// Every worker has refused the choice. Returns how long to wait for a change before the next
    /// attempt.
    pub fn refused(&self, refusal: RequestRefusal) -> Result<Duration, ChoiceError> {
        match refusal {
            RequestRefusal::NoWorker { .. } => Ok(WAIT_STEP),
            RequestRefusal::Overloaded { .. } | RequestRefusal::TenantLimit { .. } => Ok(BUSY_RETRY),
            RequestRefusal::DeadlineExceeded => Err(ChoiceError::DeadlineExceeded),
            RequestRefusal::Quarantined(QuarantineEntry { losses, .. }) => {
                Err(ChoiceError::Quarantined { losses, detail: self.cause.clone() })
            }
            refusal => Err(ChoiceError::WorkerError { detail: refusal.to_string() }),
        }
    }

    /// An attempt has taken the time `asking`, and the wait after it `waiting`. If this process was
    /// stopped meanwhile, only one step counts. The choice waits at most `limit`
    /// ([`crate::failover::resume_wait`]).
    pub fn count_wait(
        &mut self,
        asking: Duration,
        waiting: Duration,
        limit: Duration,
    ) -> Result<(), ChoiceError> {
        self.waited += asking + waiting.min(WAIT_STEP);
        let Self { model, cause, waited } = self;
        match *waited >= limit {
            true => {
                Err(ChoiceError::NoWorker { model: model.clone(), detail: cause.clone(), waited: *waited })
            }
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(tries: &mut WorkerTries, workers: &[u64], blocked: &[u64]) -> Option<u64> {
        let place = |not: &[WorkerId]| workers.iter().copied().find(|id| !not.contains(&WorkerId(*id)));
        let enter = |id: WorkerId| if blocked.contains(&id.0) { Err(Blocked) } else { Ok(()) };
        match tries.next(None, place, |id| WorkerId(*id), enter) {
            WorkerChoice::Enter(id, ()) => Some(id),
            WorkerChoice::Blocked => Some(0),
            WorkerChoice::Exhausted => None,
        }
    }

    #[test]
    fn every_worker_is_tried_once_and_a_blocked_one_again() {
        let mut tries = WorkerTries::default();
        assert_eq!(next(&mut tries, &[1, 2, 3], &[1]), Some(2));
        assert_eq!(next(&mut tries, &[1, 2, 3], &[1]), Some(3));
        assert_eq!(next(&mut tries, &[1, 2, 3], &[1]), Some(0), "only the blocked one is left");
        assert_eq!(next(&mut tries, &[1, 2, 3], &[]), Some(1));
        assert_eq!(next(&mut tries, &[1, 2, 3], &[]), None);
    }

    #[test]
    fn a_dead_worker_is_followed_by_the_next_until_the_quarantine_objects() {
        let mut refusals = RefusalCollector::default();
        let died = CallOutcome::WorkerDied { had_request: true };
        assert_eq!(refusals.handle(died.clone(), LossVerdict::Resume), OpeningStep::TryNext);
        let entry = QuarantineEntry { losses: 2, remaining: Duration::from_secs(1) };
        let step = refusals.handle(died, LossVerdict::Quarantine { entry, is_new: true });
        assert_eq!(step, OpeningStep::Refuse(RequestRefusal::Quarantined(entry)));
        assert_eq!(refusals.into_refusal(), None);
    }

    #[test]
    fn a_pause_of_this_process_counts_as_one_step_of_the_wait_for_isolation() {
        let mut wait = IsolationWait::default();
        assert_eq!(wait.next_wait(Duration::from_millis(10)), Duration::from_millis(10));
        wait.count(Duration::from_secs(600));
        for _ in 1..30 {
            assert!(!wait.is_over());
            assert_eq!(wait.next_wait(Duration::from_secs(5)), WAIT_STEP);
            wait.count(WAIT_STEP);
        }
        assert!(wait.is_over());
    }

    #[test]
    fn a_pause_of_this_process_counts_as_one_step_of_the_wait_for_a_worker() {
        let limit = 5 * WAIT_STEP;
        let mut reopening = Reopening::new("m".into(), "reset".to_owned());
        assert_eq!(reopening.count_wait(Duration::ZERO, 60 * WAIT_STEP, limit), Ok(()));
        let over = reopening.count_wait(4 * WAIT_STEP, Duration::ZERO, limit).unwrap_err();
        let text = "the worker of the model \"m\" was lost (reset) and no other one took over within 5 s";
        assert_eq!(over.to_string(), text);
    }
}
