//! How many rows prompts get in a step in which sequences decode: as many as lengthen it by a stated pause, at the pace of
//! the last steps. A plain value.
//!
//! Nothing here can change a token, only how many steps a prompt takes; so it may go by the clock.

use std::time::Duration;

/// However slow the model: with fewer rows, most of a step would go into reading the weights once more.
const ROWS_MIN: usize = 32;
/// A step's weight falls by this factor with each that follows: some four count.
const MEMORY: f64 = 0.75;

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RowTime {
    /// Of steps with prompts: the seconds that prompts took of them, and their rows.
    prompts: (f64, f64),
    /// Of steps without: seconds, and how many.
    decodes: (f64, f64),
}

impl RowTime {
    /// Most rows of prompts beside decodes; all while no prompt was seen.
    pub(crate) fn beside(&self, pause: Duration) -> usize {
        let (seconds, rows) = self.prompts;
        if seconds == 0.0 {
            return usize::MAX;
        }
        // Far more than fit is as good as all.
        ((pause.as_secs_f64() * rows / seconds) as usize).max(ROWS_MIN)
    }

    /// A step of so many rows of decodes, drafts among them, and of prompts took so long.
    pub(crate) fn observe(&mut self, decodes: usize, prompts: usize, took: Duration) {
        let took = took.as_secs_f64();
        let add = |(sum, weight): &mut (f64, f64), more: f64, by: f64| {
            (*sum, *weight) = (*sum * MEMORY + more, *weight * MEMORY + by);
        };
        if prompts > 0 {
            // What the decodes alone would have taken is not the prompts' doing. That is an old figure when prompts never
            // cease, so a quarter of the prompts' share by rows is theirs in any case.
            let (seconds, steps) = self.decodes;
            let alone = if decodes > 0 && steps > 0.0 { seconds / steps } else { 0.0 };
            let share = took * prompts as f64 / (decodes + prompts) as f64;
            add(&mut self.prompts, (took - alone).max(share / 4.0), prompts as f64);
        } else if decodes > 0 {
            add(&mut self.decodes, took, 1.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAUSE: Duration = Duration::from_millis(100);

    #[test]
    fn nothing_is_known_before_a_prompt() {
        let mut time = RowTime::default();
        assert_eq!(time.beside(PAUSE), usize::MAX);
        time.observe(3, 0, Duration::from_secs(1));
        time.observe(0, 0, Duration::ZERO);
        assert_eq!(time.beside(PAUSE), usize::MAX);
        time.observe(0, 100, Duration::from_secs(1));
        assert_eq!(time.beside(PAUSE), ROWS_MIN);
        assert_eq!(time.beside(Duration::MAX), usize::MAX);
    }

    proptest! {
        /// Whatever model and machine: a step with both takes at most so much longer than one of decodes.
        #[test]
        fn prompts_lengthen_a_step_by_the_pause_or_by_the_least_rows(
            fixed in 0.0..0.05_f64,
            decode in 1e-5..0.01_f64,
            row in 1e-5..0.05_f64,
            streams in 1..64_usize,
            step_rows in 64..2048_usize,
        ) {
            let takes = |decodes: usize, prompts: usize| {
                Duration::from_secs_f64(fixed + decode * decodes as f64 + row * prompts as f64)
            };
            let mut time = RowTime::default();
            // A prompt alone, its stream, then both at once.
            time.observe(0, 40, takes(0, 40));
            (0..20).for_each(|_| time.observe(streams, 0, takes(streams, 0)));
            for step in 0..50 {
                let rows = time.beside(PAUSE).min(step_rows);
                let longer = takes(streams, rows).saturating_sub(takes(streams, 0));
                let least = Duration::from_secs_f64(row * ROWS_MIN as f64);
                prop_assert!(longer <= PAUSE.max(least).mul_f64(1.001), "{longer:?} in step {step}");
                time.observe(streams, rows, takes(streams, rows));
            }
            // And uses what they can bear, but where the pause is little beside what decodes take.
            let rows = time.beside(PAUSE);
            let uses = rows as f64 * row >= 0.099 - row || rows == ROWS_MIN || rows >= step_rows;
            prop_assert!(uses || takes(streams, 0) > 3 * PAUSE, "{rows} rows of {row} s");
        }

        /// More streams than when a step without prompts was last seen: prompts get too little, never nothing.
        #[test]
        fn prompts_go_on_while_none_of_the_steps_is_without_them(streams in 2..200_usize) {
            let takes = |decodes: usize, prompts: usize| {
                Duration::from_secs_f64(0.02 + 0.004 * decodes as f64 + 0.002 * prompts as f64)
            };
            let mut time = RowTime::default();
            time.observe(0, 512, takes(0, 512));
            time.observe(1, 0, takes(1, 0));
            for _ in 0..100 {
                let rows = time.beside(PAUSE);
                prop_assert!((ROWS_MIN..=52).contains(&rows), "{rows}");
                time.observe(streams, rows, takes(streams, rows));
            }
        }
    }
}
