// SPDX-License-Identifier: Apache-2.0

//! When requests arrive: a Poisson process, or a gamma process for other burstiness.

use std::str::FromStr;
use std::time::Duration;

use rand::SeedableRng;
use rand::rngs::Xoshiro256PlusPlus;
use rand_distr::{Distribution, Gamma};

/// Arrivals per second that a client on one machine can still schedule apart.
const REQUEST_RATE_MAX: f64 = 1e6;

/// Arrivals per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RequestRate {
    PerSecond(f64),
    /// All requests arrive at once, or as soon as the limit of concurrency lets them.
    Unlimited,
}

/// Why there is no schedule.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ArrivalError {
    #[error("{0:?} is no request rate: write requests per second, above 0 and up to 1e6, or \"inf\"")]
    Rate(String),
    #[error("a burstiness of {0} is impossible: it is above 0, and 1 is a Poisson process")]
    Burstiness(f64),
}

impl FromStr for RequestRate {
    type Err = ArrivalError;

    fn from_str(text: &str) -> Result<Self, ArrivalError> {
        match text.parse::<f64>() {
            Ok(rate) if rate == f64::INFINITY => Ok(Self::Unlimited),
            Ok(rate) if rate > 0.0 && rate <= REQUEST_RATE_MAX => Ok(Self::PerSecond(rate)),
            _ => Err(ArrivalError::Rate(text.to_owned())),
        }
    }
}

/// The times of arrival since the start of the run, without end. A seed always gives the same
/// times.
///
/// Intervals follow a gamma distribution with shape `burstiness` and mean 1 / rate, as in vLLM's
/// benchmark. Shape 1 is the exponential distribution of a Poisson process. vLLM stretches the
/// schedule so that the last arrival is at count / rate; here the count in a time varies, as it
/// does in a Poisson process.
pub struct Arrivals {
    /// `None`: every request arrives at 0.
    intervals_s: Option<Gamma<f64>>,
    random: Xoshiro256PlusPlus,
    at_s: f64,
}

impl Arrivals {
    pub fn new(rate: RequestRate, burstiness: f64, seed: u64) -> Result<Self, ArrivalError> {
        let intervals_s = match rate {
            _ if !(burstiness > 0.0 && burstiness.is_finite()) => {
                return Err(ArrivalError::Burstiness(burstiness));
            }
            RequestRate::Unlimited => None,
            RequestRate::PerSecond(rate) => {
                let intervals = Gamma::new(burstiness, 1.0 / (rate * burstiness));
                Some(intervals.map_err(|_| ArrivalError::Burstiness(burstiness))?)
            }
        };
        Ok(Self { intervals_s, random: Xoshiro256PlusPlus::seed_from_u64(seed), at_s: 0.0 })
    }
}

impl Iterator for Arrivals {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        if let Some(intervals_s) = &self.intervals_s {
            self.at_s += intervals_s.sample(&mut self.random);
        }
        Duration::try_from_secs_f64(self.at_s).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mean and variance of 50,000 intervals.
    fn moments(rate: f64, burstiness: f64) -> (f64, f64) {
        let arrivals = Arrivals::new(RequestRate::PerSecond(rate), burstiness, 7).unwrap();
        let times: Vec<f64> = arrivals.take(50_000).map(|at| at.as_secs_f64()).collect();
        let mut before = 0.0;
        let intervals: Vec<f64> = times.iter().map(|at| at - std::mem::replace(&mut before, *at)).collect();
        let mean = intervals.iter().sum::<f64>() / intervals.len() as f64;
        let squares = intervals.iter().map(|interval| (interval - mean).powi(2));
        (mean, squares.sum::<f64>() / intervals.len() as f64)
    }

    #[test]
    fn intervals_of_a_poisson_process_have_the_mean_and_variance_of_an_exponential_distribution() {
        let (mean, variance) = moments(20.0, 1.0);
        assert!((mean * 20.0 - 1.0).abs() < 0.02, "{mean}");
        assert!((variance * 400.0 - 1.0).abs() < 0.05, "{variance}");
    }

    #[test]
    fn a_gamma_process_keeps_the_rate_and_divides_the_variance_by_the_burstiness() {
        for burstiness in [0.25, 4.0] {
            let (mean, variance) = moments(20.0, burstiness);
            assert!((mean * 20.0 - 1.0).abs() < 0.03, "{burstiness}: {mean}");
            assert!((variance * 400.0 * burstiness - 1.0).abs() < 0.08, "{burstiness}: {variance}");
        }
    }

    #[test]
    fn counts_in_a_second_have_equal_mean_and_variance_in_a_poisson_process() {
        let arrivals = Arrivals::new(RequestRate::PerSecond(5.0), 1.0, 3).unwrap();
        let mut counts = vec![0.0; 4000];
        for at in arrivals.take_while(|at| at.as_secs() < 4000) {
            counts[at.as_secs() as usize] += 1.0;
        }
        let mean = counts.iter().sum::<f64>() / 4000.0;
        let variance = counts.iter().map(|count| (count - mean) * (count - mean)).sum::<f64>() / 4000.0;
        assert!((mean - 5.0).abs() < 0.15 && (variance - 5.0).abs() < 0.5, "{mean} {variance}");
    }

    #[test]
    fn a_seed_gives_the_same_schedule_again_and_another_seed_another_one() {
        let times = |seed| {
            let arrivals = Arrivals::new(RequestRate::PerSecond(3.0), 0.5, seed).unwrap();
            arrivals.take(100).collect::<Vec<_>>()
        };
        assert_eq!(times(1), times(1));
        assert_ne!(times(1), times(2));
        assert!(times(1).is_sorted());
    }

    #[test]
    fn an_unlimited_rate_has_all_arrivals_at_the_start() {
        let mut arrivals = Arrivals::new(RequestRate::Unlimited, 1.0, 1).unwrap();
        assert!(arrivals.by_ref().take(9).all(|at| at == Duration::ZERO));
    }

    #[test]
    fn impossible_rates_are_refused() {
        assert_eq!("inf".parse(), Ok(RequestRate::Unlimited));
        assert_eq!("2.5".parse(), Ok(RequestRate::PerSecond(2.5)));
        for text in ["0", "-1", "nan", "1e7", "fast", ""] {
            assert_eq!(text.parse::<RequestRate>(), Err(ArrivalError::Rate(text.to_owned())));
        }
        for burstiness in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(Arrivals::new(RequestRate::PerSecond(1.0), burstiness, 0).is_err(), "{burstiness}");
        }
    }
}
