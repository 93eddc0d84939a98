// SPDX-License-Identifier: Apache-2.0

//! Mean, deviation and percentiles, as numpy computes them.

/// A sorted sample. All figures of an empty one are 0, as vLLM reports them.
#[derive(Clone, Debug, PartialEq)]
pub struct SortedSample(Vec<f64>);

impl SortedSample {
    pub fn new(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        Self(values)
    }

    pub fn values(&self) -> &[f64] {
        &self.0
    }

    pub fn mean(&self) -> f64 {
        self.0.iter().sum::<f64>() / (self.0.len().max(1) as f64)
    }

    /// The deviation of the sample itself, not an estimate for what it is drawn from.
    pub fn standard_deviation(&self) -> f64 {
        let mean = self.mean();
        let squares = self.0.iter().map(|value| (value - mean) * (value - mean));
        (squares.sum::<f64>() / (self.0.len().max(1) as f64)).sqrt()
    }

    /// A percentile from 0 to 100, on the line between its two neighbours.
    pub fn percentile(&self, percent: f64) -> f64 {
        let Some(last) = self.0.len().checked_sub(1) else { return 0.0 };
        let rank = (last as f64 * percent / 100.0).clamp(0.0, last as f64);
        let (below, share) = (rank.floor() as usize, rank.fract());
        let next = (below + 1).min(last);
        self.0[below] + (self.0[next] - self.0[below]) * share
    }

    pub fn max(&self) -> f64 {
        self.0.last().copied().unwrap_or(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `numpy.percentile([1, 2, 4, 8], ...)`, `numpy.std(...)`.
    #[test]
    fn figures_are_those_of_numpy() {
        let sample = SortedSample::new(vec![8.0, 1.0, 4.0, 2.0]);
        let percentiles = [0.0, 25.0, 50.0, 90.0, 99.0, 100.0].map(|percent| sample.percentile(percent));
        let expected = [1.0, 1.75, 3.0, 6.8, 7.88, 8.0];
        assert!(percentiles.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12), "{percentiles:?}");
        assert_eq!((sample.mean(), sample.max()), (3.75, 8.0));
        assert!((sample.standard_deviation() - 2.680_951_323_690_902).abs() < 1e-12);
    }

    #[test]
    fn an_empty_sample_has_zeros() {
        let empty = SortedSample::new(Vec::new());
        assert_eq!((empty.mean(), empty.standard_deviation(), empty.percentile(99.0)), (0.0, 0.0, 0.0));
    }
}
