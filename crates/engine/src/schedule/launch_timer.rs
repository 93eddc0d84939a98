// SPDX-License-Identifier: Apache-2.0

//! When to launch the step behind the one that the device computes.
//!
//! Launched at once, it would keep out requests that arrive meanwhile. So it is launched shortly
//! before the device needs it. A step takes about as long as the ones before it.
//!
//! A launch that comes too late costs the device a pause, and one that comes early costs an arrival
//! a longer wait. Neither changes a token. So the timer may use the clock.

use std::time::Duration;

/// The time from a launch that is due until the device needs it: 60 us until the thread runs, 70 us
/// (0.6B) to 200 us (30B) to plan and to launch. The rest is for threads that run late: with 500
/// us, 0.6B with 64 streams decodes 1.5% slower.
const LAUNCH_LEAD: Duration = Duration::from_micros(750);
/// Steps of which the shortest counts: one slow step says nothing about the next one.
const RECENT: usize = 4;

/// Times are since any fixed moment.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LaunchTimer {
    /// When the device began the step in flight: when it had ended the step before.
    began: Option<Duration>,
    /// Durations of the last steps that were in flight behind another one.
    recent: [Option<Duration>; RECENT],
    next: usize,
}

impl LaunchTimer {
    /// Records a step that was launched after `launched` and read at `read`. `is_followed`: the
    /// next step is in flight. Returns how long the device took for the step.
    pub(crate) fn step_was_read(
        &mut self,
        launched: Duration,
        read: Duration,
        is_followed: bool,
    ) -> Duration {
        let took = read.saturating_sub(self.began.unwrap_or(launched));
        if self.began.is_some() {
            self.recent[self.next % RECENT] = Some(took);
            self.next += 1;
        } else {
            // Steps after a prompt have other rows than those before it.
            self.recent = [None; RECENT];
        }
        self.began = is_followed.then_some(read);
        took
    }

    /// When the step behind the one in flight should be launched. None: at once.
    pub(crate) fn due(&self) -> Option<Duration> {
        let shortest = self.recent.into_iter().flatten().min()?;
        Some(self.began? + shortest.saturating_sub(LAUNCH_LEAD))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(time: f64) -> Duration {
        Duration::from_secs_f64(time / 1e3)
    }

    #[test]
    fn a_launch_is_due_shortly_before_the_shortest_of_the_last_steps_would_end() {
        let mut timer = LaunchTimer::default();
        assert_eq!(timer.step_was_read(ms(10.0), ms(14.0), true), ms(4.0));
        assert_eq!(timer.due(), None, "no step behind another one was measured");
        assert_eq!(timer.step_was_read(ms(14.1), ms(19.0), true), ms(5.0));
        assert_eq!(timer.due(), Some(ms(23.25)));
        assert_eq!(timer.step_was_read(ms(23.5), ms(28.0), true), ms(9.0));
        assert_eq!(timer.due(), Some(ms(32.25)), "the slow step does not count");
        for at in [33.0, 39.0, 45.0, 51.0] {
            timer.step_was_read(ms(at), ms(at), true);
        }
        assert_eq!(timer.due(), Some(ms(55.25)), "the step of 9 ms is forgotten, the others took 5 and 6");
    }

    #[test]
    fn nothing_is_due_without_a_step_in_flight_or_after_a_prompt() {
        let mut timer = LaunchTimer::default();
        timer.step_was_read(ms(0.0), ms(4.0), true);
        timer.step_was_read(ms(4.0), ms(8.0), false);
        assert_eq!(timer.due(), None);
        // A prompt, and a step that nothing was in flight before.
        timer.step_was_read(ms(8.0), ms(80.0), false);
        assert_eq!(timer.step_was_read(ms(80.0), ms(85.0), true), ms(5.0));
        assert_eq!(timer.due(), None);
    }

    #[test]
    fn steps_shorter_than_the_lead_are_due_at_once() {
        let mut timer = LaunchTimer::default();
        timer.step_was_read(ms(0.0), ms(0.3), true);
        timer.step_was_read(ms(0.3), ms(0.6), true);
        assert_eq!(timer.due(), Some(ms(0.6)));
    }
}
