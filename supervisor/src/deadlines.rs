// SPDX-License-Identifier: Apache-2.0

//! The deadlines of all children, on one clock. A plain value.
//!
//! A supervisor that was stopped finds on waking that deadlines have passed, and that messages of
//! its children lie unread. Two rules keep it from killing healthy children:
//! 1. Deadlines are on a [`RunningClock`], so they move with the pause.
//! 2. A passed deadline is reported once, and acted on only after the messages that the child has
//!    sent before.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use service::RunningClock;

/// If the event loop does not read its clock for longer, the process did not run.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// A pause counts for this part of the watchdog time at most. Children report every third of it, so
/// a child that was paused too has five twelfths left to go on and report.
const PAUSE_PART: u32 = 4;
/// The event loop reads its clock so many times in the shortest pause, at least.
const READINGS_PER_PAUSE: u32 = 2;

#[derive(Debug)]
pub struct ChildDeadlines {
    clock: RunningClock,
    heartbeat: Duration,
    /// Children whose passed deadline is reported and not acted on yet.
    reported: BTreeSet<Arc<str>>,
}

impl ChildDeadlines {
    /// `watchdog` is the longest time between two messages of a running child.
    pub fn new(now: Instant, watchdog: Duration) -> Self {
        let pause = PAUSE_MAX.min(watchdog / PAUSE_PART);
        Self {
            clock: RunningClock::new(now, pause),
            heartbeat: pause / READINGS_PER_PAUSE,
            reported: BTreeSet::new(),
        }
    }

    /// Takes a reading of the monotonic clock and returns the running time.
    pub fn advance(&mut self, now: Instant) -> Instant {
        self.clock.advance(now)
    }

    /// The running time of the last reading.
    pub fn running_time(&self) -> Instant {
        self.clock.now()
    }

    /// The sum of all pauses of this process.
    pub fn paused(&self) -> Duration {
        self.clock.paused()
    }

    /// When to call [`Self::report_passed`] next, on the monotonic clock. `deadlines` are those of
    /// all children.
    pub fn next_tick<'a>(&self, deadlines: impl Iterator<Item = (&'a Arc<str>, Option<Instant>)>) -> Instant {
        let open = deadlines.filter(|(name, _)| !self.reported.contains(*name));
        let deadline = open.filter_map(|(_, deadline)| deadline).min();
        // From the last reading, not from now: frequent events that read no clock, such as queries
        // of the status, would put it off for ever, and the time until then would count as a pause.
        let heartbeat = self.clock.monotonic(self.clock.now()) + self.heartbeat;
        deadline.map_or(heartbeat, |deadline| self.clock.monotonic(deadline).min(heartbeat))
    }

    /// The children whose deadline has passed and is not reported yet.
    pub fn report_passed<'a>(
        &mut self,
        now: Instant,
        deadlines: impl Iterator<Item = (&'a Arc<str>, Option<Instant>)>,
    ) -> Vec<Arc<str>> {
        let now = self.clock.advance(now);
        let is_due = |deadline: Option<Instant>| deadline.is_some_and(|deadline| deadline <= now);
        let due = deadlines.filter(|(name, deadline)| is_due(*deadline) && !self.reported.contains(*name));
        let due: Vec<Arc<str>> = due.map(|(name, _)| name.clone()).collect();
        self.reported.extend(due.iter().cloned());
        due
    }

    /// The report was acted on, or could not be delivered.
    pub fn clear_report(&mut self, child: &str) {
        self.reported.remove(child);
    }
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use super::*;

    const WATCHDOG: Duration = Duration::from_secs(30);

    #[test]
    fn a_deadline_is_reported_once_until_it_was_acted_on() {
        let start = Instant::now();
        let mut deadlines = ChildDeadlines::new(start, WATCHDOG);
        let (early, late): (Arc<str>, Arc<str>) = ("early".into(), "late".into());
        let of = [(&early, Some(start + PAUSE_MAX)), (&late, Some(start + 3 * PAUSE_MAX))];
        assert_eq!(deadlines.next_tick(of.into_iter()), start + PAUSE_MAX / READINGS_PER_PAUSE);
        assert_eq!(deadlines.report_passed(start + PAUSE_MAX, of.into_iter()), from_ref(&early));
        assert!(deadlines.report_passed(start + PAUSE_MAX, of.into_iter()).is_empty());
        deadlines.clear_report("early");
        assert_eq!(deadlines.report_passed(start + PAUSE_MAX, of.into_iter()), from_ref(&early));
    }

    #[test]
    fn the_heartbeat_comes_some_time_after_the_last_reading() {
        let start = Instant::now();
        let mut deadlines = ChildDeadlines::new(start, WATCHDOG);
        deadlines.advance(start + 45 * PAUSE_MAX);
        let no_deadlines = || std::iter::empty::<(&Arc<str>, Option<Instant>)>();
        assert_eq!(
            deadlines.next_tick(no_deadlines()),
            start + 45 * PAUSE_MAX + PAUSE_MAX / READINGS_PER_PAUSE
        );
    }

    #[test]
    fn deadlines_move_with_a_pause_of_this_process() {
        let start = Instant::now();
        let mut deadlines = ChildDeadlines::new(start, WATCHDOG);
        let child: Arc<str> = "child".into();
        let of = || [(&child, Some(start + 2 * PAUSE_MAX))].into_iter();
        assert!(deadlines.report_passed(start + 45 * PAUSE_MAX, of()).is_empty());
        assert_eq!(deadlines.paused(), 44 * PAUSE_MAX);
        assert_eq!(deadlines.report_passed(start + 46 * PAUSE_MAX, of()), from_ref(&child));
    }

    #[test]
    fn a_frozen_child_that_goes_on_after_its_supervisor_has_a_third_of_the_watchdog_time_to_report() {
        for watchdog in [1, 2, 3, 10, 30].map(Duration::from_secs) {
            let start = Instant::now();
            let mut deadlines = ChildDeadlines::new(start, watchdog);
            let child: Arc<str> = "child".into();
            // The last message was a third of the watchdog time old when both were frozen.
            let deadline = start + watchdog;
            let of = || [(&child, Some(deadline))].into_iter();
            let frozen = start + watchdog / 3;
            let mut now = start;
            while now < frozen {
                now = deadlines.next_tick(of()).min(frozen);
                assert!(deadlines.report_passed(now, of()).is_empty());
            }
            now += Duration::from_secs(45);
            let limit = now + watchdog / 3;
            while now < limit {
                assert!(deadlines.report_passed(now, of()).is_empty(), "{watchdog:?}");
                now = deadlines.next_tick(of());
            }
        }
    }
}
