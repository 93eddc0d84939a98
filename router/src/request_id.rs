// SPDX-License-Identifier: Apache-2.0

//! Request ids for logs and responses, and the middleware that gives each request its id and its
//! trace.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, Method};
use axum::middleware::Next;
use axum::response::Response;
use traces::{TraceContext, Tracer};

use crate::request_trace::RequestTrace;

/// Of HTTP requests and of gRPC calls, and of the answers to them.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// A client's id is used if it is short and plain, because it appears in logs and in the response's
/// `id`.
const BYTES_MAX: usize = 64;

/// The routes whose requests have spans: those that generate.
const TRACED_ROUTES: [&str; 5] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/ballast.v1.Inference/Generate",
];

/// The client's `x-request-id`, or a random id.
#[derive(Clone, Debug)]
pub(crate) struct ClientRequestId(pub(crate) Arc<str>);

impl ClientRequestId {
    pub(crate) fn from_client(given: Option<&str>) -> Self {
        let is_plain = |id: &&str| {
            (1..=BYTES_MAX).contains(&id.len())
                && id.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        };
        given.filter(is_plain).map_or_else(Self::random, |id| Self(id.into()))
    }

    /// The standard library seeds its hash maps from the system's random source.
    pub(crate) fn random() -> Self {
        let half = || RandomState::new().hash_one("request id");
        Self(format!("{:016x}{:016x}", half(), half()).into())
    }
}

/// Middleware around all routes, of HTTP and of gRPC: gives the request its [`RequestTrace`], and
/// returns the id in the response.
pub(crate) async fn identify(State(tracer): State<Tracer>, mut request: Request, next: Next) -> Response {
    let given = request.headers().get(REQUEST_ID).and_then(|value| value.to_str().ok());
    let id = ClientRequestId::from_client(given).0;
    let parent = TraceContext::from_headers(request.headers());
    let path = request.uri().path();
    let route = TRACED_ROUTES.into_iter().find(|&route| route == path && request.method() == Method::POST);
    let trace = match route {
        Some(_) => RequestTrace::begin(&tracer, id, &parent),
        None => RequestTrace::unrecorded(id, parent),
    };
    request.extensions_mut().insert(trace.clone());
    let mut response = next.run(request).await;
    if let Some(route) = route {
        // Only an answer without a body has it here.
        let grpc_status = response.headers().get("grpc-status").and_then(|value| value.to_str().ok());
        let grpc_status = grpc_status.and_then(|code| code.parse().ok());
        trace.record_response(route, response.status().as_u16(), grpc_status);
    }
    if let Ok(value) = HeaderValue::from_str(trace.id()) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}
