// SPDX-License-Identifier: Apache-2.0

//! The pace at which a request body must arrive. A plain value.

use std::time::Duration;

use crate::admission::Uptime;

#[derive(Clone, Copy, Debug)]
pub(crate) struct PaceLimits {
    /// Time that every body has, whatever its size, and longest pause within a body.
    pub(crate) grace: Duration,
    /// Bytes a second, on average after the grace time.
    pub(crate) rate_min: u64,
}

#[derive(Debug)]
pub(crate) struct BodyPace {
    limits: PaceLimits,
    started: Uptime,
    last: Uptime,
    received: u64,
}

impl BodyPace {
    pub(crate) fn new(limits: PaceLimits, now: Uptime) -> Self {
        Self { limits, started: now, last: now, received: 0 }
    }

    pub(crate) fn receive(&mut self, bytes: u64, now: Uptime) {
        self.received += bytes;
        self.last = now;
    }

    /// The body is too slow if no byte arrives until then.
    pub(crate) fn deadline(&self) -> Uptime {
        let PaceLimits { grace, rate_min } = self.limits;
        let earned = Duration::from_millis(self.received.saturating_mul(1000) / rate_min.max(1));
        (self.last + grace).min(self.started + grace + earned)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: PaceLimits = PaceLimits { grace: Duration::from_secs(10), rate_min: 1000 };

    fn seconds(n: u64) -> Uptime {
        Duration::from_secs(n)
    }

    #[test]
    fn a_body_that_stops_or_trickles_has_a_deadline() {
        let mut pace = BodyPace::new(LIMITS, seconds(5));
        assert_eq!(pace.deadline(), seconds(15));
        pace.receive(1_000_000, seconds(6));
        assert_eq!(pace.deadline(), seconds(16), "the body stops");
        let mut pace = BodyPace::new(LIMITS, seconds(0));
        (1..=12).for_each(|second| pace.receive(100, seconds(second)));
        assert_eq!(pace.deadline(), Duration::from_millis(11_200), "100 bytes a second are too few");
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_body_at_the_minimum_rate_is_never_too_slow_and_none_lasts_longer(
            pieces in proptest::collection::vec((1_u64..5000, 0_u64..10_000), 1..50),
        ) {
            let (mut pace, mut now, mut sent) = (BodyPace::new(LIMITS, seconds(0)), seconds(0), 0);
            for (bytes, pause) in pieces {
                now += Duration::from_millis(pause);
                let is_too_slow = now >= pace.deadline();
                let is_at_rate = now <= LIMITS.grace + Duration::from_millis(sent);
                prop_assert!(is_at_rate || is_too_slow);
                let is_short = Duration::from_millis(pause) < LIMITS.grace;
                let is_before = now < LIMITS.grace + Duration::from_millis(sent);
                prop_assert!(!(is_short && is_before && is_too_slow));
                if is_too_slow {
                    break;
                }
                sent += bytes;
                pace.receive(bytes, now);
                prop_assert!(pace.deadline() <= LIMITS.grace + Duration::from_millis(sent));
            }
        }
    }
}
