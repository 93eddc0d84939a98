// SPDX-License-Identifier: Apache-2.0

//! Checks that no event of a worker's log is missing. A plain value.

/// What a frame says about its events.
#[derive(Clone, Copy, Debug)]
pub(super) struct FrameHead {
    pub(super) log: u64,
    /// Number of the first event after the frame. 0: more of a snapshot follows.
    pub(super) next: u64,
    pub(super) events: u64,
    /// Its first event clears all: a snapshot begins, or the worker has dropped its cache.
    pub(super) is_cleared: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("event {expected} of a worker's KV cache was expected, and {found} came")]
pub(super) struct EventGap {
    expected: u64,
    found: u64,
}

#[derive(Debug, Default)]
pub(super) struct EventSequence {
    log: u64,
    /// Number of the next event. 0: none was seen, or a snapshot has begun.
    next: u64,
    is_in_snapshot: bool,
}

impl EventSequence {
    /// Log and number of the event to continue from. A part of a snapshot cannot be continued.
    pub(super) fn position(&mut self) -> (u64, u64) {
        self.is_in_snapshot = false;
        (self.log, self.next)
    }

    /// Returns whether all events before `next` are known after this frame. After a gap, the
    /// position asks for a snapshot.
    pub(super) fn accept(&mut self, frame: FrameHead) -> Result<bool, EventGap> {
        let continues =
            self.log == frame.log && self.next > 0 && frame.next.checked_sub(frame.events) == Some(self.next);
        if !continues && !frame.is_cleared && !self.is_in_snapshot {
            let gap = EventGap { expected: self.next, found: frame.next.saturating_sub(frame.events) };
            *self = Self::default();
            return Err(gap);
        }
        self.is_in_snapshot = frame.next == 0;
        (self.log, self.next) = (frame.log, frame.next);
        Ok(!self.is_in_snapshot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(next: u64, events: u64, is_cleared: bool) -> FrameHead {
        FrameHead { log: 7, next, events, is_cleared }
    }

    #[test]
    fn a_snapshot_in_parts_is_complete_with_its_last_one() {
        let mut sequence = EventSequence::default();
        assert_eq!(sequence.position(), (0, 0));
        assert_eq!(sequence.accept(frame(0, 8192, true)), Ok(false));
        assert_eq!(sequence.accept(frame(0, 8192, false)), Ok(false));
        assert_eq!(sequence.accept(frame(99, 5, false)), Ok(true));
        assert_eq!(sequence.accept(frame(103, 4, false)), Ok(true));
        assert_eq!(sequence.accept(frame(104, 1, true)), Ok(true), "the worker has dropped its cache");
        assert_eq!(sequence.position(), (7, 104));
        assert_eq!(sequence.accept(frame(105, 1, false)), Ok(true));
    }

    #[test]
    fn after_a_gap_or_half_a_snapshot_a_whole_one_is_asked_for() {
        for (frame, expected) in [(frame(103, 3, false), 100), (frame(101, 3, false), 98)] {
            let mut sequence = EventSequence { log: 7, next: 99, is_in_snapshot: false };
            assert_eq!(sequence.accept(frame), Err(EventGap { expected: 99, found: expected }));
            assert_eq!(sequence.position(), (0, 0));
        }
        let mut sequence = EventSequence { log: 8, next: 99, is_in_snapshot: false };
        assert!(sequence.accept(frame(100, 1, false)).is_err(), "of another log");
        assert_eq!(sequence.accept(frame(0, 2, true)), Ok(false));
        assert_eq!(sequence.position(), (7, 0));
        assert!(sequence.accept(frame(50, 2, false)).is_err(), "the rest of the lost snapshot");
    }
}
