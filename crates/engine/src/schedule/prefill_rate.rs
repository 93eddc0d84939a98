//! How many rows prompts get in a step in which sequences decode: as many as lengthen it by a stated pause, at the pace of
//! the last steps. A plain value.
//!
//! What has no part in a row's price only ever lengthens a step: kernels that are loaded, memory that is mapped, others on the
//! machine. So the least of the last few paces counts, and a step that was held up counts for nothing while one beside it was
//! not. Nothing here can change a token, only how many steps a prompt takes; so it may go by the clock.

use std::time::Duration;

/// However slow the model: with fewer rows, most of a step would go into reading the weights once more. And what fewer rows
/// took says little of what a row takes, so they are added up until they are as many.
const ROWS_MIN: usize = 32;
/// Paces of which the least counts. With more of them prompts would get too many rows for longer when rows get dearer, behind
/// a longer context; two of a worker's first three steps may be held up.
const RECENT: usize = 3;

#[derive(Clone, Copy, Debug)]
pub(crate) struct PrefillRateEstimator {
    /// Seconds of a row of prompts, the last first; infinite where there is none yet.
    seconds_per_row: [f64; RECENT],
    /// Seconds and rows of prompts that are not a pace yet.
    pending: (f64, usize),
    /// Steps without prompts: seconds, and rows.
    decodes: [(f64, usize); RECENT],
}

impl Default for PrefillRateEstimator {
    fn default() -> Self {
        Self {
            seconds_per_row: [f64::INFINITY; RECENT],
            pending: (0.0, 0),
            decodes: [(f64::INFINITY, 1); RECENT],
        }
    }
}

impl PrefillRateEstimator {
    /// Most rows of prompts beside decodes; all while no prompt was seen.
    pub(crate) fn prefill_row_limit(&self, max_stall: Duration) -> usize {
        let least = self.seconds_per_row.into_iter().fold(f64::INFINITY, f64::min);
        let seconds_per_row = match self.pending {
            (seconds, rows) if least.is_infinite() && rows > 0 => seconds / rows as f64,
            _ => least,
        };
        if seconds_per_row.is_infinite() {
            return usize::MAX;
        }
        // Far more than fit is as good as all.
        ((max_stall.as_secs_f64() / seconds_per_row) as usize).max(ROWS_MIN)
    }

    /// A step of so many rows of decodes, drafts among them, and of prompts took so long.
    pub(crate) fn observe(&mut self, decodes: usize, prompts: usize, took: Duration) {
        let took = took.as_secs_f64();
        if prompts > 0 {
            // What the decodes alone would have taken is not the prompts' doing. That is an old figure when prompts never
            // cease, so a quarter of the prompts' share by rows is theirs in any case.
            let share = took * prompts as f64 / (decodes + prompts) as f64;
            self.pending.0 += (took - self.decode_seconds(decodes)).max(share / 4.0);
            self.pending.1 += prompts;
            if self.pending.1 >= ROWS_MIN {
                let (seconds, rows) = std::mem::take(&mut self.pending);
                self.seconds_per_row.rotate_right(1);
                self.seconds_per_row[0] = seconds / rows as f64;
            }
        } else if decodes > 0 {
            self.decodes.rotate_right(1);
            self.decodes[0] = (took, decodes);
        }
    }

