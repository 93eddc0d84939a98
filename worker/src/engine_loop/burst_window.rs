// SPDX-License-Identifier: Apache-2.0

//! [`BurstWindow`]: how long an idle engine waits for further requests before its first step.
//!
//! Requests that are sent at once arrive some 0.1 ms apart. The first one would start a step alone,
//! and the others would wait for its end: the first tokens of eight prompts of 128 tokens took 46
//! ms on an H200 with qwen3-8b Q4_K_M, of which the first step took 9; together they take 40. So an
//! engine whose last work began with several requests waits for as many again. One that expects
//! none waits for nothing: a request alone is delayed at most once after a burst.

use std::time::Duration;

/// Requests that arrive this long after the first one still belong to its burst. It is also the
/// longest delay.
const BURST: Duration = Duration::from_millis(2);

#[derive(Debug, Default)]
pub(super) struct BurstWindow {
    /// Requests of the burst before.
    expected: usize,
    /// When the first request of this burst was submitted.
    first: Option<Duration>,
    arrived: usize,
}

impl BurstWindow {
    /// The engine has no work. The next request is the first one of a burst.
    pub(super) fn idle(&mut self) {
        self.expected = self.arrived;
        self.first = None;
        self.arrived = 0;
    }

    /// Counts a request that was submitted at `now`. It may have waited for the end of a step since.
    pub(super) fn arrive(&mut self, now: Duration) {
        let first = *self.first.get_or_insert(now);
        if now.saturating_sub(first) <= BURST {
            self.arrived += 1;
        }
    }

    /// How long to wait for the next request. None if the step shall begin.
    pub(super) fn wait(&self, now: Duration) -> Option<Duration> {
        let end = self.first? + BURST;
        let is_complete = self.expected < 2 || self.arrived >= self.expected;
        (!is_complete && now < end).then(|| end.saturating_sub(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn micros(micros: u64) -> Duration {
        Duration::from_micros(micros)
    }

    /// Requests at these microseconds, each burst after an idle time.
    fn after(bursts: &[&[u64]]) -> BurstWindow {
        let mut window = BurstWindow::default();
        for burst in bursts {
            window.idle();
            burst.iter().for_each(|&at| window.arrive(micros(at)));
        }
        window
    }

    #[test]
    fn the_first_burst_and_requests_alone_wait_for_nothing() {
        assert_eq!(after(&[&[0]]).wait(micros(10)), None);
        assert_eq!(after(&[&[0], &[5_000]]).wait(micros(5_010)), None);
    }

    #[test]
    fn after_a_burst_the_engine_waits_for_as_many_requests_and_for_two_milliseconds_at_most() {
        let burst: &[u64] = &[0, 100, 1_900];
        assert_eq!(after(&[burst, &[5_000]]).wait(micros(5_010)), Some(micros(1_990)));
        assert_eq!(after(&[burst, &[5_000, 5_300]]).wait(micros(5_300)), Some(micros(1_700)));
        assert_eq!(after(&[burst, &[5_000, 5_300, 5_400]]).wait(micros(5_400)), None);
        assert_eq!(after(&[burst, &[5_000]]).wait(micros(7_000)), None);
    }

    #[test]
    fn requests_after_the_window_are_no_burst() {
        assert_eq!(after(&[&[0, 2_001, 3_000], &[5_000]]).wait(micros(5_010)), None);
    }

    #[test]
    fn a_burst_that_does_not_come_is_not_waited_for_again() {
        assert_eq!(after(&[&[0, 1, 2], &[5_000], &[9_000]]).wait(micros(9_010)), None);
    }
}
