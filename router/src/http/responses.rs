// SPDX-License-Identifier: Apache-2.0

//! OpenAI's responses API: translates a request to the fields of a chat, and keeps the conversation
//! for `previous_response_id`.

use axum::Json;
use axum::extract::{Path, State};
use axum::response::Response;
use serde_json::{Value, json};

use super::chat::{parse_chat, tokenize_chat};
use super::error::ApiError;
use super::fields::parse_object;
use super::reply_stream::RunningReply;
use super::request::{AppState, ReceivedBody, RequestMetadata};
use super::response_writer::{ResponseEcho, ResponseWriter};
use super::responses_input::{Translation, translate};
use crate::response_store::StoredResponse;

pub(super) async fn post(
    State(app): State<AppState>,
    metadata: RequestMetadata,
    body: ReceivedBody,
) -> Result<Response, ApiError> {
    let fields = parse_object(&body.bytes)?;
    let stream = fields.get("stream") == Some(&Value::Bool(true));
    let previous = match fields.get("previous_response_id").and_then(Value::as_str) {
        None => Vec::new(),
        Some(id) => previous_messages(&app, &metadata, id)?,
    };
    let echo = ResponseEcho::new(&fields, &metadata);
    let is_stored = fields.get("store") != Some(&Value::Bool(false));
    let Translation { chat, messages } = translate(fields, previous)?;
    let parsed = parse_chat(chat, app.unknown_fields).map_err(ApiError::of_responses)?;
    let (chat, ignored) =
        tokenize_chat(&app, parsed, &metadata, body).await.map_err(ApiError::of_responses)?;
    let tenant = metadata.origin.tenant.clone();
    let started = chat.start(&app, metadata, stream).await.map_err(ApiError::of_responses)?;
    let echo = echo.with_model(&started.request.model);
    let store = is_stored.then(|| app.responses.clone());
    let writer = ResponseWriter::new(echo, tenant, messages, store);
    Ok(ignored.name_in(RunningReply::new(started, writer).respond(stream).await?))
}

fn previous_messages(app: &AppState, metadata: &RequestMetadata, id: &str) -> Result<Vec<Value>, ApiError> {
    let stored = app.responses.get(id, &metadata.origin.tenant);
    let messages = stored.and_then(|stored| serde_json::from_slice(&stored.messages).ok());
    messages.ok_or_else(|| ApiError::unknown_response("previous_response_id", id))
}

/// `GET /v1/responses/{id}`
pub(super) async fn get(
    State(app): State<AppState>,
    metadata: RequestMetadata,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let stored: Option<StoredResponse> = app.responses.get(&id, &metadata.origin.tenant);
    let body = stored.and_then(|stored| serde_json::from_slice(&stored.body).ok());
    body.map(Json).ok_or_else(|| ApiError::unknown_response("response_id", &id))
}

/// `DELETE /v1/responses/{id}`
pub(super) async fn delete(
    State(app): State<AppState>,
    metadata: RequestMetadata,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    match app.responses.remove(&id, &metadata.origin.tenant) {
        true => Ok(Json(json!({"id": id, "object": "response", "deleted": true}))),
        false => Err(ApiError::unknown_response("response_id", &id)),
    }
}
