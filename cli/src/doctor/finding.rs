// SPDX-License-Identifier: Apache-2.0

//! [`Finding`]: the result of one check of `ballast doctor`.

use serde::Serialize;
use serde_json::{Map, Value};

/// Whether a check passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Verdict {
    Ok,
    Note,
    Failed,
}

/// The result of one check.
#[derive(Debug, Serialize)]
pub(crate) struct Finding {
    /// The part of the machine: "host", "driver", or a GPU such as "cuda:0".
    pub(crate) part: String,
    pub(crate) check: &'static str,
    pub(crate) verdict: Verdict,
    /// The result as text.
    pub(crate) text: String,
    /// The result for programs: bytes, seconds and bytes per second as plain numbers.
    pub(crate) values: Map<String, Value>,
}

impl Finding {
    pub(crate) fn new(part: &str, check: &'static str, verdict: Verdict, text: impl Into<String>) -> Self {
        Self { part: part.to_owned(), check, verdict, text: text.into(), values: Map::new() }
    }

    /// Turns the result of a check into a finding; an error becomes a failed finding.
    pub(crate) fn from_result(part: &str, check: &'static str, outcome: CheckResult<Self>) -> Self {
        outcome
            .unwrap_or_else(|error| Self::new(part, check, Verdict::Failed, service::exit::one_line(&*error)))
    }

    pub(crate) fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.values.insert(name.to_owned(), value.into());
        self
    }
}

/// Result of a check. Any error becomes the text of a finding.
pub(crate) type CheckResult<T> = Result<T, Box<dyn std::error::Error>>;

/// Formats bytes per second.
pub(crate) fn format_rate(bytes_per_second: f64) -> String {
    format!("{:.1} GB/s", bytes_per_second / 1e9)
}
