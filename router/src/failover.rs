// SPDX-License-Identifier: Apache-2.0

//! Failover: what to do with a choice whose worker was lost (I6). It continues on another worker or
//! ends with a named error. A plain value.
//!
//! The tokens of a worker are a function of fingerprint, prompt, sampling parameters and seed (I5).
//! So another worker with an equal fingerprint, given the prompt and the output so far, generates
//! the tokens that the lost worker would have generated.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::quarantine::{LossVerdict, QuarantineEntry};

/// Maximum number of lost workers of a choice. A choice that kills workers goes into quarantine
/// earlier ([`crate::quarantine`]), and its neighbours go on.
const LOSSES_MAX: u32 = 16;

/// How long a choice whose client has received tokens waits for another worker of its model: the
/// client sees a pause. A restarted worker is back within a second.
pub const WAIT_FOR_WORKER: Duration = Duration::from_secs(5);

/// How long a choice that is spread ([`crate::quarantine`]) waits before it is resumed. The lost
/// worker is back by then, so that there are more workers to spread over.
pub const SPREAD_WAIT: Duration = Duration::from_secs(2);

/// A sampler's state is at most a few numbers.
pub const SAMPLER_STATE_BYTES_MAX: usize = 32;

/// How a worker's stream ended, other than with `finished`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamLoss {
    /// The connection broke, or the stream ended without a status: the worker process is gone.
    WorkerDied {
        detail: String,
    },
    /// The worker ended the stream because it drains. It is alive.
    WorkerDrains {
        detail: String,
    },
    DeadlineExceeded,
    /// The request cannot be completed by any worker: its grammar met a limit.
    InvalidRequest {
        detail: String,
    },
    /// The worker reported an error that another worker would report too.
    WorkerError {
        detail: String,
    },
}

impl StreamLoss {
    /// For traces.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            StreamLoss::WorkerDied { .. } => "worker died",
            StreamLoss::WorkerDrains { .. } => "worker drains",
            StreamLoss::DeadlineExceeded => "deadline",
            StreamLoss::InvalidRequest { .. } => "invalid request",
            StreamLoss::WorkerError { .. } => "worker error",
        }
    }
}

/// Why a choice ends with an error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChoiceError {
    #[error(
        "the worker of the model {model:?} was lost ({detail}) and no other one took over within {:.0} s",
        .waited.as_secs_f64()
    )]
    NoWorker { model: Arc<str>, detail: String, waited: Duration },
    #[error("the request lost {losses} workers ({detail}) and is not resumed again")]
    TooManyLosses { losses: u32, detail: String },
    #[error("the request ended {losses} workers ({detail}): it is in quarantine and not resumed again")]
    Quarantined { losses: u32, detail: String },
    #[error("the request's deadline passed")]
    DeadlineExceeded,
    #[error("the client read too slowly")]
    SlowClient,
    #[error("the request cannot be completed: {detail}")]
    InvalidRequest { detail: String },
    #[error("the worker failed: {detail}")]
    WorkerError { detail: String },
    #[error("the worker violated the protocol: {violation}")]
    Protocol { violation: &'static str },
}

/// What to do after the loss of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FailoverAction {
    /// Send prompt and output to another worker of the model. Wait for one at most
    /// [`resume_wait`].
    Resume {
        detail: String,
    },
    /// The worker sent every token and only `finished` was lost: end the choice with reason length.
    Finish,
    Fail(ChoiceError),
}

/// How long a choice waits for another worker, counted from its loss. As long as its client has
/// received nothing, it waits like a new request: `new_request_wait`, or `None` if a new request
/// would not wait.
pub fn resume_wait(has_sent_output: bool, new_request_wait: Option<Duration>) -> Duration {
    let unsent = new_request_wait.filter(|_| !has_sent_output);
    unsent.map_or(WAIT_FOR_WORKER, |wait| wait.max(WAIT_FOR_WORKER))
}

/// The output of a choice so far, and its losses.
#[derive(Debug)]
pub struct ChoiceProgress {
    output: Vec<u32>,
    sampler_state: Bytes,
    /// The smaller of what the client asked for and what the context allows.
    max_tokens: u32,
    losses: u32,
}

impl ChoiceProgress {
    pub fn new(max_tokens: u32) -> Self {
        Self { output: Vec::new(), sampler_state: Bytes::new(), max_tokens, losses: 0 }
    }

    /// Appends tokens from the worker.
    pub fn append(&mut self, ids: &[u32], sampler_state: Bytes) -> Result<(), ChoiceError> {
        if sampler_state.len() > SAMPLER_STATE_BYTES_MAX {
            return Err(ChoiceError::Protocol { violation: "a sampler state of more than 32 bytes" });
        }
        if self.output.len() + ids.len() > self.max_tokens as usize {
            return Err(ChoiceError::Protocol { violation: "more tokens than the request asks for" });
        }
        self.output.extend_from_slice(ids);
        self.sampler_state = sampler_state;
        Ok(())
    }

