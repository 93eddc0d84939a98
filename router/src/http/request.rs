// SPDX-License-Identifier: Apache-2.0

//! Extracts what every handler needs from an HTTP request: id, tenant, arrival time and the body.

use std::borrow::Cow;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{FromRequest, FromRequestParts, Request, State};
use axum::http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use serde::Deserialize;
use service::metrics::Metrics;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use traces::Tracer;

use super::error::ApiError;
use super::fields::UnknownFields;
use super::named_model::named_model;
use crate::access::ModelAccess;
use crate::access_control::KeyedRequest;
use crate::fleet_watch::FleetWatch;
use crate::generate::{Generator, RequestOrigin, SESSION_HEADER};
use crate::intake::{RequestBytes, SharedBudget, body_error};
use crate::metrics;
use crate::model::unix_seconds;
use crate::model_wait::ModelQuery;
use crate::request_trace::RequestTrace;
use crate::response_store::ResponseStore;
use crate::tenant;

/// A handler tokenizes bodies up to this size itself, which takes less time than a blocking task.
const INLINE_BYTES_MAX: usize = 16 << 10;
/// Large bodies that are parsed at the same time. Their JSON values take up to 70 times as much.
const PARSED_BYTES_MAX: u32 = 8 << 20;

/// State that all handlers share.
#[derive(Clone)]
pub(crate) struct AppState {
    pub(crate) generator: Generator,
    pub(crate) metrics: Metrics,
    pub(crate) budget: SharedBudget,
    pub(crate) fleet: FleetWatch,
    /// Permits for bytes of bodies that are parsed, and of scores that are written, at the same
    /// time.
    pub(crate) parsing: Arc<Semaphore>,
    pub(crate) unknown_fields: UnknownFields,
    pub(crate) responses: ResponseStore,
    /// Counts the spans that no collector has got.
    pub(crate) tracer: Tracer,
    /// `/ready` names models and processes. Not where callers need keys, and `/ready` needs none.
    pub(crate) is_ready_detailed: bool,
}

impl AppState {
    pub(crate) fn new(
        generator: Generator,
        metrics: Metrics,
        budget: SharedBudget,
        fleet: FleetWatch,
        unknown_fields: UnknownFields,
        tracer: Tracer,
    ) -> Self {
        let parsing = Arc::new(Semaphore::new(PARSED_BYTES_MAX as usize));
        let responses = ResponseStore::default();
        let is_ready_detailed = true;
        Self {
            generator,
            metrics,
            budget,
            fleet,
            parsing,
            unknown_fields,
            responses,
            tracer,
            is_ready_detailed,
        }
    }

    /// Waits for the right to hold JSON values of this many bytes. `None` for few bytes.
    pub(super) async fn reserve_json(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let permits = u32::try_from(bytes).unwrap_or(u32::MAX).min(PARSED_BYTES_MAX);
        match bytes > INLINE_BYTES_MAX {
            // The semaphore is never closed.
            true => self.parsing.clone().acquire_many_owned(permits).await.ok(),
            false => None,
        }
    }
}

/// The origin of a request, and its arrival in Unix time.
#[derive(Debug)]
pub(crate) struct RequestMetadata {
    pub(crate) origin: RequestOrigin,
    pub(crate) models: ModelAccess,
    pub(crate) created_unix_seconds: i64,
}

impl FromRequestParts<AppState> for RequestMetadata {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &AppState) -> Result<Self, ApiError> {
        let trace = parts.extensions.get::<RequestTrace>();
        let trace = trace.expect("`identify` runs around every route").clone();
        let header = |name: &str| parts.headers.get(name).map(HeaderValue::as_bytes);
        let active = parts.extensions.get::<KeyedRequest>().cloned();
        let key = active.as_ref().map(KeyedRequest::key);
        let (name, presented) = (header(tenant::HEADER), tenant::presented_key(&parts.headers));
        let tenant = app.generator.tenants.resolve(name, presented, key)?;
        let models = KeyedRequest::models(active.as_ref());
        let bytes = parts.extensions.get::<RequestBytes>().cloned();
        let session = header(SESSION_HEADER).map(|name| String::from_utf8_lossy(name).into());
        let origin = RequestOrigin { trace, arrived: Instant::now(), tenant, session, bytes, active };
        Ok(Self { origin, models, created_unix_seconds: unix_seconds() })
    }
}

