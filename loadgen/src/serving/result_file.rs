// SPDX-License-Identifier: Apache-2.0

//! Reads results, of this program and of `vllm bench serve`.

use serde::Deserialize;
use serde_json::{Map, Value};

/// A result. Arrays have one entry for each request, or none without `--save-detailed`.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct StoredResult {
    #[serde(default)]
    pub input_lens: Vec<u64>,
    #[serde(default)]
    pub output_lens: Vec<u64>,
    /// Seconds, as all arrays of times.
    #[serde(default)]
    pub ttfts: Vec<f64>,
    #[serde(default)]
    pub itls: Vec<Vec<f64>>,
    #[serde(default)]
    pub latencies: Vec<f64>,
    #[serde(default)]
    pub start_times: Vec<f64>,
    /// Empty texts for completed requests.
    #[serde(default)]
    pub errors: Vec<Option<String>>,
    /// All other fields.
    #[serde(flatten)]
    pub fields: Map<String, Value>,
}

/// Why a file is no result.
#[derive(Debug, thiserror::Error)]
pub enum ResultFileError {
    #[error("it is not a JSON object with the fields of a result")]
    Json(#[from] serde_json::Error),
    #[error("it has no field {0:?}: is it a result of `bench serve`?")]
    Missing(&'static str),
}

/// One completed request of a stored result.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredRequest {
    /// Seconds since the first request.
    pub start: f64,
    pub ttft: f64,
    /// `None` for a single token.
    pub tpot: Option<f64>,
    pub e2el: f64,
    pub itls: Vec<f64>,
    pub input_tokens: u64,
    pub output_tokens: u64,
}

impl StoredResult {
    pub fn parse(json: &[u8]) -> Result<Self, ResultFileError> {
        let result: Self = serde_json::from_slice(json)?;
        for name in ["duration", "completed", "request_throughput", "output_throughput"] {
            result.number(name).ok_or(ResultFileError::Missing(name))?;
        }
        Ok(result)
    }

    pub fn number(&self, name: &str) -> Option<f64> {
        self.fields.get(name)?.as_f64()
    }

    pub fn text(&self, name: &str) -> Option<&str> {
        self.fields.get(name)?.as_str()
    }

    /// The completed requests, in the order of their start. Empty without the arrays.
    pub fn requests(&self) -> Vec<StoredRequest> {
        let first = self.start_times.iter().copied().fold(f64::INFINITY, f64::min);
        let request = |at: usize| {
            let is_failed = self.errors.get(at).and_then(Option::as_ref).is_some_and(|text| !text.is_empty());
            let output_tokens = self.output_lens.get(at).copied()?;
            let (ttft, itls) = (*self.ttfts.get(at)?, self.itls.get(at)?.clone());
            // Older versions of vLLM store no latencies.
            let e2el = self.latencies.get(at).copied().unwrap_or_else(|| ttft + itls.iter().sum::<f64>());
            let gaps = output_tokens.saturating_sub(1);
            (!is_failed && output_tokens > 0).then(|| StoredRequest {
                start: self.start_times.get(at).map_or(at as f64, |start| start - first),
                ttft,
                tpot: (gaps > 0).then(|| (e2el - ttft) / gaps as f64),
                e2el,
                itls,
                input_tokens: self.input_lens.get(at).copied().unwrap_or(0),
                output_tokens,
            })
        };
        let mut requests: Vec<StoredRequest> = (0..self.ttfts.len()).filter_map(request).collect();
        requests.sort_by(|a, b| a.start.total_cmp(&b.start));
        requests
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The form of vLLM 0.11: times of a clock, no latencies, `null` for no goodput.
    const VLLM: &str = r#"{
        "date": "20251125-120000", "backend": "vllm", "model_id": "m", "request_rate": "inf",
        "burstiness": 1.0, "max_concurrency": null, "duration": 2.0, "completed": 2,
        "total_input_tokens": 20, "request_throughput": 1.0, "request_goodput": null,
        "output_throughput": 4.0, "total_token_throughput": 14.0,
        "input_lens": [10, 10, 10], "output_lens": [3, 0, 5], "ttfts": [0.1, 0.0, 0.2],
        "itls": [[0.1, 0.2], [], [0.1, 0.1, 0.1, 0.1]], "start_times": [1001.5, 1001.2, 1001.0],
        "generated_texts": ["a", "", "b"], "errors": ["", "refused", ""]}"#;

    #[test]
    fn results_of_vllm_are_read_without_their_failed_requests() {
        let result = StoredResult::parse(VLLM.as_bytes()).unwrap();
        let requests = result.requests();
        assert_eq!(
            requests.iter().map(|r| (r.start, r.output_tokens)).collect::<Vec<_>>(),
            [(0.0, 5), (0.5, 3)]
        );
        assert!((requests[1].e2el - 0.4).abs() < 1e-12 && (requests[1].tpot.unwrap() - 0.15).abs() < 1e-12);
        assert_eq!((result.text("request_rate"), result.number("burstiness")), (Some("inf"), Some(1.0)));
    }

    #[test]
    fn other_files_are_refused() {
        for json in ["", "[]", "{\"ttfts\": [\"x\"]}"] {
            assert!(matches!(StoredResult::parse(json.as_bytes()), Err(ResultFileError::Json(_))), "{json}");
        }
        assert!(matches!(StoredResult::parse(b"{}"), Err(ResultFileError::Missing("duration"))));
    }
}
