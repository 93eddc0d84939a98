// SPDX-License-Identifier: Apache-2.0

//! Accepts TCP connections and serves HTTP/1.1 and HTTP/2 on them, with or without TLS.
//!
//! [`OpenConnections`] decides which connections stay open. On a stop, connections end without a
//! request that is lost:
//!
//! - HTTP/2: GOAWAY at once. The client knows which of its requests were taken.
//! - HTTP/1.1: a client may send a request at any time, and would lose it to a connection that is
//!   being closed. So the next response of each connection says `connection: close`. A connection
//!   on which no request comes for [`IDLE_BEFORE_CLOSE`] is closed.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use hyper::body::Incoming;
use hyper::header::{CONNECTION, HeaderValue};
use hyper::service::service_fn;
use hyper::{Request, Version};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use service::accept_failures::AcceptFailures;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::server::TlsStream;
use tokio_util::either::Either;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt;

use crate::http::ClientMachine;
use crate::intake::ConnectionLimits;
use crate::open_connections::{OpenConnection, OpenConnections, ResponseBody};
use crate::tls::{HandshakeError, PublicTls};

/// A client that answers no ping is gone. TCP alone may not notice.
const HTTP2_PING_INTERVAL: Duration = Duration::from_secs(20);
const HTTP2_PING_TIMEOUT: Duration = Duration::from_secs(10);
/// Received bytes of a connection and of a stream that no handler has read. A body on a local
/// network arrives in windows of this size at full speed.
const HTTP2_CONNECTION_WINDOW: u32 = 256 << 10;
const HTTP2_STREAM_WINDOW: u32 = 128 << 10;
/// Bytes of one response that wait for a slow client. Further tokens wait in the router's channel.
const HTTP2_SEND_BYTES_MAX: usize = 64 << 10;
/// The headers of one request, over both protocols: tokens and cookies fit.
const HTTP1_BUFFER_BYTES_MAX: usize = 64 << 10;
const HTTP2_HEADER_BYTES_MAX: u32 = 16 << 10;
/// On a stop, a client that is not idle sends its next request within this time.
const IDLE_BEFORE_CLOSE: Duration = Duration::from_millis(500);
/// Streams that a client reset before they were served, and that the router reset.
const HTTP2_RESET_STREAMS_MAX: usize = 20;

#[derive(Clone, Copy, Debug)]
pub(crate) struct ListenerLimits {
    pub(crate) connections: ConnectionLimits,
    /// Time from the start of a connection, or from the last response on it, to the end of the
    /// next request's headers.
    pub(crate) head_timeout: Duration,
    /// Requests that run on one HTTP/2 connection.
    pub(crate) http2_streams_max: u32,
}

type ClientStream = Either<TcpStream, TlsStream<TcpStream>>;

#[derive(Debug, thiserror::Error)]
enum ConnectionError {
    #[error("cannot set an option of the socket")]
    Socket(#[from] io::Error),
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    #[error(transparent)]
    Http(#[from] Box<dyn std::error::Error + Send + Sync>),
}

/// Serves until `stop`. Returns when every connection has ended.
pub(crate) async fn serve(
    listener: TcpListener,
    tls: Option<Arc<PublicTls>>,
    app: axum::Router,
    limits: ListenerLimits,
    stop: CancellationToken,
) {
    let open = OpenConnections::new(limits.connections);
    let tasks = TaskTracker::new();
    let name = listener.local_addr().map_or_else(|_| "unknown".to_owned(), |address| address.to_string());
    let mut failures = AcceptFailures::default();
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        let (stream, address) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tokio::time::sleep(failures.failed(&name, &error, Instant::now())).await;
                continue;
            }
        };
        let admitted = tokio::select! {
            // A connection that was accepted is served.
            biased;
            admitted = open.admit(address.ip().into()) => admitted,
            () = stop.cancelled() => break,
        };
        let Some(connection) = admitted else {
            tracing::debug!(%address, "connection refused: its address is at its limit");
            continue;
        };
        let (app, tls, stop) = (app.clone(), tls.clone(), stop.clone());
        // Without the router's address, the checks of local clients apply.
        let local = stream.local_addr();
        let machine = local.map_or(ClientMachine::This, |local| ClientMachine::of(address.ip(), local.ip()));
        tasks.spawn(async move {
            let served = async {
                match open_stream(stream, tls.as_deref(), &connection, &stop).await? {
                    Some(stream) => {
                        serve_connection(stream, machine, app, Arc::new(connection), limits, stop).await
                    }
                    None => Ok(()),
                }
            };
            if let Err(error) = served.await {
                let error = service::exit::one_line(&error);
                tracing::debug!(error, %address, "connection ended");
            }
        });
    }
    drop(listener);
    tasks.close();
    tasks.wait().await;
}