    /// What so many rows of decodes take at least. Of a step that had more of them, their share: rows get cheaper by company,
    /// never dearer.
    fn decode_seconds(&self, decodes: usize) -> f64 {
        let of = |(seconds, rows): (f64, usize)| seconds * (decodes as f64 / rows as f64).min(1.0);
        let least = self.decodes.into_iter().map(of).fold(f64::INFINITY, f64::min);
        // Not a number where an infinite time counts for no rows; none was seen then, or none is to be subtracted.
        if least.is_finite() { least } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STALL: Duration = Duration::from_millis(100);

    #[test]
    fn nothing_is_known_before_a_prompt() {
        let mut estimator = PrefillRateEstimator::default();
        assert_eq!(estimator.prefill_row_limit(STALL), usize::MAX);
        estimator.observe(3, 0, Duration::from_secs(1));
        estimator.observe(0, 0, Duration::ZERO);
        assert_eq!(estimator.prefill_row_limit(STALL), usize::MAX);
        estimator.observe(0, 100, Duration::from_secs(1));
        assert_eq!(estimator.prefill_row_limit(STALL), ROWS_MIN);
        assert_eq!(estimator.prefill_row_limit(Duration::MAX), usize::MAX);
    }

    #[test]
    fn few_rows_are_added_up_before_they_are_a_pace() {
        let mut estimator = PrefillRateEstimator::default();
        // A first word on a slow model.
        estimator.observe(0, 5, Duration::from_secs(1));
        assert_eq!(estimator.prefill_row_limit(STALL), ROWS_MIN);
        estimator.observe(0, 500, Duration::from_millis(500));
        assert_eq!(estimator.prefill_row_limit(STALL), 33);
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
            let mut estimator = PrefillRateEstimator::default();
            // A prompt alone, its stream, then both at once.
            estimator.observe(0, 40, takes(0, 40));
            (0..20).for_each(|_| estimator.observe(streams, 0, takes(streams, 0)));
            for step in 0..50 {
                let rows = estimator.prefill_row_limit(STALL).min(step_rows);
                let longer = takes(streams, rows).saturating_sub(takes(streams, 0));
                let least = Duration::from_secs_f64(row * ROWS_MIN as f64);
                prop_assert!(longer <= STALL.max(least).mul_f64(1.001), "{longer:?} in step {step}");
                estimator.observe(streams, rows, takes(streams, rows));
            }
            // And uses what they can bear, but where the pause is little beside what decodes take.
            let rows = estimator.prefill_row_limit(STALL);
            let uses = rows as f64 * row >= 0.099 - row || rows == ROWS_MIN || rows >= step_rows;
            prop_assert!(uses || takes(streams, 0) > 3 * STALL, "{rows} rows of {row} s");
        }

        /// Of three steps in a row two may be held up by whatever it is.
        #[test]
        fn steps_that_were_held_up_cost_prompts_nothing(
            row in 1e-5..0.05_f64,
            streams in 1..64_usize,
            step_rows in 64..2048_usize,
            clean in 0..RECENT,
            delays in proptest::collection::vec(0.0..10.0_f64, 40),
        ) {
            let takes = |prompts: usize| Duration::from_secs_f64(0.02 + 1e-4 * streams as f64 + row * prompts as f64);
            let delay = |step: usize| {
                Duration::from_secs_f64(if step % RECENT == clean { 0.0 } else { delays[step % delays.len()] })
            };
            let mut estimator = PrefillRateEstimator::default();
            (0..RECENT).for_each(|step| estimator.observe(streams, 0, takes(0) + delay(step)));
            for step in 0..60 {
                let rows = estimator.prefill_row_limit(STALL).min(step_rows);
                let least = Duration::from_secs_f64(row * ROWS_MIN as f64);
                if step > 0 {
                    prop_assert!(takes(rows) - takes(0) <= STALL.max(least).mul_f64(1.001), "{rows} rows in step {step}");
                }
                // The first one that was not may have had so few rows that their share of it was more than theirs.
                if step >= 2 * RECENT {
                    let uses = rows as f64 * row >= 0.099 - row || rows == ROWS_MIN || rows == step_rows;
                    prop_assert!(uses, "{rows} rows of {row} s in step {step}");
                }
                estimator.observe(streams, rows, takes(rows) + delay(step));
            }
        }

        /// As they do behind a longer context.
        #[test]
        fn rows_that_get_dearer_are_followed(
            first in 1e-5..0.01_f64,
            growth in 1.0..1.2_f64,
            streams in 1..64_usize,
        ) {
            let takes = |prompts: usize, row: f64| Duration::from_secs_f64(0.01 + row * prompts as f64);
            let mut estimator = PrefillRateEstimator::default();
            estimator.observe(streams, 0, takes(0, 0.0));
            estimator.observe(streams, 256, takes(256, first));
            let mut row = first;
            for step in 0..40 {
                row *= growth;
                let rows = estimator.prefill_row_limit(STALL).min(2_048);
                let longer = takes(rows, row) - takes(0, 0.0);
                let least = Duration::from_secs_f64(row * ROWS_MIN as f64);
                let most = STALL.mul_f64(growth.powi(RECENT as i32)).max(least);
                prop_assert!(longer <= most.mul_f64(1.001), "{longer:?} in step {step}");
                estimator.observe(streams, rows, takes(rows, row));
            }
        }

        /// More streams than when a step without prompts was last seen: prompts get too little, never nothing.
        #[test]
        fn prompts_go_on_while_none_of_the_steps_is_without_them(streams in 2..200_usize) {
            let takes = |decodes: usize, prompts: usize| {
                Duration::from_secs_f64(0.02 + 0.004 * decodes as f64 + 0.002 * prompts as f64)
            };
            let mut estimator = PrefillRateEstimator::default();
            estimator.observe(0, 512, takes(0, 512));
            estimator.observe(1, 0, takes(1, 0));
            for _ in 0..100 {
                let rows = estimator.prefill_row_limit(STALL);
                prop_assert!((ROWS_MIN..=52).contains(&rows), "{rows}");
                estimator.observe(streams, rows, takes(streams, rows));
            }
        }
    }
}
