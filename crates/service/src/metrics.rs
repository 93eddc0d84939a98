// SPDX-License-Identifier: Apache-2.0

//! The metrics of a process, recorded with the `metrics` macros and rendered as Prometheus text.

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};

/// Content type of [`Metrics::render`].
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Latency buckets in seconds, from one step of a worker to a long generation.
const SECONDS_BUCKETS: [f64; 14] =
    [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 300.0];

#[derive(Debug, thiserror::Error)]
#[error("cannot install the metrics recorder")]
pub struct MetricsError(#[source] metrics_exporter_prometheus::BuildError);

/// The registry of this process. Cheap to clone.
#[derive(Clone)]
pub struct Metrics {
    handle: PrometheusHandle,
}

impl Metrics {
    /// Installs the recorder that the macros use. Call once per process. Histogram names end in
    /// `_seconds`.
    pub fn install() -> Result<Self, MetricsError> {
        let builder = PrometheusBuilder::new().set_buckets(&SECONDS_BUCKETS).map_err(MetricsError)?;
        let handle = builder.install_recorder().map_err(MetricsError)?;
        Ok(Self { handle })
    }

    /// Renders all metrics. Also aggregates recorded samples, so regular calls bound the memory
    /// they use.
    pub fn render(&self) -> String {
        self.handle.run_upkeep();
        self.handle.render()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_metrics_are_rendered() {
        let metrics = Metrics::install().unwrap();
        metrics::counter!("ballast_test_requests_total", "outcome" => "ok").increment(3);
        metrics::histogram!("ballast_test_seconds").record(0.03);
        let text = metrics.render();
        assert!(text.contains("ballast_test_requests_total{outcome=\"ok\"} 3"), "{text}");
        assert!(text.contains("ballast_test_seconds_bucket{le=\"0.05\"} 1"), "{text}");
        assert!(Metrics::install().is_err());
    }
}
