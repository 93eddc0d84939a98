// SPDX-License-Identifier: Apache-2.0

//! `POST /v1/embeddings`: one vector for each input.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::error::ApiError;
use super::fields::parse_pooled;
use super::prompt_field::{GivenPrompt, PromptField};
use super::request::{AppState, ReceivedBody, RequestMetadata, run_tokenizer};
use crate::embedding::{
    EMBEDDED_VALUES_MAX, EmbedError, InputName, PooledUse, finish_embedding, truncate_input,
};
use crate::generate::{EMBEDDING_INPUTS_MAX, GenerationRequest, TokenizedPrompts};
use crate::model::ServedModel;
use crate::params::{RequestParamError, RequestParams};

const FIELDS: [&str; 8] = [
    "model",
    "input",
    "encoding_format",
    "dimensions",
    "truncate_prompt_tokens",
    "add_special_tokens",
    "normalize",
    "embd_normalize",
];

#[derive(Debug, Deserialize)]
struct EmbeddingFields {
    model: Option<String>,
    input: PromptField,
    #[serde(default)]
    encoding_format: EncodingFormat,
    dimensions: Option<i64>,
    truncate_prompt_tokens: Option<i64>,
    add_special_tokens: Option<bool>,
    /// vLLM's switch.
    normalize: Option<bool>,
    /// llama.cpp's norms: -1 none, 2 Euclidean.
    embd_normalize: Option<i64>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum EncodingFormat {
    #[default]
    Float,
    /// Little-endian f32.
    Base64,
}

#[derive(Serialize)]
struct EmbeddingEntry {
    object: &'static str,
    index: usize,
    embedding: EncodedVector,
}

#[derive(Serialize)]
#[serde(untagged)]
enum EncodedVector {
    Float(Vec<f32>),
    Base64(String),
}

#[derive(Serialize)]
struct EmbeddingReply<'a> {
    id: String,
    object: &'static str,
    created: i64,
    model: &'a str,
    data: Vec<EmbeddingEntry>,
    usage: Value,
}

pub(super) async fn post(
    State(app): State<AppState>,
    metadata: RequestMetadata,
    body: ReceivedBody,
) -> Result<Response, ApiError> {
    let (fields, scheduling, ignored) =
        parse_pooled::<EmbeddingFields>(&body.bytes, &FIELDS, app.unknown_fields)?;
    let model = app.generator.registry.resolve(fields.model.as_deref(), &metadata.models)?;
    app.generator.check_pooled(&model, PooledUse::Embeddings, &metadata.models)?;
    let params = scheduling.apply_to(RequestParams::default())?;
    let dimensions = fields.dimensions(&model)?;
    let normalize = fields.normalize()?;
    let format = fields.encoding_format;
    let limit = token_limit(fields.truncate_prompt_tokens, &model, app.generator.input_tokens_max(&model))?;
    let tokenizing_model = model.clone();
    let tokens = run_tokenizer(body.bytes.len(), move || fields.tokenize(&tokenizing_model, limit)).await?;
    drop(body);
    metadata.origin.keep_bytes(&tokens, &params);
    let width = dimensions.unwrap_or(model.description.embedding_length) as usize;
    let values = check_values(tokens.len(), width)?;
    let prompts = TokenizedPrompts { param: "input", tokens, at_text_start: false };
    let request = GenerationRequest::pooled(model.clone(), prompts, params, metadata.origin.clone())?;
    let pooled =
        app.generator.embed(&request, |index| InputName { field: "input", index: Some(index) }).await?;
    let _writing = app.reserve_json(values * size_of::<f32>()).await;
    let entries = pooled.vectors.into_iter().enumerate().map(|(index, values)| EmbeddingEntry {
        object: "embedding",
        index,
        embedding: format.encode(finish_embedding(values, dimensions, normalize)),
    });
    let reply = EmbeddingReply {
        id: format!("embd-{}", metadata.origin.trace.id()),
        object: "list",
        created: metadata.created_unix_seconds,
        model: model.name(),
        data: entries.collect(),
        usage: usage(pooled.prompt_tokens),
    };
    Ok(ignored.name_in(Json(reply).into_response()))
}

