// SPDX-License-Identifier: Apache-2.0

//! Time as a process has lived it, for watchdogs and leases.
//!
//! A process that was stopped (SIGSTOP, a frozen cgroup, a paused virtual machine) finds on waking
//! that every deadline has passed, although its peers have done nothing wrong. Deadlines on a
//! [`RunningClock`] move with the pause. Gaps of at most `step_max` between two readings count in
//! full, and of a longer gap only `step_max` counts.
//!
//! ```text
//! monotonic   0 ---- 1 ---- 2 ------------------------ 47 ---- 48
//! running     0 ---- 1 ---- 2 ---- 3 (step_max = 1)     3 ----  4
//! ```
//!
//! 1. The clock never goes back and is never ahead of the monotonic clock.
//! 2. The owner reads the clock at least every `step_max`, or busy times count as pauses.

use std::time::{Duration, Instant};

/// A plain value: readings of the monotonic clock come in as arguments.
#[derive(Clone, Copy, Debug)]
pub struct RunningClock {
    step_max: Duration,
    last: Instant,
    paused: Duration,
}

impl RunningClock {
    pub fn new(now: Instant, step_max: Duration) -> Self {
        Self { step_max, last: now, paused: Duration::ZERO }
    }

    /// Takes a reading of the monotonic clock and returns the running time.
    pub fn advance(&mut self, now: Instant) -> Instant {
        let gap = now.saturating_duration_since(self.last);
        self.paused += gap.saturating_sub(self.step_max);
        self.last = self.last.max(now);
        self.now()
    }

    /// The running time of the last reading.
    pub fn now(&self) -> Instant {
        self.last - self.paused
    }

    /// When the running time will reach `deadline`, if no further pause comes.
    pub fn monotonic(&self, deadline: Instant) -> Instant {
        deadline + self.paused
    }

    /// The sum of all pauses.
    pub fn paused(&self) -> Duration {
        self.paused
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STEP: Duration = Duration::from_secs(1);

    #[test]
    fn a_pause_counts_as_one_step() {
        let start = Instant::now();
        let mut clock = RunningClock::new(start, STEP);
        assert_eq!(clock.advance(start + STEP), start + STEP);
        assert_eq!(clock.advance(start + STEP + 45 * STEP), start + 2 * STEP);
        assert_eq!(clock.paused(), 44 * STEP);
        let deadline = start + 5 * STEP;
        assert_eq!(clock.monotonic(deadline), start + 49 * STEP);
    }

    proptest! {
        #[test]
        fn running_time_never_goes_back_and_never_runs_ahead(readings_ms in prop::collection::vec(0u64..100_000, 1..50)) {
            let start = Instant::now();
            let mut clock = RunningClock::new(start, STEP);
            let mut last = start;
            let mut latest = start;
            for ms in readings_ms {
                // A reading may be older than the last one.
                let now = start + Duration::from_millis(ms);
                latest = latest.max(now);
                let running = clock.advance(now);
                prop_assert!(running >= last && running <= latest);
                prop_assert!(running - last <= STEP);
                last = running;
            }
        }
    }
}
