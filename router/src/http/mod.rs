// SPDX-License-Identifier: Apache-2.0

//! The OpenAI-compatible HTTP API, and the routes for health, models and metrics.

mod chat;
mod chat_reply;
mod completions;
mod embeddings;
mod error;
mod fields;
mod fleet_picture;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod host;
mod keep_alive;
mod message_writer;
mod messages;
mod messages_input;
mod models;
mod named_model;
mod numbers;
mod origin;
mod page_files;
mod prompt_field;
mod prompt_scores;
mod reply_stream;
mod request;
mod rerank;
mod response;
mod response_writer;
mod responses;
mod responses_input;
mod sampling_fields;
mod scheduling_fields;
mod server_info;
mod structured_output;
mod token_names;
mod tokenizer_routes;
mod tool_grammar;
mod tools;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, Method, Request, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router, middleware};
use proto::fleet::v1::Device;
use serde_json::{Value, json};
use tonic::Status;

use crate::device_gauges;
use crate::fleet_watch::CopyReport;
use crate::gauges::{self, FleetGauges};
pub(crate) use error::ApiError;
pub(crate) use fields::UnknownFields;
pub use host::HostError;
pub(crate) use host::{ClientMachine, OwnNames, check_host};
pub(crate) use messages::shape_errors;
pub use origin::OriginError;
pub(crate) use origin::{AllowedOrigins, check_origin};
pub(crate) use page_files::is_page_file;
pub(crate) use request::{AppState, run_tokenizer};

/// Routes that are label values of the response counter.
const ROUTES: [&str; 24] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/v1/score",
    "/score",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
    "/version",
    "/server_info",
    "/health",
    "/ready",
    "/metrics",
    "/ui",
    "/ui/fleet",
    "/ping",
    "/",
];

/// All HTTP routes. The paths of gRPC services contain a package name, so they do not collide.
pub(crate) fn routes(app: AppState) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat::post))
        .route("/v1/completions", post(completions::post))
        .route("/v1/responses", post(responses::post))
        .route("/v1/responses/{id}", get(responses::get).delete(responses::delete))
        .route("/v1/messages", post(messages::post))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/v1/embeddings", post(embeddings::post))
        .route("/v1/rerank", post(rerank::rerank))
        .route("/v2/rerank", post(rerank::rerank))
        .route("/rerank", post(rerank::rerank))
        .route("/v1/score", post(rerank::score))
        .route("/score", post(rerank::score))
        .route("/v1/models", get(models::models))
        .route("/v1/models/{*name}", get(models::model))
        .route("/tokenize", post(tokenizer_routes::tokenize))
        .route("/detokenize", post(tokenizer_routes::detokenize))
        .route("/tokenizer_info", get(tokenizer_routes::tokenizer_info))
        .route("/", get(server_info::root))
        .route("/version", get(server_info::version))
        .route("/server_info", get(server_info::server_info))
        .route("/health", get(health))
        .route("/ping", get(health))
        .route("/ready", get(ready))
        .route("/metrics", get(scrape))
        .route("/ui", get(page_files::index))
        .route("/ui/{file}", get(page_files::file))
        .route("/ui/fleet", get(fleet_picture::fleet))
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(&ROUTES[..], request::observe))
        .with_state(app)
}

/// The routes that need no request body and no worker.
pub(crate) fn health_routes(app: AppState) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/ready", get(ready))
        .route("/metrics", get(scrape))
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .with_state(app)
}

/// Reports that this process runs, and which devices are quarantined. Says nothing about workers.
async fn health(State(app): State<AppState>) -> Json<Value> {
    let quarantined = quarantined_devices(&app.fleet.devices());
    match app.is_ready_detailed && !quarantined.is_empty() {
        true => Json(json!({"status": "ok", "quarantined_devices": quarantined})),
        false => Json(json!({"status": "ok"})),
    }
}

