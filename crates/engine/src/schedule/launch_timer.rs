// SPDX-License-Identifier: Apache-2.0

//! When to launch the step behind the one that the device computes.
//!
//! Launched at once, it would keep out requests that arrive meanwhile. So it is launched shortly
//! before the device needs it. A step takes about as long as the ones before it. If the tokens of a
//! step were there before the host asked for them, the launch came too late, and the times so far
//! say nothing: the next steps are launched at once.
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
/// The first step of a chain may load kernels or capture a graph, so it does not count alone.
const MEASURED_MIN: usize = 2;

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
    /// Records a step that was launched after `launched` and read at `read`. `was_late`: its tokens
    /// were there before the host asked. `is_followed`: the next step is in flight. Returns how
    /// long the step took.
    pub(crate) fn step_was_read(
        &mut self,
        launched: Duration,
        read: Duration,
        was_late: bool,
        is_followed: bool,
    ) -> Duration {
        let took = read.saturating_sub(self.began.unwrap_or(launched));
        if self.began.is_some() && !was_late {
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
        let measured = self.recent.into_iter().flatten();
        let shortest = measured.clone().min().filter(|_| measured.count() >= MEASURED_MIN)?;
        Some(self.began? + shortest.saturating_sub(LAUNCH_LEAD))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(time: f64) -> Duration {
        Duration::from_nanos((time * 1e6).round() as u64)
    }

    /// A timer that has read a first step at 0 ms, then steps at these times, each followed.
    fn timer(read: &[f64]) -> LaunchTimer {
        let mut timer = LaunchTimer::default();
        for &at in std::iter::once(&0.0).chain(read) {
            timer.step_was_read(ms(at), ms(at), false, true);
        }
        timer
    }

    #[test]
    fn a_launch_is_due_shortly_before_the_shortest_of_the_last_steps_would_end() {
        assert_eq!(timer(&[]).due(), None, "no step behind another one was measured");
        assert_eq!(timer(&[5.0]).due(), None, "one step does not count alone");
        assert_eq!(timer(&[5.0, 14.0]).due(), Some(ms(18.25)), "the slow step does not count");
        // The step of 4 ms is forgotten.
        assert_eq!(timer(&[4.0, 10.0, 16.0, 21.0, 27.0]).due(), Some(ms(31.25)));
        let took = timer(&[]).step_was_read(ms(4.0), ms(5.0), false, true);
        assert_eq!(took, ms(5.0), "since the end of the step before");
    }

    #[test]
    fn nothing_is_due_without_a_step_in_flight_or_after_a_prompt() {
        let mut timer = timer(&[4.0, 8.0]);
        timer.step_was_read(ms(8.0), ms(12.0), false, false);
        assert_eq!(timer.due(), None);
        // A prompt, and a step that nothing was in flight before.
        timer.step_was_read(ms(12.0), ms(80.0), false, false);
        assert_eq!(timer.step_was_read(ms(80.0), ms(85.0), false, true), ms(5.0));
        assert_eq!(timer.due(), None);
    }

    #[test]
    fn after_a_launch_that_came_too_late_the_next_ones_are_due_at_once() {
        let mut timer = timer(&[30.0, 60.0]);
        assert_eq!(timer.due(), Some(ms(89.25)));
        timer.step_was_read(ms(89.25), ms(89.5), true, true);
        assert_eq!(timer.due(), None);
        timer.step_was_read(ms(89.5), ms(99.5), false, true);
        timer.step_was_read(ms(99.5), ms(109.5), false, true);
        assert_eq!(timer.due(), Some(ms(118.75)));
    }

    #[test]
    fn steps_shorter_than_the_lead_are_due_at_once() {
        assert_eq!(timer(&[0.3, 0.6]).due(), Some(ms(0.6)));
    }
}
