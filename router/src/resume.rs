//! What becomes of a choice whose worker was lost (I6): go on elsewhere, or end with a named failure. A plain value.
//!
//! A worker's tokens are a function of fingerprint, prompt, sampling parameters and seed (I5), so "prompt + what was
//! sent" given to a worker with an equal fingerprint yields the very tokens that the lost one would have sent.

use std::time::Duration;

use bytes::Bytes;

/// A choice that lost this many workers without a new token in between is likely what kills them.
const LOSSES_WITHOUT_PROGRESS_MAX: u32 = 2;

/// And in all, however well it goes on in between.
const LOSSES_MAX: u32 = 8;

/// How long a choice waits for another worker of its model: a restarted one is back within a second.
pub(crate) const WAIT_FOR_WORKER: Duration = Duration::from_secs(5);

/// The state of a sampler is a few numbers at most.
pub(crate) const SAMPLER_STATE_BYTES_MAX: usize = 32;

/// How a worker's stream came to its end, other than by `finished`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    /// The connection broke or the stream ended without a word: the process is gone.
    Worker { detail: String },
    /// The worker gave the stream up (it drains); it lives.
    GivenUp { detail: String },
    /// The deadline passed.
    Deadline,
    /// The worker's own verdict; another worker would come to the same.
    Verdict { detail: String },
}

/// Why a choice ends with an error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Failure {
    #[error("the worker was lost ({detail}) and no other worker with the same model took over within {} s", WAIT_FOR_WORKER.as_secs())]
    NoWorker { detail: String },
    #[error("the request lost {losses} workers ({detail}) and is given up")]
    Poison { losses: u32, detail: String },
    #[error("the request's deadline passed")]
    Deadline,
    #[error("the client read too slowly")]
    SlowClient,
    #[error("the worker failed: {detail}")]
    Worker { detail: String },
    #[error("the worker broke the protocol: {violation}")]
    Protocol { violation: &'static str },
}

/// What to do after a loss.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Send prompt + output to another worker of the model; wait for one at most [`WAIT_FOR_WORKER`].
    Resume {
        detail: String,
    },
    /// Every token had been sent, only the last word was lost.
    Complete,
    Fail(Failure),
}

/// What was sent of a choice so far.
#[derive(Debug)]
pub(crate) struct Progress {
    output: Vec<u32>,
    sampler_state: Bytes,
    /// The least of what was asked for and what the context allows.
    output_max: u32,
    losses: u32,
    losses_without_progress: u32,
}

impl Progress {
    pub(crate) fn new(output_max: u32) -> Self {
        Self {
            output: Vec::new(),
            sampler_state: Bytes::new(),
            output_max,
            losses: 0,
            losses_without_progress: 0,
        }
    }

    /// Tokens arrived from the worker.
    pub(crate) fn tokens(&mut self, ids: &[u32], sampler_state: Bytes) -> Result<(), Failure> {
        if sampler_state.len() > SAMPLER_STATE_BYTES_MAX {
            return Err(Failure::Protocol { violation: "sampler state of more than 32 bytes" });
        }
        if self.output.len() + ids.len() > self.output_max as usize {
            return Err(Failure::Protocol { violation: "more tokens than were asked for" });
        }
        self.output.extend_from_slice(ids);
        self.sampler_state = sampler_state;
        if !ids.is_empty() {
            self.losses_without_progress = 0;
        }
        Ok(())
    }

    pub(crate) fn lost(&mut self, loss: Loss) -> Next {
        let detail = match loss {
            Loss::Deadline => return Next::Fail(Failure::Deadline),
            Loss::Verdict { detail } => return Next::Fail(Failure::Worker { detail }),
            Loss::GivenUp { detail } => detail,
            Loss::Worker { detail } => {
                self.losses_without_progress += 1;
                detail
            }
        };
        self.losses += 1;
        if self.output.len() == self.output_max as usize {
            return Next::Complete;
        }
        if self.losses_without_progress >= LOSSES_WITHOUT_PROGRESS_MAX || self.losses >= LOSSES_MAX {
            return Next::Fail(Failure::Poison { losses: self.losses, detail });
        }
        Next::Resume { detail }
    }

    pub(crate) fn output(&self) -> &[u32] {
        &self.output
    }

    pub(crate) fn sampler_state(&self) -> Bytes {
        self.sampler_state.clone()
    }

    pub(crate) fn losses(&self) -> u32 {
        self.losses
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dead() -> Loss {
        Loss::Worker { detail: "connection reset".into() }
    }

    fn with_output(output_max: u32, sent: &[u32]) -> Progress {
        let mut progress = Progress::new(output_max);
        progress.tokens(sent, Bytes::new()).unwrap();
        progress
    }

    #[test]
    fn a_lost_worker_is_resumed_with_all_that_was_sent() {
        let mut progress = with_output(8, &[5, 6]);
        progress.tokens(&[7], Bytes::from_static(b"mu")).unwrap();
        assert!(matches!(progress.lost(dead()), Next::Resume { .. }));
        assert_eq!(progress.output(), [5, 6, 7]);
        assert_eq!(progress.sampler_state(), "mu");
    }

    #[test]
    fn only_the_last_word_may_be_lost() {
        assert_eq!(with_output(2, &[5, 6]).lost(dead()), Next::Complete);
    }

    #[test]
    fn a_request_that_kills_two_workers_at_one_token_gets_no_third() {
        let mut progress = with_output(8, &[5]);
        assert!(matches!(progress.lost(dead()), Next::Resume { .. }));
        assert!(matches!(progress.lost(dead()), Next::Fail(Failure::Poison { losses: 2, .. })));
    }

    #[test]
    fn progress_between_losses_is_forgiven_but_not_for_ever() {
        let mut progress = Progress::new(100);
        for loss in 1..LOSSES_MAX {
            assert!(matches!(progress.lost(dead()), Next::Resume { .. }), "loss {loss}");
            progress.tokens(&[loss], Bytes::new()).unwrap();
        }
        assert!(matches!(progress.lost(dead()), Next::Fail(Failure::Poison { losses: LOSSES_MAX, .. })));
    }

    #[test]
    fn draining_workers_are_not_held_against_the_request() {
        let mut progress = Progress::new(100);
        for _ in 0..3 {
            assert!(matches!(
                progress.lost(Loss::GivenUp { detail: "draining".into() }),
                Next::Resume { .. }
            ));
        }
    }

    #[test]
    fn a_verdict_and_a_deadline_are_final() {
        let mut progress = Progress::new(4);
        assert_eq!(progress.lost(Loss::Deadline), Next::Fail(Failure::Deadline));
        let verdict = progress.lost(Loss::Verdict { detail: "step failed".into() });
        assert_eq!(verdict, Next::Fail(Failure::Worker { detail: "step failed".into() }));
    }

    #[test]
    fn a_worker_that_sends_too_much_is_refused() {
        assert!(with_output(2, &[5]).tokens(&[6, 7], Bytes::new()).is_err());
        assert!(Progress::new(2).tokens(&[6], Bytes::from(vec![0; 33])).is_err());
    }
}
