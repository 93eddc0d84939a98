//! When to come again: how fast places have become free of late, and how many are spoken for.
//!
//! The queue goes on outside. A refused request is told the time at which everybody who waits, and everybody refused
//! before it, will have been served at the present pace; so those who come again come one after the other, each about
//! when it is its turn, and not all at once. A plain value without a clock: the queues of router and worker each have one.

#![forbid(unsafe_code)]

use std::time::Duration;

/// Since whatever moment its owner counts from.
pub type Time = Duration;

/// What a refused one is told at least: a shorter time is not worth a round trip, and `Retry-After` counts seconds.
const RETRY_MIN: Duration = Duration::from_secs(1);
/// And at most: what the pace was says little about later.
const RETRY_MAX: Duration = Duration::from_secs(60);

/// What remains of older measurements with each place that becomes free: the last ten count most.
const KEPT: f64 = 0.9;

#[derive(Debug, Default)]
pub struct Pace {
    /// Places that became free while somebody waited, and the seconds that it took; older ones count less.
    freed: f64,
    seconds: f64,
    /// The last such moment, or when waiting began. None while nobody waits: an idle fleet says nothing of its pace.
    last: Option<Time>,
    outside: Outside,
}

/// Until when the places to come are spoken for by those that were refused.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outside {
    until: Time,
}

impl Pace {
    /// Somebody waits, or nobody does, after an event.
    pub fn waiting(&mut self, now: Time, somebody: bool) {
        match somebody {
            true => self.last = self.last.or(Some(now)),
            false => self.last = None,
        }
    }

    /// A place has become free.
    pub fn freed(&mut self, now: Time) {
        if let Some(last) = self.last.replace(now) {
            self.freed = KEPT * self.freed + 1.0;
            self.seconds = KEPT * self.seconds + now.saturating_sub(last).as_secs_f64();
        } else {
            self.last = None;
        }
    }

    /// Seconds between two places that become free.
    fn gap(&self, now: Time) -> f64 {
        let mean = if self.freed > 0.0 { self.seconds / self.freed } else { 0.0 };
        // A fleet that has come to a halt is as slow as it is now.
        let halt = self.last.map_or(0.0, |last| now.saturating_sub(last).as_secs_f64());
        if halt > mean { (self.seconds + halt) / (self.freed + 1.0) } else { mean }
    }

    /// For a request of `places` that was refused behind `ahead` that wait.
    pub fn promise(&mut self, now: Time, ahead: u32, places: u32) -> Duration {
        let gap = self.gap(now);
        self.outside.promise(now, gap, ahead, places)
    }

    /// The same for a tenant's own queue, which gets one of `share` places.
    pub fn promise_to(
        &self,
        outside: &mut Outside,
        now: Time,
        ahead: u32,
        places: u32,
        share: u32,
    ) -> Duration {
        outside.promise(now, self.gap(now) * f64::from(share), ahead, places)
    }
}

impl Outside {
    fn promise(&mut self, now: Time, gap: f64, ahead: u32, places: u32) -> Duration {
        let seconds = |count: u32| Duration::try_from_secs_f64(gap * f64::from(count)).unwrap_or(RETRY_MAX);
        let first = now.saturating_add(seconds(ahead));
        self.until = self.until.max(first).saturating_add(seconds(places)).min(now + RETRY_MAX);
        let wait = self.until.saturating_sub(now).clamp(RETRY_MIN, RETRY_MAX);
        // Whole seconds, as they are told.
        Duration::from_secs(wait.as_secs() + u64::from(wait.subsec_nanos() > 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: f64) -> Time {
        Time::from_secs_f64(seconds)
    }

    /// One place every `gap` seconds, twenty times, while somebody waits.
    fn measured(gap: f64) -> (Pace, f64) {
        let mut pace = Pace::default();
        pace.waiting(at(0.0), true);
        let moments: Vec<f64> = (1..=20).map(|n| f64::from(n) * gap).collect();
        moments.iter().for_each(|&moment| pace.freed(at(moment)));
        (pace, moments[19])
    }

    #[test]
    fn those_refused_are_told_the_times_at_which_it_will_be_their_turn() {
        let (mut pace, now) = measured(2.0);
        let told: Vec<u64> = (0..3).map(|_| pace.promise(at(now), 5, 1).as_secs()).collect();
        assert_eq!(told, [12, 14, 16], "five wait, one place in two seconds");
        // What was promised comes true.
        (1..=5).for_each(|n| pace.freed(at(now + 2.0 * f64::from(n))));
        let told: Vec<u64> = (0..2).map(|_| pace.promise(at(now + 10.0), 1, 1).as_secs()).collect();
        assert_eq!(told, [8, 10], "behind those of before");
    }

    #[test]
    fn times_are_whole_seconds_between_the_bounds() {
        let mut pace = Pace::default();
        assert_eq!(pace.promise(at(0.0), 100, 1), RETRY_MIN, "nothing is known yet");
        let (mut pace, now) = measured(0.01);
        assert_eq!(pace.promise(at(now), 5, 1), RETRY_MIN);
        assert_eq!(pace.promise(at(now), 150, 1).as_secs(), 2);
        let (mut pace, now) = measured(30.0);
        assert_eq!(pace.promise(at(now), 1000, 1), RETRY_MAX);
        assert_eq!(pace.promise(at(now + 1.0), 1000, u32::MAX), RETRY_MAX);
    }

    #[test]
    fn idle_times_say_nothing_of_the_pace() {
        let (mut pace, now) = measured(2.0);
        pace.waiting(at(now), false);
        pace.freed(at(now + 1000.0));
        pace.waiting(at(now + 2000.0), true);
        pace.freed(at(now + 2002.0));
        assert_eq!(pace.promise(at(now + 2002.0), 4, 1).as_secs(), 10);
    }

    #[test]
    fn a_halt_is_noticed() {
        let (mut pace, now) = measured(0.1);
        assert_eq!(pace.promise(at(now), 4, 1), RETRY_MIN);
        assert!(pace.promise(at(now + 40.0), 4, 1).as_secs() >= 15);
    }

    #[test]
    fn a_tenant_waits_for_its_share() {
        let (pace, now) = measured(1.0);
        let mut outside = Outside::default();
        assert_eq!(pace.promise_to(&mut outside, at(now), 4, 1, 3).as_secs(), 15);
        assert_eq!(pace.promise_to(&mut outside, at(now), 4, 1, 3).as_secs(), 18);
    }
}
