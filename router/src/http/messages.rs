// SPDX-License-Identifier: Apache-2.0

//! Anthropic's messages API: translates a request to the fields of a chat.

use axum::Json;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::chat::{Chat, parse_chat, tokenize_chat};
use super::error::ApiError;
use super::fields::{IgnoredFields, parse_object};
use super::message_writer::MessageWriter;
use super::messages_input::translate;
use super::reply_stream::RunningReply;
use super::request::{AppState, ReceivedBody, RequestMetadata};
use crate::request_id::ClientRequestId;

const PATH: &str = "/v1/messages";

pub(super) async fn post(
    State(app): State<AppState>,
    metadata: RequestMetadata,
    body: ReceivedBody,
) -> Result<Response, ApiError> {
    let fields = parse_object(&body.bytes)?;
    let stream = fields.get("stream") == Some(&Value::Bool(true));
    if !fields.contains_key("max_tokens") {
        return Err(ApiError::invalid(Some("max_tokens"), "`max_tokens` is missing"));
    }
    let (chat, ignored) = tokenized(&app, fields, &metadata, body).await?;
    let started = chat.start(&app, metadata, stream).await.map_err(ApiError::of_messages)?;
    let id = format!("msg_{}", ClientRequestId::random().0);
    let prompt_tokens = started.request.prompts().map(<[u32]>::len).sum::<usize>() as u64;
    let writer = MessageWriter::new(id, started.request.model.name().to_owned(), prompt_tokens);
    Ok(ignored.name_in(RunningReply::new(started, writer).respond(stream).await?))
}

/// `POST /v1/messages/count_tokens`
pub(super) async fn count_tokens(
    State(app): State<AppState>,
    metadata: RequestMetadata,
    body: ReceivedBody,
) -> Result<Response, ApiError> {
    let (chat, ignored) = tokenized(&app, parse_object(&body.bytes)?, &metadata, body).await?;
    Ok(ignored.name_in(Json(json!({"input_tokens": chat.prompt_tokens()})).into_response()))
}

async fn tokenized(
    app: &AppState,
    fields: Map<String, Value>,
    metadata: &RequestMetadata,
    body: ReceivedBody,
) -> Result<(Chat, IgnoredFields), ApiError> {
    let parsed = parse_chat(translate(fields)?, app.unknown_fields).map_err(ApiError::of_messages)?;
    tokenize_chat(app, parsed, metadata, body).await.map_err(ApiError::of_messages)
}

/// Middleware around all routes: errors of this API have the form of Anthropic's, also those of
/// other middleware.
pub(crate) async fn shape_errors(request: Request, next: Next) -> Response {
    let is_own = request.uri().path().starts_with(PATH);
    let response = next.run(request).await;
    match response.extensions().get::<ApiError>().filter(|_| is_own).map(ApiError::messages_body) {
        None => response,
        Some(body) => {
            let (mut parts, _) = response.into_parts();
            let shaped = Json(body).into_response();
            parts.headers.remove(axum::http::header::CONTENT_LENGTH);
            Response::from_parts(parts, shaped.into_body())
        }
    }
}
