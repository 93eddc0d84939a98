// SPDX-License-Identifier: Apache-2.0

//! Summaries of samples.

use serde::Serialize;

/// Latencies in milliseconds. Percentiles are values of the sample, by nearest rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LatencySummary {
    pub count: usize,
    pub mean_ms: f64,
    pub p50_ms: f64,
    pub p90_ms: f64,
    pub p99_ms: f64,
    pub max_ms: f64,
}

/// Summarizes a sample. All values are 0 for an empty sample.
pub fn summarize(mut sample_ms: Vec<f64>) -> LatencySummary {
    sample_ms.sort_by(f64::total_cmp);
    let Some(&max_ms) = sample_ms.last() else { return LatencySummary::default() };
    let count = sample_ms.len();
    let rank = |share: f64| sample_ms[((count as f64 * share).ceil() as usize).clamp(1, count) - 1];
    LatencySummary {
        count,
        mean_ms: sample_ms.iter().sum::<f64>() / count as f64,
        p50_ms: rank(0.50),
        p90_ms: rank(0.90),
        p99_ms: rank(0.99),
        max_ms,
    }
}

/// The median, for an even number of values the upper one. 0 for no values.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_is_a_value_of_the_sample() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![1.0, 2.0]), 2.0);
        assert_eq!(median(vec![]), 0.0);
    }

    #[test]
    fn percentiles_are_values_of_the_sample() {
        let sample = (1..=200).rev().map(f64::from).collect();
        let summary = summarize(sample);
        assert_eq!(
            (summary.p50_ms, summary.p90_ms, summary.p99_ms, summary.max_ms),
            (100.0, 180.0, 198.0, 200.0)
        );
        assert_eq!((summary.count, summary.mean_ms), (200, 100.5));
    }

    #[test]
    fn a_sample_of_one_is_all_its_percentiles() {
        let summary = summarize(vec![3.0]);
        assert_eq!((summary.p50_ms, summary.p99_ms, summary.max_ms), (3.0, 3.0, 3.0));
        assert_eq!(super::summarize(vec![]), LatencySummary::default());
    }
}
