//! The listening sockets: TCP for HTTP/1.1 and HTTP/2 (gRPC beside the OpenAI routes), `router.sock` for gRPC.
//!
//! The accept loop bounds connections, the time a client may take to say what it wants, and the streams of one HTTP/2
//! connection. On a stop it closes idle connections at once and busy ones after their last response.

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

use crate::config::Config;
use crate::discovery;
use crate::fleet::Fleet;
use crate::gate::Gate;
use crate::generate::Generator;
use crate::grammar_check::GrammarChecks;
use crate::grpc::Inference;
use crate::http::{self, App};
use crate::run::RunError;
use crate::tenant::Tenants;

/// Open TCP connections; more wait in the kernel's queue.
const CONNECTIONS_MAX: usize = 2048;
/// From the first byte of a connection, or of a request on it, to the end of its headers.
const HEADER_WAIT: Duration = Duration::from_secs(30);
/// Concurrent requests of one HTTP/2 connection.
const HTTP2_STREAMS_MAX: u32 = 256;
/// A client that answers no ping is gone, however its network looks.
const HTTP2_PING_EVERY: Duration = Duration::from_secs(20);
const HTTP2_PING_WAIT: Duration = Duration::from_secs(10);
/// After a failed accept (out of descriptors), before the next.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// What every HTTP/2 connection begins with (RFC 9113, section 3.4).
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// While a client has sent only part of what tells the protocols apart.
const PREFACE_RETRY: Duration = Duration::from_millis(5);

/// The name under which the public service reports its health.
const SERVICE: &str = "ballast.v1.Inference";

/// A router with its sockets bound.
pub struct Router {
    config: Config,
    tcp: Option<TcpListener>,
    socket: UdsListener,
    generator: Generator,
    metrics: Metrics,
}

impl Router {
    /// Binds the sockets. `inherited` is a listening socket that takes the place of `config.listen`.
    pub async fn bind(
        config: Config,
        inherited: Option<std::net::TcpListener>,
        metrics: Metrics,
    ) -> Result<Self, RunError> {
        config.admission.check()?;
        let tcp = match (inherited, config.listen) {
            (Some(listener), _) => Some(adopt(listener).map_err(RunError::Inherited)?),
            (None, Some(address)) => Some(
                TcpListener::bind(address).await.map_err(|source| RunError::Listen { address, source })?,
            ),
            (None, None) => None,
        };
        let socket = service::grpc::bind(&RuntimeDir::at(&config.runtime_dir).router_socket())?;
        let fleet = Fleet::new();
        let generator = Generator {
            gate: Gate::new(fleet.clone(), config.admission.limits(config.streams_max)),
            grammars: GrammarChecks::new(fleet.clone()),
            fleet,
            tenants: Tenants::default(),
            request_timeout: config.request_timeout,
        };
        Ok(Self { config, tcp, socket, generator, metrics })
    }

    /// The TCP address, with the port that the system chose if the configuration said 0.
    pub fn address(&self) -> Option<SocketAddr> {
        self.tcp.as_ref().and_then(|tcp| tcp.local_addr().ok())
    }

    /// Serves until a stop is requested and the streams have ended, or the drain is over.
    pub async fn serve(self, shutdown: &Shutdown) -> Result<(), RunError> {
        let Router { config, tcp, socket, generator, metrics } = self;
        // Workers are followed until the last stream has ended: a draining router still resumes.
        let links = CancellationToken::new();
        let discovery = tokio::spawn(discovery::run(
            RuntimeDir::at(&config.runtime_dir),
            generator.fleet.clone(),
            links.clone(),
        ));

        let gate = tokio::spawn(generator.gate.clone().watch(links.clone()));
        let (health, health_service) = service::grpc::health();
        health.set_service_status(SERVICE, tonic_health::ServingStatus::NotServing).await;
        let reporter = tokio::spawn(report_health(generator.fleet.clone(), health));
        let message_max = config.body_max.0 as usize;
        let inference = InferenceServer::new(Inference { generator: generator.clone() })
            .max_decoding_message_size(message_max)
            .max_encoding_message_size(service::grpc::MESSAGE_BYTES_MAX);
        let reflection = service::grpc::reflection(proto::FILE_DESCRIPTOR_SET)?;
        let grpc = Routes::from(axum::Router::new())
            .add_service(inference)
            .add_service(health_service)
            .add_service(reflection);

        let app = App { generator, body_bytes_max: message_max, metrics };
        let everything = http::routes(app).merge(grpc.clone().into_axum_router());
        let on_socket =
            service::grpc::serve(service::grpc::server().add_routes(grpc), socket, shutdown.requested());
        let on_tcp = async {
            if let Some(tcp) = tcp {
                accept(tcp, everything, shutdown.token().clone()).await;
            }
            Ok(())
        };
        let drained = async {
            shutdown.requested().await;
            tokio::time::sleep(config.drain).await;
        };
        let served = tokio::select! {
            served = async { tokio::try_join!(on_socket, on_tcp) } => served.map(drop).map_err(RunError::Serve),
            // What is still open is reset: the client sees a cut connection, not an end.
            () = drained => Ok(()),
            () = shutdown.forced() => Ok(()),
        };
        links.cancel();
        reporter.abort();
        // Ends with its token.
        drop(discovery.await);
        drop(gate.await);
        served
    }
}

fn adopt(listener: std::net::TcpListener) -> io::Result<TcpListener> {
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// SERVING while a request would find a worker.
async fn report_health(fleet: Arc<Fleet>, health: tonic_health::server::HealthReporter) {
    let mut changes = fleet.changes();
    loop {
        let status = match fleet.is_ready() {
            true => tonic_health::ServingStatus::Serving,
            false => tonic_health::ServingStatus::NotServing,
        };
        health.set_service_status(SERVICE, status).await;
        if changes.changed().await.is_err() {
            return;
        }
    }
}

/// Returns when `stop` has come and every connection has ended.
async fn accept(listener: TcpListener, app: axum::Router, stop: CancellationToken) {
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
                    if let Err(error) = connection(stream, app, stop).await {
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

async fn connection(
    stream: TcpStream,
    app: axum::Router,
    stop: CancellationToken,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    // Tokens are small and wanted at once.
    stream.set_nodelay(true)?;
    let http2 = tokio::select! {
        http2 = tokio::time::timeout(HEADER_WAIT, speaks_http2(&stream)) => http2??,
        () = stop.cancelled() => return Ok(()),
    };
    let io = TokioIo::new(stream);
    let service = TowerToHyperService::new(app);
    if http2 {
        let connection = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .max_concurrent_streams(HTTP2_STREAMS_MAX)
            .keep_alive_interval(HTTP2_PING_EVERY)
            .keep_alive_timeout(HTTP2_PING_WAIT)
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
        .header_read_timeout(HEADER_WAIT)
        .serve_connection(io, service);
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        ended = &mut connection => return Ok(ended?),
        () = stop.cancelled() => connection.as_mut().graceful_shutdown(),
    }
    Ok(connection.await?)
}

/// Looks at the first bytes without taking them. An HTTP/1 request differs from the preface by its fourth byte at most.
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
