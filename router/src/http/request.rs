//! What handlers take from a request before they look at its fields: id, time, and the whole body within its bounds.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Bytes, to_bytes};
use axum::extract::{FromRequest, FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use service::metrics::Metrics;
use tokio::time::Instant;

use super::error::ApiError;
use crate::generate::{Generator, Origin};
use crate::metrics;
use crate::model::unix_seconds;
use crate::tenant;

/// From the end of the headers to the end of the body.
const BODY_WAIT: Duration = Duration::from_secs(30);
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// A client's own id is taken if it is short and plain: it stands in logs and in the response's `id`.
const REQUEST_ID_BYTES_MAX: usize = 64;
/// Bodies up to this size are tokenised where they are: sooner done than handed over.
const INLINE_BYTES_MAX: usize = 16 << 10;

/// What every handler may use.
#[derive(Clone)]
pub(crate) struct App {
    pub(crate) generator: Generator,
    pub(crate) body_bytes_max: usize,
    pub(crate) metrics: Metrics,
}

/// The client's `x-request-id`, or one drawn here.
#[derive(Clone, Debug)]
pub(crate) struct RequestId(pub(crate) Arc<str>);

impl RequestId {
    fn of(request: &Request) -> Self {
        let given = request.headers().get(REQUEST_ID).and_then(|value| value.to_str().ok());
        let plain = |id: &&str| {
            (1..=REQUEST_ID_BYTES_MAX).contains(&id.len())
                && id.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        };
        given.filter(plain).map_or_else(Self::draw, |id| Self(id.into()))
    }

    /// The standard library's hash maps are seeded from the system's random source.
    pub(crate) fn draw() -> Self {
        let half = || RandomState::new().hash_one("request id");
        Self(format!("{:016x}{:016x}", half(), half()).into())
    }
}

/// Where a request comes from, and when it came by the other clock.
#[derive(Debug)]
pub(crate) struct Stamp {
    pub(crate) origin: Origin,
    pub(crate) created: i64,
}

impl FromRequestParts<App> for Stamp {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        // The middleware below puts the id there.
        let request_id = parts.extensions.get::<RequestId>().cloned().unwrap_or_else(RequestId::draw).0;
        let header = |name: &str| parts.headers.get(name).map(HeaderValue::as_bytes);
        let tenant = app.generator.tenants.of(header(tenant::HEADER), header("authorization"))?;
        let origin = Origin { request_id, arrived: Instant::now(), tenant };
        Ok(Self { origin, created: unix_seconds() })
    }
}

/// The body, bounded in size and time.
pub(crate) struct WholeBody(pub(crate) Bytes);

impl FromRequest<App> for WholeBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &App) -> Result<Self, ApiError> {
        let limit = app.body_bytes_max;
        match tokio::time::timeout(BODY_WAIT, to_bytes(request.into_body(), limit)).await {
            Ok(Ok(bytes)) => Ok(Self(bytes)),
            // A connection that broke gets no answer anyway.
            Ok(Err(_)) => Err(ApiError::body_too_large(limit)),
            Err(_) => Err(ApiError::body_too_slow()),
        }
    }
}

/// Runs `work` on large inputs beside the tasks that stream tokens.
pub(crate) async fn off_thread<T, E>(
    input_bytes: usize,
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, ApiError>
where
    T: Send + 'static,
    E: Into<ApiError> + Send + 'static,
{
    if input_bytes <= INLINE_BYTES_MAX {
        return work().map_err(Into::into);
    }
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result.map_err(Into::into),
        Err(_) => Err(ApiError::not_ready("the router is stopping")),
    }
}

/// Around every route: the request's id comes back in the response, and the outcome is counted.
pub(crate) async fn observe(
    State(routes): State<&'static [&'static str]>,
    mut request: Request,
    next: Next,
) -> Response {
    let id = RequestId::of(&request);
    request.extensions_mut().insert(id.clone());
    // Only known routes become label values.
    let route = routes.iter().copied().find(|&route| route == request.uri().path()).unwrap_or("other");
    let mut response = next.run(request).await.into_response();
    metrics::http(route, response.status().as_u16());
    if let Ok(value) = HeaderValue::from_str(&id.0) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}
