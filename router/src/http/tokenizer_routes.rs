// SPDX-License-Identifier: Apache-2.0

//! vLLM's `/tokenize`, of a text or of a chat, `/detokenize` and `/tokenizer_info`.

use axum::Json;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::chat::{parse_chat, tokenize_chat};
use super::error::ApiError;
use super::fields::{deserialize, parse_object};
use super::request::{AppState, ReceivedBody, RequestMetadata, run_tokenizer};
use crate::access::ModelAccess;
use crate::params::token_ids;

#[derive(Debug, Deserialize)]
struct TokenizeFields {
    model: Option<String>,
    prompt: String,
    add_special_tokens: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct DetokenizeFields {
    model: Option<String>,
    tokens: Vec<i64>,
}

/// vLLM knows no parameter, because it serves one model.
#[derive(Debug, Deserialize)]
pub(super) struct TokenizerQuery {
    model: Option<String>,
}

/// Takes out a switch that is no field of a chat.
fn take_switch(fields: &mut Map<String, Value>, name: &str) -> Result<bool, ApiError> {
    match fields.remove(name) {
        None => Ok(false),
        Some(Value::Bool(is_on)) => Ok(is_on),
        Some(_) => Err(ApiError::invalid(Some(name), format!("`{name}` is neither true nor false"))),
    }
}

pub(super) async fn tokenize(
    State(app): State<AppState>,
    metadata: RequestMetadata,
    body: ReceivedBody,
) -> Result<Response, ApiError> {
    let mut fields = parse_object(&body.bytes)?;
    let with_texts = take_switch(&mut fields, "return_token_strs")?;
    let (model, tokens) = match fields.contains_key("messages") {
        true => {
            let parsed = parse_chat(fields, app.unknown_fields)?;
            let (chat, _) = tokenize_chat(&app, parsed, &metadata, body).await?;
            chat.into_prompt()
        }
        false => {
            let fields: TokenizeFields = deserialize(&Value::Object(fields))?;
            let model = app.generator.registry.resolve(fields.model.as_deref(), &metadata.models)?;
            let add_special = fields.add_special_tokens.unwrap_or(true);
            let text = model.text.clone();
            let tokens = run_tokenizer(body.bytes.len(), move || {
                let invalid = |error: crate::model::EncodeTextError| {
                    ApiError::invalid(Some("prompt"), error.to_string())
                };
                text.encode(&fields.prompt, add_special).map_err(invalid)
            });
            (model.clone(), tokens.await?)
        }
    };
    let texts: Option<Vec<String>> =
        with_texts.then(|| tokens.iter().map(|&id| model.text.token_text(id)).collect());
    Ok(Json(json!({
        "count": tokens.len(),
        "max_model_len": model.description.context_tokens,
        "tokens": tokens,
        "token_strs": texts,
    }))
    .into_response())
}

pub(super) async fn detokenize(
    State(app): State<AppState>,
    metadata: RequestMetadata,
    body: ReceivedBody,
) -> Result<Json<Value>, ApiError> {
    let fields: DetokenizeFields = deserialize(&Value::Object(parse_object(&body.bytes)?))?;
    let model = app.generator.registry.resolve(fields.model.as_deref(), &metadata.models)?;
    let tokens = token_ids("tokens", &fields.tokens, model.limits())?;
    let decoded = run_tokenizer(body.bytes.len(), move || {
        model.text.decode(&tokens).map_err(|error| ApiError::invalid(Some("tokens"), error.to_string()))
    });
    Ok(Json(json!({"prompt": decoded.await?})))
}

/// What clients that count tokens themselves ask first: names as in `tokenizer_config.json`.
pub(super) async fn tokenizer_info(
    State(app): State<AppState>,
    access: ModelAccess,
    Query(query): Query<TokenizerQuery>,
) -> Result<Json<Value>, ApiError> {
    let model = app.generator.registry.resolve(query.model.as_deref(), &access)?;
    let tokenizer = model.text.tokenizer().map_err(|error| ApiError::invalid(None, error.to_string()))?;
    let name = |id: Option<u32>| id.map(|id| model.text.token_text(id));
    Ok(Json(json!({
        "tokenizer_class": "gguf",
        "model_max_length": model.description.context_tokens,
        "vocab_size": tokenizer.len(),
        "bos_token": name(tokenizer.bos()),
        "eos_token": name(tokenizer.eos()),
        "pad_token": null,
        "chat_template": model.text.template_source(),
    })))
}
