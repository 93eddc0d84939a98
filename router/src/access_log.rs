// SPDX-License-Identifier: Apache-2.0

//! The access log: one line for each request over TCP at the end of its answer, of HTTP and of
//! gRPC. Lines have the target `access_log` and level `info`; those of probes and scrapes have
//! `debug`. They hold no prompt, no output, no query and no key.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{Method, Version};
use axum::middleware::Next;
use axum::response::Response;
use hyper::body::{Frame, SizeHint};
use service::printable::excerpt;

use crate::request_trace::RequestTrace;

/// Routes that monitors ask again and again.
const PROBES: [&str; 7] = [
    "/health",
    "/ping",
    "/ready",
    "/metrics",
    "/ui/fleet",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
];
/// The path of a client is cut to this length: it may name no route.
const PATH_CHARACTERS_MAX: usize = 80;

/// Middleware within `identify`, which gives the request its id.
pub(crate) async fn log_access(request: Request, next: Next) -> Response {
    let mut entry = AccessEntry::new(&request);
    let response = next.run(request).await;
    entry.status = response.status().as_u16();
    entry.head = Some(Instant::now());
    let (head, body) = response.into_parts();
    entry.is_complete = hyper::body::Body::is_end_stream(&body);
    Response::from_parts(head, Body::new(LoggedBody { body, entry }))
}

/// Writes its line when it is dropped, so that a request whose client has left has one too.
struct AccessEntry {
    request_id: Arc<str>,
    method: Method,
    path: String,
    version: Version,
    is_probe: bool,
    began: Instant,
    /// When the answer began. `None`: the client has left before.
    head: Option<Instant>,
    status: u16,
    bytes: u64,
    is_complete: bool,
}

impl AccessEntry {
    fn new(request: &Request) -> Self {
        let path = request.uri().path();
        let id = request.extensions().get::<RequestTrace>().map(|trace| trace.id().clone());
        Self {
            request_id: id.unwrap_or_default(),
            method: request.method().clone(),
            is_probe: PROBES.contains(&path),
            path: excerpt(path, PATH_CHARACTERS_MAX),
            version: request.version(),
            began: Instant::now(),
            head: None,
            status: 0,
            bytes: 0,
            is_complete: false,
        }
    }
}

impl Drop for AccessEntry {
    fn drop(&mut self) {
        let Self { request_id, method, path, version, status, bytes, .. } = &*self;
        let milliseconds = |until: Instant| until.duration_since(self.began).as_micros() as f64 / 1e3;
        let took_ms = milliseconds(Instant::now());
        let head_ms = self.head.map(milliseconds);
        let end = if self.is_complete { "complete" } else { "cut" };
        macro_rules! write_line {
            ($level:ident) => {
                tracing::$level!(
                    target: "access_log",
                    %request_id,
                    %method,
                    path,
                    ?version,
                    status,
                    bytes,
                    head_ms,
                    took_ms,
                    end,
                    "request"
                )
            };
        }
        if self.is_probe {
            write_line!(debug);
        } else {
            write_line!(info);
        }
    }
}

/// A body that counts its bytes.
struct LoggedBody {
    body: Body,
    entry: AccessEntry,
}

impl hyper::body::Body for LoggedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        match &frame {
            Poll::Ready(Some(Ok(frame))) => {
                self.entry.bytes += frame.data_ref().map_or(0, |data| data.len() as u64);
                // The last frame of a call of gRPC.
                self.entry.is_complete |= frame.is_trailers() || self.body.is_end_stream();
            }
            Poll::Ready(None) => self.entry.is_complete = true,
            Poll::Ready(Some(Err(_))) | Poll::Pending => {}
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
