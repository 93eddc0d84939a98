// SPDX-License-Identifier: Apache-2.0

//! The OpenAI-compatible HTTP API, and the routes for health, models and metrics.

mod chat;
mod chat_reply;
mod completions;
mod error;
mod fields;
mod numbers;
mod origin;
mod request;
mod response;
mod sampling_fields;
mod scheduling_fields;
mod structured_output;
mod tool_grammar;
mod tools;

use axum::extract::{Path, State};
use axum::http::{Method, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router, middleware};
use serde_json::{Value, json};

use crate::access::ModelAccess;
use crate::gauges;
use crate::registry::{ModelSnapshot, ResolveError};
pub(crate) use error::ApiError;
pub use origin::OriginError;
pub(crate) use origin::{AllowedOrigins, check_origin};
pub(crate) use request::AppState;

/// Routes that are label values of the response counter.
const ROUTES: [&str; 6] =
    ["/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/ready", "/metrics"];

/// All HTTP routes. The paths of gRPC services contain a package name, so they do not collide.
pub(crate) fn routes(app: AppState) -> Router {
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

/// Reports that this process runs. Says nothing about workers.
async fn health() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

/// Reports whether the registry has workers, and which processes fail.
async fn ready(State(app): State<AppState>) -> Result<Json<Value>, ApiError> {
    let models = app.generator.registry.snapshot();
    let workers: usize = models.iter().map(|snapshot| snapshot.workers.len()).sum();
    let failed = app.fleet.failed();
    match (app.generator.registry.has_workers(), failed.is_empty()) {
        (true, _) => Ok(Json(json!({"status": "ready", "workers": workers, "failed": failed}))),
        (false, true) => Err(ApiError::not_ready("no worker is ready yet")),
        (false, false) => {
            let failed = failed.join(", ");
            let text =
                format!("no worker is ready; crashing again and again: {failed}; `ballast ps` says why");
            Err(ApiError::not_ready(text))
        }
    }
}

async fn models(State(app): State<AppState>, access: ModelAccess) -> Json<Value> {
    let models = app.generator.registry.snapshot_for(&access);
    let entries = |snapshot: &ModelSnapshot| {
        access.names_of(&snapshot.model).map(|name| model_entry(snapshot, name)).collect::<Vec<_>>()
    };
    let data: Vec<Value> = models.iter().flat_map(entries).collect();
    Json(json!({"object": "list", "data": data}))
}

async fn model(
    State(app): State<AppState>,
    access: ModelAccess,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let models = app.generator.registry.snapshot_for(&access);
    let names = |snapshot: &ModelSnapshot| {
        access.names_of(&snapshot.model).map(str::to_owned).collect::<Vec<String>>()
    };
    match models.iter().find(|snapshot| names(snapshot).contains(&name)) {
        Some(snapshot) => Ok(Json(model_entry(snapshot, &name))),
        None => {
            let known = models.iter().flat_map(names).collect();
            Err(ResolveError::unknown(&name, known).into())
        }
    }
}

/// `id` is the model's name, or an alias.
fn model_entry(snapshot: &ModelSnapshot, id: &str) -> Value {
    let model = &snapshot.model;
    json!({
        "id": id,
        "object": "model",
        "created": model.loaded_unix_seconds,
        "owned_by": "ballast",
        "root": model.name(),
        "parent": null,
        "max_model_len": model.description.context_tokens,
        "digest": model.digest_hex(),
        "workers": snapshot.workers.len(),
    })
}

async fn scrape(State(app): State<AppState>) -> Response {
    let mut text = app.metrics.render();
    let processes = app.fleet.processes();
    text.push_str(&gauges::render(&app.generator.registry, &app.generator.admission, &processes));
    text.push_str(&gauges::render_intake(
        app.budget.used(),
        app.generator.dispatcher.quarantine.quarantined(),
    ));
    ([(header::CONTENT_TYPE, service::metrics::CONTENT_TYPE)], text).into_response()
}

async fn unknown_route(method: Method, uri: Uri) -> ApiError {
    ApiError::unknown_route(method.as_str(), uri.path())
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    ApiError::wrong_method(method.as_str(), uri.path())
}
