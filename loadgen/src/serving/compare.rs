// SPDX-License-Identifier: Apache-2.0

//! Two sides of results: the ratio of each figure, with a confidence interval.

use rand::SeedableRng;
use rand::rngs::Xoshiro256PlusPlus;
use serde::Serialize;

use super::bootstrap::{OwnedValues, draw, interval};
use super::result_file::{StoredRequest, StoredResult};

/// Resamples of each side. The ends of a 95% interval then have 25 resamples beyond them.
const RESAMPLES: usize = 1000;
/// Throughput is resampled in windows of a second, but at least this many.
const WINDOWS_MIN: usize = 20;
/// Fewer runs than this show too little of the differences between runs.
const RUNS_MIN: usize = 5;
/// The 99th percentile of fewer requests stands on fewer than five of them.
const REQUESTS_MIN: usize = 500;
/// Other prompts have other token counts.
const TOKENS_DIFFERENCE_MAX: f64 = 0.01;

/// Settings that two comparable results have in common.
const SETTINGS: [&str; 11] = [
    "model_id",
    "backend",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "num_prompts",
    "mix",
    "seed",
    "temperature",
    "ignore_eos",
    "goodput",
];

/// What the interval says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ComparisonVerdict {
    NoDifferenceShown,
    BIsBetter,
    BIsWorse,
}

/// One figure of both sides.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ComparisonRow {
    pub name: &'static str,
    pub a: f64,
    pub b: f64,
    /// b / a.
    pub ratio: f64,
    pub ratio_low: f64,
    pub ratio_high: f64,
    pub verdict: ComparisonVerdict,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    pub confidence: f64,
    pub runs: [usize; 2],
    pub rows: Vec<ComparisonRow>,
    pub warnings: Vec<String>,
}

/// Why two sides cannot be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompareError {
    #[error("a side has no result")]
    Empty,
    #[error(
        "a result has no completed requests with figures of their own: run `bench serve` with \
         --save-detailed"
    )]
    NoRequests,
}

/// A figure: its name, and how a side's resample gives it.
#[derive(Clone, Copy)]
enum ComparedFigure {
    Rate(RateFigure),
    Mean(LatencyFigure),
    Percentile(LatencyFigure, f64),
}

#[derive(Clone, Copy)]
enum RateFigure {
    Requests,
    OutputTokens,
    AllTokens,
}

#[derive(Clone, Copy)]
enum LatencyFigure {
    Ttft,
    Tpot,
    Itl,
    E2el,
}

const FIGURES: [(&str, ComparedFigure); 15] = [
    ("request_throughput", ComparedFigure::Rate(RateFigure::Requests)),
    ("output_throughput", ComparedFigure::Rate(RateFigure::OutputTokens)),
    ("total_token_throughput", ComparedFigure::Rate(RateFigure::AllTokens)),
    ("mean_ttft_ms", ComparedFigure::Mean(LatencyFigure::Ttft)),
    ("median_ttft_ms", ComparedFigure::Percentile(LatencyFigure::Ttft, 50.0)),
    ("p99_ttft_ms", ComparedFigure::Percentile(LatencyFigure::Ttft, 99.0)),
    ("mean_tpot_ms", ComparedFigure::Mean(LatencyFigure::Tpot)),
    ("median_tpot_ms", ComparedFigure::Percentile(LatencyFigure::Tpot, 50.0)),
    ("p99_tpot_ms", ComparedFigure::Percentile(LatencyFigure::Tpot, 99.0)),
    ("mean_itl_ms", ComparedFigure::Mean(LatencyFigure::Itl)),
    ("median_itl_ms", ComparedFigure::Percentile(LatencyFigure::Itl, 50.0)),
    ("p99_itl_ms", ComparedFigure::Percentile(LatencyFigure::Itl, 99.0)),
    ("mean_e2el_ms", ComparedFigure::Mean(LatencyFigure::E2el)),
    ("median_e2el_ms", ComparedFigure::Percentile(LatencyFigure::E2el, 50.0)),
    ("p99_e2el_ms", ComparedFigure::Percentile(LatencyFigure::E2el, 99.0)),
];

