// SPDX-License-Identifier: Apache-2.0

//! Caps chunked prefill while sequences decode: limits prefill rows so that they delay decodes by
//! at most `max_prefill_stall`, using the measured prefill rate.
//!
//! Anything but rows only lengthens a step: loading kernels, mapping memory, other processes. The
//! estimator therefore uses the lowest time per row of the last few samples. One slow step does not
//! count while a step next to it was fast.
//!
//! The estimate changes only how many steps a prompt takes, never a token. So the estimator may use
//! the clock.

use std::time::Duration;

/// Lowest limit. A step with fewer rows spends most of its time reading the weights. For the same
/// reason fewer rows give no sample by themselves: they are added up until they are this many.
const ROWS_MIN: usize = 32;
/// Samples of which the lowest counts. With more samples, prompts would get too many rows for
/// longer when rows become slower behind a longer context. Two of a worker's first three steps may
/// be slow.
const RECENT: usize = 3;

#[derive(Clone, Copy, Debug)]
pub(crate) struct PrefillRateEstimator {
    /// Seconds per prefill row, newest sample first. Infinite: no sample yet.
    seconds_per_row: [f64; RECENT],
    /// Seconds and prefill rows that are not a sample yet.
    pending: (f64, usize),
    /// Seconds and rows of the last steps without prefill, newest first.
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
    /// Most prefill rows in a step in which sequences decode. Unlimited until the first prefill.
    pub(crate) fn prefill_row_limit(&self, max_stall: Duration) -> usize {
        let least = self.seconds_per_row.into_iter().fold(f64::INFINITY, f64::min);
        let seconds_per_row = match self.pending {
            (seconds, rows) if least.is_infinite() && rows > 0 => seconds / rows as f64,
            _ => least,
        };
        if seconds_per_row.is_infinite() {
            return usize::MAX;
        }
        // The cast saturates, which means unlimited.
        ((max_stall.as_secs_f64() / seconds_per_row) as usize).max(ROWS_MIN)
    }

    /// Records a step: its decode rows (draft rows included), its prefill rows and its duration.
    pub(crate) fn observe(&mut self, decodes: usize, prompts: usize, took: Duration) {
        let took = took.as_secs_f64();
        if prompts > 0 {
            // The time that the decodes alone would take is not prefill time. That figure is old
            // while every step has prefill rows. So at least a quarter of the prefill's share by
            // rows counts as prefill time.
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

    /// Lowest estimated time of a step with these decode rows and no prefill. A step with more rows
    /// counts in proportion: more rows in a batch make a row cheaper, never slower.
    fn decode_seconds(&self, decodes: usize) -> f64 {
        let of = |(seconds, rows): (f64, usize)| seconds * (decodes as f64 / rows as f64).min(1.0);
        let least = self.decodes.into_iter().map(of).fold(f64::INFINITY, f64::min);
        // The fold gives infinity or NaN if no step without prefill was recorded, or `decodes` is
        // 0.
        if least.is_finite() { least } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STALL: Duration = Duration::from_millis(100);

    #[test]
    fn prefill_is_unlimited_before_the_first_prompt() {
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
    fn few_rows_are_added_up_before_they_are_a_sample() {
        let mut estimator = PrefillRateEstimator::default();
        // The first prompt on a slow model.
        estimator.observe(0, 5, Duration::from_secs(1));
        assert_eq!(estimator.prefill_row_limit(STALL), ROWS_MIN);
        estimator.observe(0, 500, Duration::from_millis(500));
        assert_eq!(estimator.prefill_row_limit(STALL), 33);
    }

    proptest! {
        /// On any model and machine, a step with prefill and decodes takes at most this much longer
        /// than one with decodes alone.
        #[test]
        fn prefill_lengthens_a_step_by_the_allowed_stall_or_the_lowest_limit(
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
            // A prefill alone, then decodes alone, then both.
            estimator.observe(0, 40, takes(0, 40));
            (0..20).for_each(|_| estimator.observe(streams, 0, takes(streams, 0)));
            for step in 0..50 {
                let rows = estimator.prefill_row_limit(STALL).min(step_rows);
                let longer = takes(streams, rows).saturating_sub(takes(streams, 0));
                let least = Duration::from_secs_f64(row * ROWS_MIN as f64);
                prop_assert!(longer <= STALL.max(least).mul_f64(1.001), "{longer:?} in step {step}");
                estimator.observe(streams, rows, takes(streams, rows));
            }
            // The limit uses the allowed stall, unless the stall is small compared with the
            // decodes.
            let rows = estimator.prefill_row_limit(STALL);
            let uses = rows as f64 * row >= 0.099 - row || rows == ROWS_MIN || rows >= step_rows;
            prop_assert!(uses || takes(streams, 0) > 3 * STALL, "{rows} rows of {row} s");
        }

        /// Two of three consecutive steps may be slow for any reason.
        #[test]
        fn slow_steps_do_not_lower_the_limit(
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
                // The first fast step may have so few rows that their share by rows exceeds their
                // cost.
                if step >= 2 * RECENT {
                    let uses = rows as f64 * row >= 0.099 - row || rows == ROWS_MIN || rows == step_rows;
                    prop_assert!(uses, "{rows} rows of {row} s in step {step}");
                }
                estimator.observe(streams, rows, takes(rows) + delay(step));
            }
        }

        /// Rows become slower behind a longer context.
        #[test]
        fn the_limit_follows_rows_that_become_slower(
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

        /// More sequences decode than in the last step without prefill: the limit is too low then,
        /// but never zero.
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