impl FromRequestParts<AppState> for ModelAccess {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &AppState) -> Result<Self, Infallible> {
        Ok(KeyedRequest::models(parts.extensions.get::<KeyedRequest>()))
    }
}

/// The whole body, and the right to parse it.
pub(crate) struct ReceivedBody {
    pub(crate) bytes: Vec<u8>,
    /// `None` for a small body.
    _parsing: Option<OwnedSemaphorePermit>,
}

impl FromRequest<AppState> for ReceivedBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &AppState) -> Result<Self, ApiError> {
        check_media_type(request.headers())?;
        let (mut head, body) = request.into_parts();
        // The middleware around every route limits the body. Copying it keeps the memory in
        // proportion to its length, also if it arrives in chunks of one byte.
        let (mut parts, mut bytes) = (body.into_data_stream(), Vec::new());
        while let Some(part) = parts.next().await {
            bytes.extend_from_slice(&part.map_err(|error| body_error(&error))?);
        }
        let registry = &app.generator.registry;
        let is_unknown = || named_model(&bytes).is_some_and(|name| !registry.is_known(name));
        if registry.has_unheard_models() || is_unknown() {
            wait_for_model(&mut head, app, &bytes).await?;
        }
        let parsing = app.reserve_json(bytes.len()).await;
        Ok(Self { bytes, _parsing: parsing })
    }
}

/// What the wait for a model needs of a body.
#[derive(Deserialize)]
struct WaitFields<'a> {
    #[serde(borrow)]
    model: Option<Cow<'a, str>>,
    deadline_ms: Option<u64>,
}

/// Waits until the router knows the model of the body. A body without these fields is refused
/// later, with the field's name.
async fn wait_for_model(head: &mut Parts, app: &AppState, body: &[u8]) -> Result<(), ApiError> {
    let metadata = RequestMetadata::from_request_parts(head, app).await?;
    let Ok(WaitFields { model, deadline_ms }) = serde_json::from_slice(body) else { return Ok(()) };
    let timeout = deadline_ms.map_or(Duration::MAX, Duration::from_millis);
    let query = ModelQuery {
        name: model.as_deref(),
        access: &metadata.models,
        deadline: app.generator.deadline_of(&metadata.origin, timeout),
        tenant: metadata.origin.tenant.clone(),
    };
    Ok(app.generator.wait_for_model(query).await?)
}

/// Refuses what is not plain JSON. A web page of another site cannot send this media type without
/// asking first.
fn check_media_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let value = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let media_type = value(CONTENT_TYPE).and_then(|value| value.split(';').next()).unwrap_or_default();
    let subtype = media_type.trim().to_ascii_lowercase();
    let is_json = subtype.strip_prefix("application/").is_some_and(|s| s == "json" || s.ends_with("+json"));
    if !is_json {
        return Err(ApiError::unsupported_media("send the header `content-type: application/json`"));
    }
    match value(CONTENT_ENCODING) {
        None | Some("" | "identity") => Ok(()),
        Some(_) => Err(ApiError::unsupported_media("send the body without `content-encoding`")),
    }
}

/// Runs `work`. For a large input, it uses a blocking thread, so that token streams do not wait for
/// it.
pub(crate) async fn run_tokenizer<T, E>(
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

/// Middleware around every route: counts the response.
pub(crate) async fn observe(
    State(routes): State<&'static [&'static str]>,
    request: Request,
    next: Next,
) -> Response {
    // Only known routes are label values.
    let route = routes.iter().copied().find(|&route| route == request.uri().path()).unwrap_or("other");
    let response = next.run(request).await.into_response();
    metrics::record_http_response(route, response.status().as_u16());
    response
}