/// The samples of one side.
struct Side {
    /// Completed requests of each run.
    requests: Vec<usize>,
    /// Windows of each run.
    windows: Vec<usize>,
    latencies: [OwnedValues; 4],
    /// Per second, one value for each window.
    rates: [OwnedValues; 3],
}

/// Compares side B with side A. `confidence` is that of each interval by itself, such as 0.95.
pub fn compare(a: &[StoredResult], b: &[StoredResult], confidence: f64) -> Result<Comparison, CompareError> {
    let sides = [Side::of(a)?, Side::of(b)?];
    let mut random = Xoshiro256PlusPlus::seed_from_u64(0);
    let mut ratios = vec![Vec::with_capacity(RESAMPLES); FIGURES.len()];
    for _ in 0..RESAMPLES {
        let [in_a, in_b] = [sides[0].resample(&mut random), sides[1].resample(&mut random)];
        for (ratios, (in_a, in_b)) in ratios.iter_mut().zip(in_a.into_iter().zip(in_b)) {
            ratios.extend(ratio(in_a, in_b));
        }
    }
    let whole = sides.each_ref().map(Side::figures);
    let rows = FIGURES.iter().zip(ratios).enumerate().filter_map(|(at, ((name, figure), ratios))| {
        let (a, b) = (whole[0][at]?, whole[1][at]?);
        let (ratio_low, ratio_high) = interval(ratios, confidence)?;
        let is_rate = matches!(figure, ComparedFigure::Rate(_));
        let verdict = verdict(is_rate, ratio_low, ratio_high);
        Some(ComparisonRow { name, a, b, ratio: ratio(Some(a), Some(b))?, ratio_low, ratio_high, verdict })
    });
    let rows = rows.collect();
    Ok(Comparison { confidence, runs: [a.len(), b.len()], rows, warnings: warnings(a, b, &sides) })
}

fn ratio(a: Option<f64>, b: Option<f64>) -> Option<f64> {
    let ratio = b? / a?;
    ratio.is_finite().then_some(ratio)
}

fn verdict(more_is_better: bool, low: f64, high: f64) -> ComparisonVerdict {
    match (low > 1.0, high < 1.0) {
        (false, false) => ComparisonVerdict::NoDifferenceShown,
        (is_more, _) if is_more == more_is_better => ComparisonVerdict::BIsBetter,
        _ => ComparisonVerdict::BIsWorse,
    }
}

impl Side {
    fn of(results: &[StoredResult]) -> Result<Self, CompareError> {
        if results.is_empty() {
            return Err(CompareError::Empty);
        }
        let (mut requests, mut windows) = (Vec::new(), Vec::new());
        let (mut latencies, mut rates) = (<[Vec<(f64, usize)>; 4]>::default(), <[Vec<_>; 3]>::default());
        for result in results {
            let run = result.requests();
            if run.is_empty() {
                return Err(CompareError::NoRequests);
            }
            let first: usize = requests.iter().sum();
            for (at, request) in run.iter().enumerate() {
                latencies[0].push((request.ttft * 1e3, first + at));
                latencies[1].extend(request.tpot.map(|tpot| (tpot * 1e3, first + at)));
                latencies[2].extend(request.itls.iter().map(|itl| (itl * 1e3, first + at)));
                latencies[3].push((request.e2el * 1e3, first + at));
            }
            let of_run = window_rates(&run, result.number("duration").unwrap_or(0.0));
            let first: usize = windows.iter().sum();
            for (rates, of_run) in rates.iter_mut().zip(&of_run) {
                rates.extend(of_run.iter().enumerate().map(|(at, rate)| (*rate, first + at)));
            }
            requests.push(run.len());
            windows.push(of_run[0].len());
        }
        let latencies = latencies.map(OwnedValues::new);
        Ok(Self { requests, windows, latencies, rates: rates.map(OwnedValues::new) })
    }

    /// All figures of one resample.
    fn resample(&self, random: &mut Xoshiro256PlusPlus) -> Vec<Option<f64>> {
        let (requests, windows) = (draw(&self.requests, random), draw(&self.windows, random));
        FIGURES.iter().map(|(_, figure)| self.figure(*figure, &requests, &windows)).collect()
    }

