// SPDX-License-Identifier: Apache-2.0

//! The listening sockets: TCP for HTTP/1.1 and HTTP/2 (OpenAI routes and gRPC), `router.sock` for
//! gRPC.
//!
//! The accept loop limits the number of connections, the time until a client has sent its headers,
//! and the streams of one HTTP/2 connection. On a stop, it closes idle connections at once and busy
//! ones after their last response.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use proto::v1::inference_server::InferenceServer;
use service::grpc::UdsListener;
use service::metrics::Metrics;
use service::{RuntimeDir, Shutdown};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::service::Routes;

use crate::admission_control::AdmissionController;
use crate::config::RouterConfig;
use crate::discovery;
use crate::error::RouterError;
use crate::generate::Generator;
use crate::grammar_check::GrammarChecker;
use crate::grpc::InferenceService;
use crate::http::{self, AppState};
use crate::registry::WorkerRegistry;
use crate::tenant::TenantResolver;

/// Maximum number of open TCP connections. More wait in the kernel's queue.
const CONNECTIONS_MAX: usize = 2048;
/// Time from the first byte of a connection, or of a request on it, to the end of the headers.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of concurrent requests of one HTTP/2 connection.
const HTTP2_STREAMS_MAX: u32 = 256;
/// A client that answers no ping is gone. TCP alone may not notice.
const HTTP2_PING_INTERVAL: Duration = Duration::from_secs(20);
const HTTP2_PING_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after a failed accept, for example when the process has no free descriptor.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// The first bytes of every HTTP/2 connection (RFC 9113, section 3.4).
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Interval of checks while a client has sent only a part of the preface.
const PREFACE_RETRY: Duration = Duration::from_millis(5);

/// The name under which the public service reports its health.
const HEALTH_SERVICE: &str = "ballast.v1.Inference";

/// A router with its sockets bound.
pub struct Router {
    config: RouterConfig,
    tcp: Option<TcpListener>,
    socket: UdsListener,
    generator: Generator,
    metrics: Metrics,
}

impl Router {
    /// Binds the sockets. `inherited` is a listening socket that replaces `config.listen`.
    pub async fn bind(
        config: RouterConfig,
        inherited: Option<std::net::TcpListener>,
        metrics: Metrics,
    ) -> Result<Self, RouterError> {
        config.admission.check()?;
        let tcp = match (inherited, config.listen) {
            (Some(listener), _) => Some(to_tokio_listener(listener).map_err(RouterError::Inherited)?),
            (None, Some(address)) => Some(
                TcpListener::bind(address).await.map_err(|source| RouterError::Listen { address, source })?,
            ),
            (None, None) => None,
        };
        let socket = service::grpc::bind(&RuntimeDir::at(&config.runtime_dir).router_socket())?;
        let registry = WorkerRegistry::new(config.routing.mode);
        let generator = Generator {
            admission: AdmissionController::new(
                registry.clone(),
                config.admission.limits(config.streams_max),
            ),
            grammars: GrammarChecker::new(registry.clone()),
            registry,
            tenants: TenantResolver::default(),
            request_timeout: config.request_timeout,
        };
        Ok(Self { config, tcp, socket, generator, metrics })
    }

    /// The TCP address. If the configured port is 0, it has the port that the kernel chose.
    pub fn address(&self) -> Option<SocketAddr> {
        self.tcp.as_ref().and_then(|tcp| tcp.local_addr().ok())
    }

