// SPDX-License-Identifier: Apache-2.0

//! Sums of the router's counters and histograms over all their labels, for the plots of the page at
//! `/ui`.

use std::collections::BTreeMap;

use serde_json::{Value, json};

/// Name in the answer, and the counter.
const COUNTERS: [(&str, &str); 4] = [
    ("prompt_tokens", "ballast:prompt_tokens_total"),
    ("output_tokens", "ballast:generation_tokens_total"),
    ("stream_resumes", "ballast:stream_resumes_total"),
    ("requests_refused", "ballast:requests_refused_total"),
];
/// Name in the answer, and the histogram.
const HISTOGRAMS: [(&str, &str); 3] = [
    ("time_to_first_token", "ballast:time_to_first_token_seconds"),
    ("inter_token_latency", "ballast:inter_token_latency_seconds"),
    ("request_latency", "ballast:e2e_request_latency_seconds"),
];
/// The upper bound of the last bucket.
const UNBOUNDED: &str = "+Inf";

/// Reads the text of a scrape.
pub(crate) fn to_json(scrape: &str) -> Value {
    let mut sums: BTreeMap<&str, f64> = BTreeMap::new();
    let mut buckets: BTreeMap<&str, BTreeMap<&str, f64>> = BTreeMap::new();
    let mut finished: BTreeMap<&str, f64> = BTreeMap::new();
    for (series, value) in scrape.lines().filter_map(value_of) {
        let name = series.split('{').next().unwrap_or_default();
        if let Some(histogram) = name.strip_suffix("_bucket")
            && let Some(bound) = label(series, "le")
        {
            *buckets.entry(histogram).or_default().entry(bound).or_default() += value;
        } else if name == "ballast:request_success_total" {
            *finished.entry(label(series, "finished_reason").unwrap_or_default()).or_default() += value;
        } else {
            *sums.entry(name).or_default() += value;
        }
    }
    let mut totals = serde_json::Map::new();
    for (key, name) in COUNTERS {
        totals.insert(key.to_owned(), json!(sums.get(name).unwrap_or(&0.0)));
    }
    for (key, name) in HISTOGRAMS {
        let of_histogram = buckets.get(name).map(histogram).unwrap_or_default();
        totals.insert(key.to_owned(), Value::Array(of_histogram));
    }
    totals.insert("finished".to_owned(), json!(finished));
    totals.into()
}

/// Splits a line into series and value. Comments have none.
fn value_of(line: &str) -> Option<(&str, f64)> {
    let (series, value) = line.rsplit_once(' ')?;
    (!series.starts_with('#')).then_some(())?;
    Some((series, value.parse().ok()?))
}

/// The value of a label without escapes.
fn label<'a>(series: &'a str, name: &str) -> Option<&'a str> {
    let rest = series.split_once(&format!("{name}=\""))?.1;
    rest.split('"').next()
}

/// Upper bound, or null, and count of each bucket with all smaller ones.
fn histogram(counts: &BTreeMap<&str, f64>) -> Vec<Value> {
    let bounded = counts.iter().filter_map(|(bound, count)| Some((bound.parse::<f64>().ok()?, *count)));
    let mut bounded: Vec<(f64, f64)> = bounded.filter(|(bound, _)| bound.is_finite()).collect();
    bounded.sort_by(|a, b| a.0.total_cmp(&b.0));
    let last = counts.get(UNBOUNDED).map(|count| json!([null, count]));
    bounded.into_iter().map(|(bound, count)| json!([bound, count])).chain(last).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_and_buckets_are_summed_over_their_labels() {
        let scrape = concat!(
            "# TYPE ballast:generation_tokens_total counter\n",
            "ballast:generation_tokens_total{model_name=\"a b\"} 5\n",
            "ballast:generation_tokens_total{model_name=\"c\"} 7\n",
            "ballast:time_to_first_token_seconds_bucket{model_name=\"a\",le=\"0.5\"} 2\n",
            "ballast:time_to_first_token_seconds_bucket{model_name=\"a\",le=\"10\"} 3\n",
            "ballast:time_to_first_token_seconds_bucket{model_name=\"a\",le=\"+Inf\"} 4\n",
            "ballast:time_to_first_token_seconds_bucket{model_name=\"c\",le=\"0.5\"} 1\n",
            "ballast:request_success_total{model_name=\"a\",finished_reason=\"stop\"} 4\n",
        );
        let totals = to_json(scrape);
        assert_eq!(totals["output_tokens"], 12.0);
        assert_eq!(totals["prompt_tokens"], 0.0);
        assert_eq!(totals["time_to_first_token"], json!([[0.5, 3.0], [10.0, 3.0], [null, 4.0]]));
        assert_eq!((&totals["finished"], &totals["request_latency"]), (&json!({"stop": 4.0}), &json!([])));
    }
}
