// SPDX-License-Identifier: Apache-2.0

//! Comparisons of synthetic results with known differences.

use super::*;
use rand_distr::{Distribution, Exp};
use serde_json::json;

/// A run with exponential first-token times of this mean. Neighbours share the part `shared` of
/// theirs, as requests in one queue do.
fn result(seed: u64, requests: usize, mean_s: f64, shared: f64) -> StoredResult {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    let times = Exp::new(1.0 / mean_s).unwrap();
    let mut last = times.sample(&mut random);
    let ttfts: Vec<f64> = (0..requests)
        .map(|_| {
            last = shared * last + (1.0 - shared) * times.sample(&mut random);
            last
        })
        .collect();
    let start_times: Vec<f64> = (0..requests).map(|at| at as f64 * 0.1).collect();
    let latencies: Vec<f64> = ttfts.iter().map(|ttft| ttft + 0.02).collect();
    let fields = json!({
        "duration": requests as f64 * 0.1, "completed": requests, "failed": 0, "model_id": "m",
        "request_throughput": 10.0, "output_throughput": 30.0, "request_rate": 10.0,
        "total_input_tokens": requests * 8, "total_output_tokens": requests * 3,
        "ttfts": ttfts, "start_times": start_times, "latencies": latencies,
        "itls": vec![[0.01, 0.01]; requests], "input_lens": vec![8; requests],
        "output_lens": vec![3; requests], "errors": vec![""; requests],
    });
    StoredResult::parse(fields.to_string().as_bytes()).unwrap()
}

fn row<'a>(comparison: &'a Comparison, name: &str) -> &'a ComparisonRow {
    comparison.rows.iter().find(|row| row.name == name).unwrap()
}

/// How many of 60 comparisons of two runs of one kind say that there is no difference.
fn agreements(name: &str, shared: f64, runs: u64) -> usize {
    let side = |from: u64| -> Vec<StoredResult> {
        (from..from + runs).map(|seed| result(seed, 150, 0.1, shared)).collect()
    };
    (0..60)
        .filter(|pair| {
            let (a, b) = (side(pair * 100), side(pair * 100 + 50));
            row(&compare(&a, &b, 0.95).unwrap(), name).verdict == ComparisonVerdict::NoDifferenceShown
        })
        .count()
}

#[test]
fn equal_sides_show_no_difference_as_often_as_the_confidence_says() {
    // 57 of 60 are expected; 51 or fewer have a probability of 1%.
    for name in ["mean_ttft_ms", "median_ttft_ms"] {
        let agreed = agreements(name, 0.0, 1);
        assert!((52..=60).contains(&agreed), "{name}: {agreed} of 60");
    }
}

#[test]
fn requests_that_depend_on_their_neighbours_do_not_make_differences() {
    let agreed = agreements("mean_ttft_ms", 0.6, 1);
    assert!(agreed >= 48, "{agreed} of 60");
}

#[test]
fn a_real_difference_is_shown_with_its_direction() {
    let (a, b) = ([result(1, 800, 0.1, 0.0)], [result(2, 800, 0.15, 0.0)]);
    let slower = compare(&a, &b, 0.95).unwrap();
    let mean = row(&slower, "mean_ttft_ms");
    assert!(mean.ratio_low > 1.2 && mean.ratio_high < 1.8 && (mean.ratio - 1.5).abs() < 0.15, "{mean:?}");
    assert_eq!(mean.verdict, ComparisonVerdict::BIsWorse);
    let faster = compare(&b, &a, 0.95).unwrap();
    assert_eq!(row(&faster, "mean_ttft_ms").verdict, ComparisonVerdict::BIsBetter);
    assert_eq!(row(&faster, "mean_itl_ms").verdict, ComparisonVerdict::NoDifferenceShown);
    assert_eq!(row(&faster, "output_throughput").verdict, ComparisonVerdict::NoDifferenceShown);
}

#[test]
fn more_throughput_is_better() {
    let slow = result(1, 400, 0.1, 0.0);
    let mut fast = slow.clone();
    fast.start_times.iter_mut().for_each(|start| *start /= 2.0);
    fast.fields["duration"] = json!(20.0);
    let comparison = compare(&[slow], &[fast], 0.95).unwrap();
    let rate = row(&comparison, "request_throughput");
    assert!((rate.a - 10.0).abs() < 0.2 && (rate.ratio - 2.0).abs() < 0.05, "{rate:?}");
    assert_eq!(rate.verdict, ComparisonVerdict::BIsBetter);
    assert_eq!(row(&comparison, "output_throughput").verdict, ComparisonVerdict::BIsBetter);
}

#[test]
fn a_difference_between_runs_of_one_side_widens_the_interval() {
    let width = |a: &[StoredResult], b: &[StoredResult]| {
        let comparison = compare(a, b, 0.95).unwrap();
        let mean = row(&comparison, "mean_ttft_ms").clone();
        mean.ratio_high - mean.ratio_low
    };
    let steady: Vec<_> = (0..5).map(|seed| result(seed, 200, 0.1, 0.0)).collect();
    let unsteady: Vec<_> = (5..10).map(|seed| result(seed, 200, 0.02 * seed as f64, 0.0)).collect();
    assert!(width(&steady, &unsteady) > 1.5 * width(&steady, &steady));
}

#[test]
fn settings_that_differ_are_named() {
    let a = result(1, 600, 0.1, 0.0);
    let mut b = result(2, 600, 0.1, 0.0);
    b.fields["request_rate"] = json!("inf");
    b.fields["model_id"] = json!("other");
    b.fields["failed"] = json!(3);
    b.fields["total_input_tokens"] = json!(600 * 9);
    let warnings = compare(std::slice::from_ref(&a), &[b], 0.95).unwrap().warnings.join("\n");
    for text in [
        "model_id differs: \"m\" and \"other\"",
        "request_rate differs: \"inf\" and 10.0",
        "3 requests failed",
        "total_input_tokens differs: 8.0 and 9.0",
        "fewer than 5 runs",
    ] {
        assert!(warnings.contains(text), "{text}: {warnings}");
    }
    let same = compare(&[a.clone(), a.clone(), a.clone(), a.clone(), a.clone()], &vec![a; 5], 0.95);
    assert_eq!(same.unwrap().warnings, [""; 0]);
}

#[test]
fn results_without_requests_cannot_be_compared() {
    let mut empty = result(1, 10, 0.1, 0.0);
    empty.ttfts.clear();
    let full = result(1, 10, 0.1, 0.0);
    assert_eq!(compare(std::slice::from_ref(&full), &[empty], 0.95), Err(CompareError::NoRequests));
    assert_eq!(compare(&[full], &[], 0.95), Err(CompareError::Empty));
}
