// SPDX-License-Identifier: Apache-2.0

//! The metrics of a process, recorded with the `metrics` macros and rendered as Prometheus text.

use std::time::Duration;

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};

/// Content type of [`Metrics::render`].
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Latency buckets in seconds, from one step of a worker to a long generation.
const SECONDS_BUCKETS: [f64; 14] =
    [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 300.0];

/// A histogram keeps 16 bytes of each sample until it is aggregated: at 10,000 tokens a second,
/// this interval bounds them by 1 MiB.
const AGGREGATION_INTERVAL: Duration = Duration::from_secs(5);

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

    /// Aggregates recorded samples at intervals, which bounds their memory if nothing asks for the
    /// metrics. Does not end.
    pub async fn aggregate_regularly(&self) {
        self.aggregate_every(AGGREGATION_INTERVAL).await;
    }

    async fn aggregate_every(&self, interval: Duration) {
        loop {
            tokio::time::sleep(interval).await;
            self.handle.run_upkeep();
        }
    }

    pub fn render(&self) -> String {
        self.handle.run_upkeep();
        self.handle.render()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resident_mib() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() >> 10
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn samples_take_bounded_memory_if_nothing_asks_for_the_metrics() {
        let recorder = PrometheusBuilder::new().set_buckets(&SECONDS_BUCKETS).unwrap().build_recorder();
        let metrics = Metrics { handle: recorder.handle() };
        let samples =
            metrics::with_local_recorder(&recorder, || metrics::histogram!("ballast_test_many_seconds"));
        let before = resident_mib();
        tokio::spawn(async move { metrics.aggregate_every(Duration::from_millis(5)).await });
        // 64 MiB, if they are kept.
        for _ in 0..40 {
            (0..100_000).for_each(|_| samples.record(0.03));
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let after = resident_mib();
        assert!(after < before + 32, "{before} MiB, then {after} MiB");
    }

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