/// Does with a body what [`post`] does before it calls a worker.
#[cfg(feature = "fuzzing")]
pub(super) fn check_embedding(
    model: &std::sync::Arc<ServedModel>,
    metadata: &RequestMetadata,
    body: &[u8],
) -> Result<(), ApiError> {
    let unknown = super::fields::UnknownFields::Ignore;
    let (fields, scheduling, _) = parse_pooled::<EmbeddingFields>(body, &FIELDS, unknown)?;
    let params = scheduling.apply_to(RequestParams::default())?;
    fields.dimensions(model)?;
    fields.normalize()?;
    let limit = token_limit(fields.truncate_prompt_tokens, model, model.description.context_tokens)?;
    let prompts =
        TokenizedPrompts { param: "input", tokens: fields.tokenize(model, limit)?, at_text_start: false };
    GenerationRequest::pooled(model.clone(), prompts, params, metadata.origin.clone())?;
    Ok(())
}

pub(super) fn usage(prompt_tokens: usize) -> Value {
    json!({"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens})
}

/// The most tokens of an input, if longer ones are to be cut. -1: as many as model and workers can
/// hold, which are `most`.
pub(super) fn token_limit(
    asked: Option<i64>,
    model: &ServedModel,
    most: u32,
) -> Result<Option<usize>, RequestParamError> {
    let context = model.description.context_tokens;
    match asked {
        None => Ok(None),
        Some(-1) => Ok(Some(most as usize)),
        Some(kept) if (1..=i64::from(context)).contains(&kept) => Ok(Some(kept as usize)),
        Some(kept) => Err(RequestParamError::OutOfRange {
            param: "truncate_prompt_tokens",
            value: kept.to_string(),
            allowed: format!("-1 and 1 to {context}"),
        }),
    }
}

/// The number of values in a reply of `inputs` vectors.
fn check_values(inputs: usize, width: usize) -> Result<usize, ApiError> {
    let values = inputs.saturating_mul(width);
    if values > EMBEDDED_VALUES_MAX {
        let message = format!(
            "{inputs} inputs have {values} values, allowed are {EMBEDDED_VALUES_MAX}; send fewer inputs \
             or ask for fewer `dimensions`"
        );
        return Err(ApiError::invalid(Some("input"), message));
    }
    Ok(values)
}

impl From<EmbedError> for ApiError {
    fn from(error: EmbedError) -> Self {
        let message = error.to_string();
        match error {
            EmbedError::Refused(refusal) => refusal.into(),
            EmbedError::KvCacheExceeded { input, .. } => Self::invalid(Some(input.field), message)
                .with_status(StatusCode::BAD_REQUEST, "kv_budget_exceeded"),
        }
    }
}

impl EncodingFormat {
    fn encode(self, values: Vec<f32>) -> EncodedVector {
        match self {
            Self::Float => EncodedVector::Float(values),
            Self::Base64 => {
                let bytes: Vec<u8> = values.into_iter().flat_map(f32::to_le_bytes).collect();
                EncodedVector::Base64(STANDARD.encode(bytes))
            }
        }
    }
}

impl EmbeddingFields {
    /// Files do not say for which lengths a model was trained, so every shorter one is allowed.
    fn dimensions(&self, model: &ServedModel) -> Result<Option<u32>, RequestParamError> {
        let most = model.description.embedding_length;
        let Some(asked) = self.dimensions else { return Ok(None) };
        match u32::try_from(asked).ok().filter(|asked| (1..=most).contains(asked)) {
            Some(asked) => Ok(Some(asked)),
            None => Err(RequestParamError::OutOfRange {
                param: "dimensions",
                value: asked.to_string(),
                allowed: format!("1 to {most}"),
            }),
        }
    }

    fn normalize(&self) -> Result<bool, RequestParamError> {
        match self.embd_normalize {
            None | Some(2) => Ok(self.normalize.unwrap_or(true)),
            Some(-1) => Ok(false),
            Some(other) => Err(RequestParamError::OutOfRange {
                param: "embd_normalize",
                value: other.to_string(),
                allowed: "-1 (none) and 2 (Euclidean)".to_owned(),
            }),
        }
    }

    /// Token ids of each input.
    fn tokenize(self, model: &ServedModel, limit: Option<usize>) -> Result<Vec<Vec<u32>>, ApiError> {
        let add_special = self.add_special_tokens.unwrap_or(true);
        let given = self.input.prompts("input", EMBEDDING_INPUTS_MAX, model.limits())?;
        let encode = |input: GivenPrompt| {
            let mut tokens = match input {
                GivenPrompt::Text(text) => {
                    let encoded = model.text.encode(&text, add_special);
                    encoded.map_err(|error| ApiError::invalid(Some("input"), error.to_string()))?
                }
                GivenPrompt::Tokens(ids) => ids,
            };
            if let Some(limit) = limit {
                truncate_input(model, &mut tokens, limit);
            }
            Ok(tokens)
        };
        given.into_iter().map(encode).collect()
    }
}
