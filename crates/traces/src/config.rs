// SPDX-License-Identifier: Apache-2.0

//! Configuration of traces, the same for each process of a fleet.

use serde::{Deserialize, Serialize};
use service::{Exit, HasExit};
use tonic::transport::Endpoint;

/// The section `[tracing]`. If it is absent, no span is recorded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct TracingConfig {
    /// Where a collector takes OTLP over gRPC: "http://HOST:PORT" or "unix:///PATH".
    pub otlp_endpoint: String,
    /// Part of the requests without a trace of their own that get one, from 0 to 1. A request with
    /// a trace follows the sampled flag of its client.
    #[serde(default = "sample_ratio")]
    pub sample_ratio: f64,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum TracingConfigError {
    #[error(
        "`tracing.otlp-endpoint` is {endpoint:?}; give the gRPC address of a collector, \
         such as \"http://127.0.0.1:4317\" or \"unix:///run/otelcol/otlp.sock\""
    )]
    Endpoint { endpoint: String },
    #[error("`tracing.sample-ratio` is {ratio}, allowed are 0 to 1")]
    SampleRatio { ratio: String },
}

impl HasExit for TracingConfigError {
    fn exit(&self) -> Exit {
        Exit::Usage
    }
}

impl TracingConfig {
    pub fn check(&self) -> Result<(), TracingConfigError> {
        if !(0.0..=1.0).contains(&self.sample_ratio) {
            return Err(TracingConfigError::SampleRatio { ratio: self.sample_ratio.to_string() });
        }
        self.endpoint().map(drop)
    }

    /// The collector's address. Plain HTTP/2 only: a collector on the same host or in the same
    /// network takes the spans, and sends them on.
    pub(crate) fn endpoint(&self) -> Result<Endpoint, TracingConfigError> {
        let text = &self.otlp_endpoint;
        let is_usable = match text.strip_prefix("unix://") {
            Some(path) => path.starts_with('/'),
            None => text.parse::<http::Uri>().is_ok_and(|uri| {
                uri.scheme_str() == Some("http")
                    && uri.host().is_some_and(|host| !host.is_empty())
                    && uri.path_and_query().is_none_or(|path| path == "/")
            }),
        };
        let endpoint = Endpoint::from_shared(text.clone()).ok().filter(|_| is_usable);
        endpoint.ok_or_else(|| TracingConfigError::Endpoint { endpoint: text.clone() })
    }
}

fn sample_ratio() -> f64 {
    1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(endpoint: &str, sample_ratio: f64) -> Result<(), TracingConfigError> {
        TracingConfig { otlp_endpoint: endpoint.to_owned(), sample_ratio }.check()
    }

    #[test]
    fn an_address_without_tls_or_a_socket_is_an_endpoint() {
        for endpoint in
            ["http://127.0.0.1:4317", "http://[::1]:4317/", "http://otelcol:4317", "unix:///run/otlp.sock"]
        {
            assert_eq!(check(endpoint, 1.0), Ok(()), "{endpoint}");
        }
        for endpoint in [
            "",
            "127.0.0.1:4317",
            "https://otelcol:4317",
            "http://",
            "http://a:4318/v1/traces",
            "unix://otlp",
        ] {
            let refused = TracingConfigError::Endpoint { endpoint: endpoint.to_owned() };
            assert_eq!(check(endpoint, 1.0), Err(refused), "{endpoint}");
        }
    }

    #[test]
    fn a_ratio_is_between_zero_and_one() {
        for ratio in [0.0, 0.01, 1.0] {
            assert_eq!(check("http://a:1", ratio), Ok(()));
        }
        for ratio in [-0.1, 1.1, f64::NAN] {
            assert!(check("http://a:1", ratio).unwrap_err().to_string().contains("sample-ratio"));
        }
    }
}