    /// All figures of the sample itself.
    fn figures(&self) -> Vec<Option<f64>> {
        let (requests, windows) = (vec![1; self.requests.iter().sum()], vec![1; self.windows.iter().sum()]);
        FIGURES.iter().map(|(_, figure)| self.figure(*figure, &requests, &windows)).collect()
    }

    fn figure(&self, figure: ComparedFigure, requests: &[u32], windows: &[u32]) -> Option<f64> {
        match figure {
            ComparedFigure::Rate(rate) => self.rates[rate as usize].mean(windows),
            ComparedFigure::Mean(latency) => self.latencies[latency as usize].mean(requests),
            ComparedFigure::Percentile(latency, percent) => {
                self.latencies[latency as usize].percentile(requests, percent)
            }
        }
    }
}

/// Requests, output tokens and all tokens per second in equal windows of a run. Output counts when
/// it comes, a request and its prompt at the end of the request.
fn window_rates(run: &[StoredRequest], duration_s: f64) -> [Vec<f64>; 3] {
    let end = run.iter().map(|request| request.start + request.e2el).fold(duration_s, f64::max);
    let count = (end.floor() as usize).max(WINDOWS_MIN);
    let seconds = (end / count as f64).max(f64::MIN_POSITIVE);
    let mut rates = [0, 1, 2].map(|_| vec![0.0; count]);
    let window = |at: f64| ((at / seconds) as usize).min(count - 1);
    for request in run {
        let last = window(request.start + request.e2el);
        rates[RateFigure::Requests as usize][last] += 1.0 / seconds;
        rates[RateFigure::AllTokens as usize][last] += request.input_tokens as f64 / seconds;
        let share = request.output_tokens as f64 / (request.itls.len() + 1) as f64 / seconds;
        let mut at = request.start + request.ttft;
        for itl in std::iter::once(&0.0).chain(&request.itls) {
            at += itl;
            rates[RateFigure::OutputTokens as usize][window(at)] += share;
            rates[RateFigure::AllTokens as usize][window(at)] += share;
        }
    }
    rates
}

fn warnings(a: &[StoredResult], b: &[StoredResult], sides: &[Side; 2]) -> Vec<String> {
    let mut warnings = Vec::new();
    let all: Vec<&StoredResult> = a.iter().chain(b).collect();
    for name in SETTINGS {
        // Results of other programs do not have all of them.
        let mut values: Vec<String> =
            all.iter().filter_map(|result| Some(result.fields.get(name)?.to_string())).collect();
        values.sort_unstable();
        values.dedup();
        if values.len() > 1 {
            warnings.push(format!("{name} differs: {}", values.join(" and ")));
        }
    }
    let mean_tokens = |results: &[StoredResult], name: &str| {
        let of_request = |result: &StoredResult| Some(result.number(name)? / result.number("completed")?);
        results.iter().filter_map(of_request).sum::<f64>() / results.len() as f64
    };
    for name in ["total_input_tokens", "total_output_tokens"] {
        let (in_a, in_b) = (mean_tokens(a, name), mean_tokens(b, name));
        if (in_b / in_a - 1.0).abs() > TOKENS_DIFFERENCE_MAX {
            let text = format!("{name} differs: {in_a:.1} and {in_b:.1} for each request; other prompts?");
            warnings.push(text);
        }
    }
    let failed: f64 = all.iter().filter_map(|result| result.number("failed")).sum();
    if failed > 0.0 {
        warnings.push(format!("{failed} requests failed, and their latencies are in no figure"));
    }
    if all.iter().any(|result| result.fields.get("is_client_slow").is_some_and(|slow| slow == true)) {
        warnings.push("a client was a bottleneck; its figures are not those of the server".to_owned());
    }
    if sides.iter().any(|side| side.requests.len() < RUNS_MIN) {
        warnings.push(format!(
            "fewer than {RUNS_MIN} runs a side: the intervals leave out most of what differs between runs"
        ));
    }
    if sides.iter().any(|side| side.requests.iter().sum::<usize>() < REQUESTS_MIN) {
        let text = format!("fewer than {REQUESTS_MIN} requests a side: a p99 stands on a handful of them");
        warnings.push(text);
    }
    warnings
}

#[cfg(test)]
#[path = "compare_tests.rs"]
mod tests;