    /// Serves until a stop is requested and all streams have ended, or the drain time is over.
    pub async fn serve(self, shutdown: &Shutdown) -> Result<(), RouterError> {
        let Router { config, tcp, socket, generator, metrics } = self;
        // Links to workers stay until the last stream has ended: a draining router still fails
        // over.
        let links = CancellationToken::new();
        let discovery = tokio::spawn(discovery::run(
            RuntimeDir::at(&config.runtime_dir),
            generator.registry.clone(),
            links.clone(),
        ));

        let admission = tokio::spawn(generator.admission.clone().run(links.clone()));
        let (health, health_service) = service::grpc::health();
        health.set_service_status(HEALTH_SERVICE, tonic_health::ServingStatus::NotServing).await;
        let reporter = tokio::spawn(report_health(generator.registry.clone(), health));
        let message_max = config.body_max.0 as usize;
        let inference = InferenceServer::new(InferenceService { generator: generator.clone() })
            .max_decoding_message_size(message_max)
            .max_encoding_message_size(service::grpc::MESSAGE_BYTES_MAX);
        let reflection = service::grpc::reflection(proto::FILE_DESCRIPTOR_SET)?;
        let grpc = Routes::from(axum::Router::new())
            .add_service(inference)
            .add_service(health_service)
            .add_service(reflection);

        let app = AppState { generator, body_bytes_max: message_max, metrics };
        let all_routes = http::routes(app).merge(grpc.clone().into_axum_router());
        let on_socket =
            service::grpc::serve(service::grpc::server().add_routes(grpc), socket, shutdown.requested());
        let on_tcp = async {
            if let Some(tcp) = tcp {
                accept_connections(tcp, all_routes, shutdown.token().clone()).await;
            }
            Ok(())
        };
        let drained = async {
            shutdown.requested().await;
            tokio::time::sleep(config.drain).await;
        };
        let served = tokio::select! {
            served = async { tokio::try_join!(on_socket, on_tcp) } => served.map(drop).map_err(RouterError::Serve),
            // Dropping the connections resets them, so a client sees a cut stream and no regular
            // end.
            () = drained => Ok(()),
            () = shutdown.forced() => Ok(()),
        };
        links.cancel();
        reporter.abort();
        // Both end with their token.
        drop(discovery.await);
        drop(admission.await);
        served
    }
}

fn to_tokio_listener(listener: std::net::TcpListener) -> io::Result<TcpListener> {
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// Reports SERVING while the registry has workers.
async fn report_health(registry: Arc<WorkerRegistry>, health: tonic_health::server::HealthReporter) {
    let mut changes = registry.subscribe();
    loop {
        let status = match registry.has_workers() {
            true => tonic_health::ServingStatus::Serving,
            false => tonic_health::ServingStatus::NotServing,
        };
        health.set_service_status(HEALTH_SERVICE, status).await;
        if changes.changed().await.is_err() {
            return;
        }
    }
}

/// Accepts connections until `stop`. Returns when every connection has ended.
async fn accept_connections(listener: TcpListener, app: axum::Router, stop: CancellationToken) {
    let connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let tasks = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = async {
                let permit = connections.clone().acquire_owned().await;
                (permit, listener.accept().await)
            } => accepted,
        };
        match accepted {
            (Ok(permit), Ok((stream, _))) => {
                let (app, stop) = (app.clone(), stop.clone());
                tasks.spawn(async move {
                    if let Err(error) = serve_connection(stream, app, stop).await {
                        tracing::debug!(%error, "connection ended");
                    }
                    drop(permit);
                });
            }
            (_, Err(error)) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_RETRY).await;
            }
            // The semaphore is never closed.
            (Err(_), _) => break,
        }
    }
    drop(listener);
    tasks.close();
    tasks.wait().await;
}

async fn serve_connection(
    stream: TcpStream,
    app: axum::Router,
    stop: CancellationToken,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    // Sends each small token frame at once.
    stream.set_nodelay(true)?;
    let http2 = tokio::select! {
        http2 = tokio::time::timeout(HEADER_TIMEOUT, speaks_http2(&stream)) => http2??,
        () = stop.cancelled() => return Ok(()),
    };
    let io = TokioIo::new(stream);
    let service = TowerToHyperService::new(app);
    if http2 {
        let connection = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .max_concurrent_streams(HTTP2_STREAMS_MAX)
            .keep_alive_interval(HTTP2_PING_INTERVAL)
            .keep_alive_timeout(HTTP2_PING_TIMEOUT)
            .serve_connection(io, service);
        let mut connection = std::pin::pin!(connection);
        tokio::select! {
            ended = &mut connection => return Ok(ended?),
            () = stop.cancelled() => connection.as_mut().graceful_shutdown(),
        }
        return Ok(connection.await?);
    }
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .serve_connection(io, service);
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        ended = &mut connection => return Ok(ended?),
        () = stop.cancelled() => connection.as_mut().graceful_shutdown(),
    }
    Ok(connection.await?)
}

/// Peeks at the first bytes. An HTTP/1 request differs from the preface in its fourth byte at the
/// latest.
async fn speaks_http2(stream: &TcpStream) -> io::Result<bool> {
    let mut bytes = [0u8; HTTP2_PREFACE.len()];
    loop {
        let count = stream.peek(&mut bytes).await?;
        if count == 0 {
            return Ok(false);
        }
        if bytes[..count] != HTTP2_PREFACE[..count] {
            return Ok(false);
        }
        if count == bytes.len() {
            return Ok(true);
        }
        tokio::time::sleep(PREFACE_RETRY).await;
    }
}
