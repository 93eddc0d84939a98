// SPDX-License-Identifier: Apache-2.0

//! The router process: runtime, signals, readiness.

use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use service::listen::{HTTP_SOCKET_NAME, InheritedFd};
use service::metrics::Metrics;
use service::supervision::SupervisorState;
use service::{Notify, Shutdown};
use tokio::sync::watch;
use traces::Tracer;

use crate::config::RouterConfig;
use crate::error::RouterError;
use crate::registry::WorkerRegistry;
use crate::server::Router;

/// How much longer a router that drains may take at a time. One that hangs is killed after it.
const STOP_EXTENSION: Duration = Duration::from_secs(20);

/// When the public socket is offered again to a supervisor that did not take it. An attempt is one
/// system call; a router that dies meanwhile takes its socket along.
const HAND_OVER_RETRY: Duration = Duration::from_millis(100);

/// Runs the router until it has drained.
pub fn run(config: RouterConfig) -> Result<(), RouterError> {
    service::logging::init("router", tracing::Level::INFO);
    // Takes inherited descriptors before any thread starts.
    let listener = public_listener(service::listen::inherited_fds()?)?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(RouterError::Runtime)?;
    let (mut usage_log, mut tracer) = (None, Tracer::default());
    let served = runtime.block_on(async {
        let shutdown = Shutdown::install().map_err(RouterError::Signals)?;
        let notify = Notify::from_env()?;
        let supervisor =
            service::supervision::watch_supervisor("router", "router", None, &notify, &shutdown)?;
        let is_inherited = listener.is_some();
        let metrics = Metrics::install()?;
        let samples = metrics.clone();
        let aggregation = tokio::spawn(async move { samples.aggregate_regularly().await });
        let router = Router::bind(config, listener, metrics).await?;
        (usage_log, tracer) = (router.usage_log(), router.tracer());
        if let Some(socket) = router.public_socket().map_err(RouterError::Inherited)? {
            tokio::spawn(hand_over_socket(socket, is_inherited, supervisor, notify.clone()));
        }
        let scheme = router.scheme();
        let address =
            router.address().map_or("router.sock".to_owned(), |address| format!("{scheme}://{address}"));
        tracing::info!(%address, "listening");
        if let Some(health) = router.health_address() {
            tracing::info!(address = %format!("http://{health}"), "listening for health and metrics");
        }
        let listening = format!("listening on {address}");
        notify.status(&listening)?;
        notify.ready()?;
        let reporter = tokio::spawn(report_refused_workers(router.registry(), listening, notify.clone()));
        let extension = tokio::spawn(extend_stop(shutdown.clone(), notify.clone()));
        let served = router.serve(&shutdown).await;
        reporter.abort();
        extension.abort();
        aggregation.abort();
        notify.stopping()?;
        served
    });
    // Streams that are still open end with the runtime, and their requests have lines and spans
    // too.
    drop(runtime);
    if let Some(usage_log) = usage_log {
        usage_log.flush();
    }
    tracer.flush();
    served
}

/// The public socket, from the supervisor or from systemd's socket activation. A second one would
/// take connections that no process accepts.
fn public_listener(inherited: Vec<InheritedFd>) -> Result<Option<TcpListener>, RouterError> {
    let sockets = inherited.len();
    if sockets > 1 {
        return Err(RouterError::InheritedSockets { sockets });
    }
    let Some(inherited) = inherited.into_iter().next() else { return Ok(None) };
    let listener = TcpListener::from(inherited.fd);
    listener.local_addr().map_err(RouterError::InheritedKind)?;
    Ok(Some(listener))
}

/// Asks the supervisor for time as long as this router drains, which [`crate::RouterLimits::drain`]
/// limits. The supervisor does not know that limit.
async fn extend_stop(shutdown: Shutdown, notify: Notify) {
    shutdown.requested().await;
    loop {
        if let Err(error) = notify.extend_timeout(STOP_EXTENSION) {
            tracing::debug!(%error, "cannot ask for more time to drain");
        }
        tokio::time::sleep(STOP_EXTENSION / 4).await;
    }
}

/// Gives the public socket to each supervisor that does not have it: connections then wait in its
/// queue while this process restarts. A supervisor whose queue is full gets the socket later.
async fn hand_over_socket(
    socket: OwnedFd,
    is_inherited: bool,
    mut supervisor: watch::Receiver<SupervisorState>,
    notify: Notify,
) {
    let mut is_reported = false;
    loop {
        let state = *supervisor.borrow_and_update();
        let lacks_socket = matches!(state, SupervisorState::Present { epoch } if epoch > 0 || !is_inherited);
        let stored = match lacks_socket {
            true => notify.try_fdstore(HTTP_SOCKET_NAME, socket.as_fd()),
            false => Ok(()),
        };
        if let Err(error) = &stored
            && !std::mem::replace(&mut is_reported, true)
        {
            tracing::warn!(%error, "the supervisor does not take the public socket, trying again");
        }
        tokio::select! {
            changed = supervisor.changed() => match changed {
                Ok(()) => is_reported = false,
                Err(_) => return,
            },
            () = tokio::time::sleep(HAND_OVER_RETRY), if stored.is_err() => {}
        }
    }
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
