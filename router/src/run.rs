// SPDX-License-Identifier: Apache-2.0

//! The router process: runtime, signals, readiness.

use std::sync::Arc;

use service::metrics::Metrics;
use service::{Notify, Shutdown};

use crate::config::RouterConfig;
use crate::error::RouterError;
use crate::registry::WorkerRegistry;
use crate::server::Router;

/// Runs the router until it has drained.
pub fn run(config: RouterConfig) -> Result<(), RouterError> {
    service::logging::init("router", tracing::Level::INFO);
    // Takes inherited descriptors before any thread starts.
    let inherited = service::listen::inherited_fds()?.into_iter().next();
    let listener = inherited.map(|inherited| std::net::TcpListener::from(inherited.fd));
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(RouterError::Runtime)?;
    runtime.block_on(async {
        let shutdown = Shutdown::install().map_err(RouterError::Signals)?;
        let notify = Notify::from_env()?;
        let _supervisor =
            service::supervision::watch_supervisor("router", "router", None, &notify, &shutdown)?;
        let router = Router::bind(config, listener, Metrics::install()?).await?;
        let address =
            router.address().map_or("router.sock".to_owned(), |address| format!("http://{address}"));
        tracing::info!(%address, "listening");
        if let Some(health) = router.health_address() {
            tracing::info!(address = %format!("http://{health}"), "listening for health and metrics");
        }
        let listening = format!("listening on {address}");
        notify.status(&listening)?;
        notify.ready()?;
        let reporter = tokio::spawn(report_refused_workers(router.registry(), listening, notify.clone()));
        let served = router.serve(&shutdown).await;
        reporter.abort();
        notify.stopping()?;
        served
    })
}

/// Adds the refused workers to the process's status, which `ballast ps` shows.
async fn report_refused_workers(registry: Arc<WorkerRegistry>, listening: String, notify: Notify) {
    let (mut changes, mut last) = (registry.subscribe(), None);
    while changes.changed().await.is_ok() {
        let summary = registry.refused_summary();
        if summary == last {
            continue;
        }
        let status = match &summary {
            Some(summary) => format!("{listening}; {summary}"),
            None => listening.clone(),
        };
        // A supervisor that is gone reads no status; its successor gets the last one.
        if let Err(error) = notify.status(&status) {
            tracing::debug!(%error, "cannot report the refused workers");
        }
        last = summary;
    }
}