    /// `verdict` is that of the quarantine, if the worker died.
    pub fn handle_loss(&mut self, loss: StreamLoss, verdict: LossVerdict) -> FailoverAction {
        let detail = match loss {
            StreamLoss::DeadlineExceeded => return FailoverAction::Fail(ChoiceError::DeadlineExceeded),
            StreamLoss::WorkerError { detail } => {
                return FailoverAction::Fail(ChoiceError::WorkerError { detail });
            }
            StreamLoss::InvalidRequest { detail } => {
                return FailoverAction::Fail(ChoiceError::InvalidRequest { detail });
            }
            StreamLoss::WorkerDrains { detail } | StreamLoss::WorkerDied { detail } => detail,
        };
        self.losses += 1;
        if self.output.len() == self.max_tokens as usize {
            return FailoverAction::Finish;
        }
        if let LossVerdict::Quarantine { entry: QuarantineEntry { losses, .. }, .. } = verdict {
            return FailoverAction::Fail(ChoiceError::Quarantined { losses, detail });
        }
        if self.losses >= LOSSES_MAX {
            return FailoverAction::Fail(ChoiceError::TooManyLosses { losses: self.losses, detail });
        }
        FailoverAction::Resume { detail }
    }

    pub fn output(&self) -> &[u32] {
        &self.output
    }

    pub fn sampler_state(&self) -> Bytes {
        self.sampler_state.clone()
    }

    pub fn losses(&self) -> u32 {
        self.losses
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESUME: LossVerdict = LossVerdict::Resume;

    fn died() -> StreamLoss {
        StreamLoss::WorkerDied { detail: "connection reset".into() }
    }

    fn progress_with(max_tokens: u32, output: &[u32]) -> ChoiceProgress {
        let mut progress = ChoiceProgress::new(max_tokens);
        progress.append(output, Bytes::new()).unwrap();
        progress
    }

    #[test]
    fn a_lost_choice_is_resumed_with_its_output_and_sampler_state() {
        let mut progress = progress_with(8, &[5, 6]);
        progress.append(&[7], Bytes::from_static(b"mu")).unwrap();
        assert!(matches!(progress.handle_loss(died(), RESUME), FailoverAction::Resume { .. }));
        assert_eq!(progress.output(), [5, 6, 7]);
        assert_eq!(progress.sampler_state(), "mu");
        assert_eq!(progress.losses(), 1);
    }

    #[test]
    fn a_choice_waits_like_a_new_request_until_its_client_has_received_output() {
        let long = Duration::from_secs(30);
        assert_eq!(resume_wait(false, Some(long)), long);
        assert_eq!(resume_wait(true, Some(long)), WAIT_FOR_WORKER);
        assert_eq!(resume_wait(false, Some(Duration::ZERO)), WAIT_FOR_WORKER, "never less than a stream");
        assert_eq!(resume_wait(false, None), WAIT_FOR_WORKER);
    }

    #[test]
    fn a_choice_that_lost_only_its_finished_frame_finishes() {
        assert_eq!(progress_with(2, &[5, 6]).handle_loss(died(), RESUME), FailoverAction::Finish);
    }

    #[test]
    fn a_choice_in_quarantine_gets_no_other_worker() {
        let mut progress = progress_with(8, &[5]);
        assert!(matches!(progress.handle_loss(died(), RESUME), FailoverAction::Resume { .. }));
        let entry = QuarantineEntry { losses: 2, remaining: Duration::from_secs(1) };
        let second = progress.handle_loss(died(), LossVerdict::Quarantine { entry, is_new: false });
        assert!(matches!(second, FailoverAction::Fail(ChoiceError::Quarantined { losses: 2, .. })));
    }

    #[test]
    fn a_choice_with_progress_between_losses_is_resumed_at_most_fifteen_times() {
        let mut progress = ChoiceProgress::new(100);
        for loss in 1..LOSSES_MAX {
            assert!(
                matches!(progress.handle_loss(died(), RESUME), FailoverAction::Resume { .. }),
                "loss {loss}"
            );
            progress.append(&[loss], Bytes::new()).unwrap();
        }
        let last = progress.handle_loss(died(), RESUME);
        assert!(matches!(last, FailoverAction::Fail(ChoiceError::TooManyLosses { losses: LOSSES_MAX, .. })));
    }

    #[test]
    fn draining_workers_do_not_count_as_losses_without_progress() {
        let mut progress = ChoiceProgress::new(100);
        for _ in 0..3 {
            let loss = StreamLoss::WorkerDrains { detail: "draining".into() };
            assert!(matches!(progress.handle_loss(loss, RESUME), FailoverAction::Resume { .. }));
        }
    }

    #[test]
    fn a_worker_error_and_a_deadline_are_final() {
        let mut progress = ChoiceProgress::new(4);
        let action = progress.handle_loss(StreamLoss::DeadlineExceeded, RESUME);
        assert_eq!(action, FailoverAction::Fail(ChoiceError::DeadlineExceeded));
        let action = progress.handle_loss(StreamLoss::WorkerError { detail: "step failed".into() }, RESUME);
        assert_eq!(action, FailoverAction::Fail(ChoiceError::WorkerError { detail: "step failed".into() }));
    }

    #[test]
    fn a_worker_that_sends_too_much_violates_the_protocol() {
        assert!(progress_with(2, &[5]).append(&[6], Bytes::new()).is_ok());
        assert!(progress_with(2, &[5]).append(&[6, 7], Bytes::new()).is_err());
        let state = |bytes| Bytes::from(vec![0; bytes]);
        assert!(ChoiceProgress::new(2).append(&[6], state(SAMPLER_STATE_BYTES_MAX)).is_ok());
        assert!(ChoiceProgress::new(2).append(&[6], state(SAMPLER_STATE_BYTES_MAX + 1)).is_err());
    }
}
