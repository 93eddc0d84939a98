// SPDX-License-Identifier: Apache-2.0

//! Estimates when a refused client should retry.
//!
//! The estimate continues the queue beyond its limit. A refused request is told the time at which
//! all waiting requests, and all requests refused before it, will have been admitted at the
//! measured rate. Refused clients thus return one after the other, not all at once.
//!
//! The router's and the engine's admission control each have one estimator. It is a plain value
//! without a clock.

#![forbid(unsafe_code)]

use std::time::Duration;

/// Shortest estimate: less is not worth a round trip, and `Retry-After` counts seconds.
const RETRY_MIN: Duration = Duration::from_secs(1);
/// Longest estimate: the measured rate says little about a later time.
const RETRY_MAX: Duration = Duration::from_secs(60);

/// Each freed permit reduces the weight of older ones by this factor, so the last ten count most.
const DECAY: f64 = 0.9;

#[derive(Debug, Default)]
pub struct RetryAfterEstimator {
    /// Permits freed while requests waited, and the seconds that they took; older ones count less.
    freed: f64,
    seconds: f64,
    /// Time of the last freed permit, or of the start of waiting. None while nothing waits: an idle
    /// queue says nothing about the rate.
    last: Option<Duration>,
    backlog: Backlog,
}

/// Time up to which future permits are promised to refused requests.
#[derive(Clone, Copy, Debug, Default)]
pub struct Backlog {
    until: Duration,
}

impl RetryAfterEstimator {
    /// Records whether requests wait after an event.
    pub fn set_waiting(&mut self, now: Duration, is_waiting: bool) {
        match is_waiting {
            true => self.last = self.last.or(Some(now)),
            false => self.last = None,
        }
    }

    /// Records that a permit was freed.
    pub fn record_freed(&mut self, now: Duration) {
        if let Some(last) = self.last.replace(now) {
            self.freed = DECAY * self.freed + 1.0;
            self.seconds = DECAY * self.seconds + now.saturating_sub(last).as_secs_f64();
        } else {
            self.last = None;
        }
    }

    /// Seconds between two freed permits.
    fn seconds_per_permit(&self, now: Duration) -> f64 {
        let mean = if self.freed > 0.0 { self.seconds / self.freed } else { 0.0 };
        // A queue that has stalled is as slow as its present wait.
        let stall = self.last.map_or(0.0, |last| now.saturating_sub(last).as_secs_f64());
        if stall > mean { (self.seconds + stall) / (self.freed + 1.0) } else { mean }
    }

    /// For a request for `permits`, refused behind `ahead` waiting permits.
    pub fn estimate(&mut self, now: Duration, ahead: u32, permits: u32) -> Duration {
        let gap = self.seconds_per_permit(now);
        self.backlog.estimate(now, gap, ahead, permits)
    }

    /// As `estimate`, for the queue of one tenant, which gets one of `tenants` freed permits.
    pub fn estimate_for_tenant(
        &self,
        backlog: &mut Backlog,
        now: Duration,
        ahead: u32,
        permits: u32,
        tenants: u32,
    ) -> Duration {
        backlog.estimate(now, self.seconds_per_permit(now) * f64::from(tenants), ahead, permits)
    }
}

impl Backlog {
    fn estimate(&mut self, now: Duration, gap: f64, ahead: u32, permits: u32) -> Duration {
        let seconds = |count: u32| Duration::try_from_secs_f64(gap * f64::from(count)).unwrap_or(RETRY_MAX);
        let first = now.saturating_add(seconds(ahead));
        self.until = self.until.max(first).saturating_add(seconds(permits)).min(now + RETRY_MAX);
        let wait = self.until.saturating_sub(now).clamp(RETRY_MIN, RETRY_MAX);
        // Rounds up to whole seconds.
        Duration::from_secs(wait.as_secs() + u64::from(wait.subsec_nanos() > 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    /// One permit every `gap` seconds, twenty times, while requests wait.
    fn measured(gap: f64) -> (RetryAfterEstimator, f64) {
        let mut estimator = RetryAfterEstimator::default();
        estimator.set_waiting(at(0.0), true);
        let moments: Vec<f64> = (1..=20).map(|n| f64::from(n) * gap).collect();
        moments.iter().for_each(|&moment| estimator.record_freed(at(moment)));
        (estimator, moments[19])
    }

    #[test]
    fn refused_requests_get_successive_retry_times() {
        let (mut estimator, now) = measured(2.0);
        let told: Vec<u64> = (0..3).map(|_| estimator.estimate(at(now), 5, 1).as_secs()).collect();
        assert_eq!(told, [12, 14, 16], "five wait, one place in two seconds");
        // The estimate comes true.
        (1..=5).for_each(|n| estimator.record_freed(at(now + 2.0 * f64::from(n))));
        let told: Vec<u64> = (0..2).map(|_| estimator.estimate(at(now + 10.0), 1, 1).as_secs()).collect();
        assert_eq!(told, [8, 10], "behind those of before");
    }

    #[test]
    fn times_are_whole_seconds_between_the_bounds() {
        let mut estimator = RetryAfterEstimator::default();
        assert_eq!(estimator.estimate(at(0.0), 100, 1), RETRY_MIN, "nothing is known yet");
        let (mut estimator, now) = measured(0.01);
        assert_eq!(estimator.estimate(at(now), 5, 1), RETRY_MIN);
        assert_eq!(estimator.estimate(at(now), 150, 1).as_secs(), 2);
        let (mut estimator, now) = measured(30.0);
        assert_eq!(estimator.estimate(at(now), 1000, 1), RETRY_MAX);
        assert_eq!(estimator.estimate(at(now + 1.0), 1000, u32::MAX), RETRY_MAX);
    }

    #[test]
    fn idle_time_does_not_change_the_rate() {
        let (mut estimator, now) = measured(2.0);
        estimator.set_waiting(at(now), false);
        estimator.record_freed(at(now + 1000.0));
        estimator.set_waiting(at(now + 2000.0), true);
        estimator.record_freed(at(now + 2002.0));
        assert_eq!(estimator.estimate(at(now + 2002.0), 4, 1).as_secs(), 10);
    }

    #[test]
    fn a_stall_is_noticed() {
        let (mut estimator, now) = measured(0.1);
        assert_eq!(estimator.estimate(at(now), 4, 1), RETRY_MIN);
        assert!(estimator.estimate(at(now + 40.0), 4, 1).as_secs() >= 15);
    }

    #[test]
    fn a_tenant_waits_for_its_share() {
        let (estimator, now) = measured(1.0);
        let mut backlog = Backlog::default();
        assert_eq!(estimator.estimate_for_tenant(&mut backlog, at(now), 4, 1, 3).as_secs(), 15);
        assert_eq!(estimator.estimate_for_tenant(&mut backlog, at(now), 4, 1, 3).as_secs(), 18);
    }
}
