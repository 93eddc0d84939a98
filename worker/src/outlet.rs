//! From the engine's thread to one call: a bounded queue of outputs, never waited for.
//!
//! A reader that falls behind has its request held (its blocks stay, its steps pause) while its queue is nearly full; one
//! that stays behind for [`HELD_MAX`] is cut with an explicit status, for which room is kept from the start.

use std::time::Duration;

use engine::{ConstraintError, DRAFT_DEPTH_MAX, Output, SampleError};
use tokio::sync::mpsc;

/// Longest time that a held request may keep its KV blocks from others.
pub(crate) const HELD_MAX: Duration = Duration::from_secs(60);

/// How many outputs of one stream may wait.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Depth {
    /// Outputs that wait for the reader at most.
    outputs: usize,
    /// What one step may add; the request is held while there is less room.
    per_step: usize,
}

/// A step gives a sequence one token, and those of its draft that were right, or the one before, if its constraint was late
/// for that; token outputs are small.
pub(crate) const TOKENS: Depth = Depth { outputs: 128, per_step: 1 + DRAFT_DEPTH_MAX };

/// `rows` is what a step scores at most, which bounds the bytes that wait.
pub(crate) fn scores(rows: usize) -> Depth {
    // One more for the admission's report.
    Depth { outputs: 2 * (rows + 1), per_step: rows + 1 }
}

/// Why a stream ends before its request is done.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum Cut {
    #[error("the request's deadline passed")]
    Deadline,
    #[error("the worker is stopping")]
    Drained,
    #[error("the reader took nothing for {} s", HELD_MAX.as_secs())]
    TooSlow,
    #[error("the worker's output queue overflowed")]
    Overflow,
    #[error("the step that computed the request failed: {detail}")]
    StepFailed { detail: String },
    /// It was not the request's fault, and another worker can go on with it.
    #[error("the worker's device is lost: {detail}")]
    DeviceLost { detail: String },
    #[error("no token can be drawn: {0}")]
    BadLogits(SampleError),
    #[error("no token can be drawn: {0}")]
    Grammar(ConstraintError),
}

pub(crate) type Item = Result<Output, Cut>;

/// The engine's end.
pub(crate) struct Outlet {
    sender: mpsc::Sender<Item>,
    last_word: Option<mpsc::OwnedPermit<Item>>,
    depth: Depth,
    held_since: Option<Duration>,
}

/// The queue is full although the request was held in time: a fault of ours, and the end of this stream.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Overflow;

/// What the engine is to do about a request's pace.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    Keep,
    Hold,
    Resume,
    Cut,
}

/// A queue for one call. Dropping the receiver cancels it.
pub(crate) fn outlet(depth: Depth) -> (Outlet, mpsc::Receiver<Item>) {
    let (sender, receiver) = mpsc::channel(depth.outputs + 1);
    let last_word = sender.clone().try_reserve_owned().ok();
    (Outlet { sender, last_word, depth, held_since: None }, receiver)
}

impl Outlet {
    /// The reader is gone.
    pub(crate) fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }

    pub(crate) fn send(&mut self, output: Output) -> Result<(), Overflow> {
        match self.sender.try_send(Ok(output)) {
            Ok(()) => Ok(()),
            // Whoever is gone needs nothing; the next look at `is_closed` ends the request.
            Err(mpsc::error::TrySendError::Closed(_)) => Ok(()),
            Err(mpsc::error::TrySendError::Full(_)) => Err(Overflow),
        }
    }

    /// The last output, or what ends the stream in its place.
    pub(crate) fn end(mut self, last: Item) {
        if let Some(permit) = self.last_word.take() {
            permit.send(last);
        }
    }

    /// To be asked before each step.
    pub(crate) fn pace(&mut self, now: Duration) -> Pace {
        let room = self.sender.capacity();
        match self.held_since {
            None if room < self.depth.per_step => {
                self.held_since = Some(now);
                Pace::Hold
            }
            Some(since) if room < self.depth.per_step => {
                if now.saturating_sub(since) >= HELD_MAX {
                    Pace::Cut
                } else {
                    Pace::Keep
                }
            }
            Some(_) => {
                self.held_since = None;
                Pace::Resume
            }
            None => Pace::Keep,
        }
    }
}

#[cfg(test)]
mod tests {
    use engine::RequestId;

    use super::*;

    const DEPTH: Depth = Depth { outputs: 8, per_step: 3 };

    fn output(number: u64) -> Output {
        Output::Admitted { id: RequestId(number), cached_tokens: 0 }
    }

    #[test]
    fn a_reader_that_falls_behind_is_held_and_then_goes_on() {
        let (mut outlet, mut reader) = outlet(DEPTH);
        for number in 0..5 {
            assert_eq!(outlet.pace(Duration::ZERO), Pace::Keep);
            outlet.send(output(number)).unwrap();
        }
        outlet.send(output(5)).unwrap();
        assert_eq!(outlet.pace(Duration::ZERO), Pace::Hold);
        assert_eq!(outlet.pace(Duration::from_secs(1)), Pace::Keep);
        // What a step was already computing still has room.
        for number in 6..8 {
            outlet.send(output(number)).unwrap();
        }
        assert_eq!(outlet.send(output(8)), Err(Overflow));
        for _ in 0..4 {
            reader.try_recv().unwrap().unwrap();
        }
        assert_eq!(outlet.pace(Duration::from_secs(2)), Pace::Resume);
        assert_eq!(outlet.pace(Duration::from_secs(2)), Pace::Keep);
    }

    #[test]
    fn a_reader_that_never_reads_is_cut_after_all_outputs() {
        let (mut outlet, mut reader) = outlet(DEPTH);
        for number in 0..8 {
            outlet.send(output(number)).unwrap();
        }
        assert_eq!(outlet.pace(Duration::from_secs(3)), Pace::Hold);
        assert_eq!(outlet.pace(Duration::from_secs(62)), Pace::Keep);
        assert_eq!(outlet.pace(Duration::from_secs(63)), Pace::Cut);
        outlet.end(Err(Cut::TooSlow));
        for number in 0..8 {
            assert_eq!(reader.try_recv().unwrap(), Ok(output(number)));
        }
        assert_eq!(reader.try_recv().unwrap(), Err(Cut::TooSlow));
        assert!(reader.try_recv().is_err());
    }

    #[test]
    fn a_reader_that_is_gone_is_noticed() {
        let (mut outlet, reader) = outlet(DEPTH);
        drop(reader);
        assert!(outlet.is_closed());
        assert_eq!(outlet.send(output(1)), Ok(()));
    }
}