/// Reports whether the registry has workers, and which processes fail.
async fn ready(State(app): State<AppState>) -> Result<Json<Value>, ApiError> {
    let models = app.generator.registry.snapshot();
    let workers: usize = models.iter().map(|snapshot| snapshot.workers.len()).sum();
    let failed = app.fleet.failed();
    let idle = app.fleet.idle();
    // A request wakes an idle model.
    match (app.generator.registry.has_workers() || !idle.is_empty(), failed.is_empty()) {
        (true, _) if !app.is_ready_detailed => Ok(Json(json!({"status": "ready", "workers": workers}))),
        (true, _) => {
            let failed_copies = failed_copies(&app.fleet.copies());
            let ready = json!({
                "status": "ready", "workers": workers, "failed": failed, "failed_copies": failed_copies,
                "idle": idle, "failed_models": app.fleet.failed_models(),
                "quarantined_devices": quarantined_devices(&app.fleet.devices()),
            });
            Ok(Json(ready))
        }
        (false, is_sound) if is_sound || !app.is_ready_detailed => {
            Err(ApiError::not_ready("no worker is ready yet"))
        }
        (false, _) => {
            let failed = failed.join(", ");
            let text =
                format!("no worker is ready; crashing again and again: {failed}; `ballast ps` says why");
            Err(ApiError::not_ready(text))
        }
    }
}

/// The copies of weights that cannot be loaded.
fn failed_copies(copies: &[CopyReport]) -> Vec<Value> {
    let failed = copies.iter().filter(|copy| copy.is_failed);
    failed.map(|copy| json!({"model": copy.model, "device": copy.device})).collect()
}

fn quarantined_devices(devices: &[Device]) -> Vec<Value> {
    let quarantined = devices.iter().filter_map(|device| {
        let reason = &device.quarantine.as_ref()?.reason;
        Some(json!({"device": device.device, "reason": reason}))
    });
    quarantined.collect()
}

async fn scrape(State(app): State<AppState>) -> Response {
    let mut text = app.metrics.render();
    let processes = app.fleet.processes();
    let copies = app.fleet.copies();
    text.push_str(&gauges::render(
        &app.generator.registry,
        &app.generator.admission,
        &FleetGauges { processes: &processes, copies: &copies },
        app.tracer.dropped_spans(),
    ));
    text.push_str(&device_gauges::render(&app.fleet.devices(), &app.fleet.on_fallback()));
    text.push_str(&gauges::render_intake(
        app.budget.used(),
        app.generator.dispatcher.quarantine.quarantined(),
    ));
    let text = crate::metrics_text::complete(&text);
    ([(header::CONTENT_TYPE, service::metrics::CONTENT_TYPE)], text).into_response()
}

async fn unknown_route(method: Method, uri: Uri, headers: HeaderMap) -> Response {
    match is_grpc(&headers) {
        true => Status::unimplemented(format!("unknown method {}", uri.path())).into_http::<Body>(),
        false => ApiError::unknown_route(method.as_str(), uri.path()).into_response(),
    }
}

/// Whether a request is a call of gRPC, which gets its errors in another form.
pub(crate) fn is_grpc(headers: &HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
    content_type.is_some_and(|value| value.starts_with(GRPC_CONTENT_TYPE))
}

const GRPC_CONTENT_TYPE: &[u8] = b"application/grpc";

/// Removes a slash at the end of the path: clients join it to a base URL that has one.
pub(crate) fn trim_slash<B>(mut request: Request<B>) -> Request<B> {
    let path = request.uri().path();
    let trimmed = path.trim_end_matches('/');
    if trimmed.is_empty() || trimmed.len() == path.len() {
        return request;
    }
    let query = request.uri().query().map(|query| format!("?{query}")).unwrap_or_default();
    let mut parts = request.uri().clone().into_parts();
    parts.path_and_query = format!("{trimmed}{query}").parse().ok();
    if let Ok(uri) = Uri::from_parts(parts) {
        *request.uri_mut() = uri;
    }
    request
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    ApiError::wrong_method(method.as_str(), uri.path())
}
