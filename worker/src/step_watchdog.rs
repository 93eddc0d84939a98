// SPDX-License-Identifier: Apache-2.0

//! Notices that the engine's thread does not go on: a kernel that hangs, a driver that does not
//! answer, in a step, while it takes requests, or while it frees memory.
//!
//! The process still answers calls then, and its streams would wait for ever. The worker ends
//! instead; the router resumes its streams elsewhere and the supervisor starts it again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::MissedTickBehavior;

/// The watchdog looks this often within the timeout. It counts its own looks instead of reading a
/// clock, so a process that was stopped does not find its step overdue.
const LOOKS: u32 = 10;

/// Counts begun and ended work together: odd while the engine's thread works, even while it waits
/// for requests.
#[derive(Clone, Debug, Default)]
pub(crate) struct StepCounter(Arc<AtomicU64>);

impl StepCounter {
    pub(crate) fn begin_work(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn end_work(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn current(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Decides when a step is overdue. A plain value.
#[derive(Debug, Default)]
struct StepWatch {
    last: u64,
    looks: u32,
}

impl StepWatch {
    /// Takes one look at the counter. Returns whether the same step runs since [`LOOKS`] looks.
    fn is_overdue(&mut self, counter: u64) -> bool {
        let is_same_step = counter % 2 == 1 && counter == self.last;
        self.looks = if is_same_step { self.looks + 1 } else { 0 };
        self.last = counter;
        self.looks >= LOOKS
    }
}

/// Returns when a step takes longer than `timeout`, at most a tenth later.
pub(crate) async fn wait_for_hung_step(counter: StepCounter, timeout: Duration) {
    let mut watch = StepWatch::default();
    let mut looks = tokio::time::interval(timeout / LOOKS);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        looks.tick().await;
        if watch.is_overdue(counter.current()) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_step_that_does_not_end_is_overdue() {
        let (counter, mut watch) = (StepCounter::default(), StepWatch::default());
        let mut look = |counter: &StepCounter| watch.is_overdue(counter.current());
        assert!((0..100).all(|_| !look(&counter)), "no step runs");
        for _ in 0..100 {
            counter.begin_work();
            assert!(!look(&counter), "every look sees another step");
            counter.end_work();
        }
        counter.begin_work();
        assert!((0..LOOKS).all(|_| !look(&counter)));
        assert!(look(&counter));
    }
}
