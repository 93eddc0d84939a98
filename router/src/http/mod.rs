//! The OpenAI-compatible surface, and the routes for people and machines that watch the fleet.

mod chat;
mod completions;
mod error;
mod fields;
mod numbers;
mod request;
mod response;
mod sampling_fields;
mod scheduling_fields;
mod structured_output;

use axum::extract::{Path, State};
use axum::http::{Method, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router, middleware};
use serde_json::{Value, json};

use crate::fleet::{ResolveError, Served};
use crate::metrics;
use error::ApiError;
pub(crate) use request::{App, RequestId};

/// Label values of the request counter.
const ROUTES: [&str; 6] =
    ["/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/ready", "/metrics"];

/// All HTTP routes. gRPC services are merged in beside them: their paths have a package name in them.
pub(crate) fn routes(app: App) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat::post))
        .route("/v1/completions", post(completions::post))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/health", get(health))
        .route("/ready", get(ready))
        .route("/metrics", get(scrape))
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(&ROUTES[..], request::observe))
        .with_state(app)
}

/// This process answers; nothing about workers.
async fn health() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

/// A request would find a worker.
async fn ready(State(app): State<App>) -> Result<Json<Value>, ApiError> {
    let served = app.generator.fleet.served();
    let workers: usize = served.iter().map(|served| served.workers.len()).sum();
    match app.generator.fleet.is_ready() {
        true => Ok(Json(json!({"status": "ready", "workers": workers}))),
        false => Err(ApiError::not_ready("no worker is ready yet")),
    }
}

async fn models(State(app): State<App>) -> Json<Value> {
    let data: Vec<Value> = app.generator.fleet.served().iter().map(model_entry).collect();
    Json(json!({"object": "list", "data": data}))
}

async fn model(State(app): State<App>, Path(name): Path<String>) -> Result<Json<Value>, ApiError> {
    let served = app.generator.fleet.served();
    match served.iter().find(|served| served.model.name() == name) {
        Some(served) => Ok(Json(model_entry(served))),
        None => {
            let known = served.iter().map(|served| served.model.name().to_owned()).collect();
            Err(ResolveError::Unknown { name, known }.into())
        }
    }
}

fn model_entry(served: &Served) -> Value {
    let model = &served.model;
    json!({
        "id": model.name(),
        "object": "model",
        "created": model.joined_unix_seconds,
        "owned_by": "ballast",
        "root": model.name(),
        "parent": null,
        "max_model_len": model.about.context_tokens,
        "digest": model.digest_hex(),
        "workers": served.workers.len(),
    })
}

async fn scrape(State(app): State<App>) -> Response {
    let mut text = app.metrics.render();
    text.push_str(&metrics::render_gauges(&app.generator.fleet, &app.generator.gate));
    ([(header::CONTENT_TYPE, service::metrics::CONTENT_TYPE)], text).into_response()
}

async fn unknown_route(method: Method, uri: Uri) -> ApiError {
    ApiError::unknown_route(method.as_str(), uri.path())
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    ApiError::wrong_method(method.as_str(), uri.path())
}