/// The stream for HTTP, which begins after the handshake of TLS. `None` if the connection is to be
/// closed before.
async fn open_stream(
    stream: TcpStream,
    tls: Option<&PublicTls>,
    connection: &OpenConnection,
    stop: &CancellationToken,
) -> Result<Option<ClientStream>, ConnectionError> {
    // Sends each small token frame at once.
    stream.set_nodelay(true)?;
    let Some(tls) = tls else { return Ok(Some(Either::Left(stream))) };
    tokio::select! {
        accepted = tls.accept(stream) => Ok(Some(Either::Right(accepted?))),
        () = connection.close.cancelled() => Ok(None),
        () = async {
            stop.cancelled().await;
            tokio::time::sleep(IDLE_BEFORE_CLOSE).await;
        } => Ok(None),
    }
}

async fn serve_connection(
    stream: ClientStream,
    machine: ClientMachine,
    app: axum::Router,
    connection: Arc<OpenConnection>,
    limits: ListenerLimits,
    stop: CancellationToken,
) -> Result<(), ConnectionError> {
    let (of_service, stops) = (connection.clone(), stop.clone());
    let service = service_fn(move |request: Request<Incoming>| {
        let is_http2 = request.version() == Version::HTTP_2;
        let (app, stops, running) = (app.clone(), stops.clone(), of_service.begin_request(is_http2));
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(of_service.client);
        request.extensions_mut().insert(machine);
        async move {
            let mut response = app.oneshot(request).await?;
            if !is_http2 && stops.is_cancelled() {
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            Ok::<_, Infallible>(response.map(|body| ResponseBody { body, _running: running }))
        }
    });
    let builder = connection_builder(limits);
    let served = builder.serve_connection(TokioIo::new(stream), service);
    let mut served = std::pin::pin!(served);
    // After a pause of this process, a request may have arrived and the timeout may have passed.
    // The request is served.
    let no_request = async {
        tokio::select! {
            biased;
            () = connection.has_request.cancelled() => std::future::pending().await,
            () = tokio::time::sleep(limits.head_timeout) => {}
        }
    };
    tokio::select! {
        biased;
        ended = &mut served => return Ok(ended?),
        // Dropping the connection closes it.
        () = connection.close.cancelled() => return Ok(()),
        () = no_request => return Ok(()),
        () = async {
            stop.cancelled().await;
            connection.until_idle_for(IDLE_BEFORE_CLOSE).await;
        } => served.as_mut().graceful_shutdown(),
    }
    tokio::select! {
        ended = &mut served => Ok(ended?),
        () = connection.close.cancelled() => Ok(()),
    }
}

fn connection_builder(limits: ListenerLimits) -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_timeout)
        .max_buf_size(HTTP1_BUFFER_BYTES_MAX);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(limits.http2_streams_max)
        .initial_connection_window_size(HTTP2_CONNECTION_WINDOW)
        .initial_stream_window_size(HTTP2_STREAM_WINDOW)
        .max_send_buf_size(HTTP2_SEND_BYTES_MAX)
        .max_header_list_size(HTTP2_HEADER_BYTES_MAX)
        .max_pending_accept_reset_streams(HTTP2_RESET_STREAMS_MAX)
        .max_local_error_reset_streams(HTTP2_RESET_STREAMS_MAX)
        .keep_alive_interval(HTTP2_PING_INTERVAL)
        .keep_alive_timeout(HTTP2_PING_TIMEOUT);
    builder
}
