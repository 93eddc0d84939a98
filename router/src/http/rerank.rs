// SPDX-License-Identifier: Apache-2.0

//! `POST /v1/rerank` as Jina, Cohere and vLLM have it, and vLLM's `POST /score`: how well documents
//! answer a query.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use super::embeddings::{token_limit, usage};
use super::error::ApiError;
use super::fields::parse_pooled;
use super::request::{AppState, ReceivedBody, RequestMetadata, run_tokenizer};
use super::scheduling_fields::SchedulingFields;
use crate::embedding::PooledUse;
use crate::generate::{EMBEDDING_INPUTS_MAX, GenerationRequest, TokenizedPrompts};
use crate::model::{PairLimits, ServedModel};
use crate::params::{RequestParamError, RequestParams};
use crate::relevance::{PairError, PairFields, TextPairs, ranking};

/// Documents of a request. With its query they are inputs of one request.
const DOCUMENTS_MAX: usize = EMBEDDING_INPUTS_MAX - 1;
const RERANK_FIELDS: [&str; 7] = [
    "model",
    "query",
    "documents",
    "top_n",
    "return_documents",
    "truncate_prompt_tokens",
    "max_tokens_per_doc",
];
const SCORE_FIELDS: [&str; 4] = ["model", "text_1", "text_2", "truncate_prompt_tokens"];

#[derive(Debug, Deserialize)]
struct RerankFields {
    model: Option<String>,
    query: String,
    documents: Vec<Document>,
    top_n: Option<i64>,
    return_documents: Option<bool>,
    truncate_prompt_tokens: Option<i64>,
    /// Cohere's limit of each document.
    max_tokens_per_doc: Option<i64>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string, or an object with the field `text`")]
enum Document {
    Text(String),
    Object { text: String },
}

#[derive(Debug, Deserialize)]
struct ScoreFields {
    model: Option<String>,
    text_1: Texts,
    text_2: Texts,
    truncate_prompt_tokens: Option<i64>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or an array of strings")]
enum Texts {
    One(String),
    Many(Vec<String>),
}

impl Texts {
    fn into_vec(self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text],
            Self::Many(texts) => texts,
        }
    }
}

/// Pairs of texts whose scores a request asks for.
struct PairRequest {
    model: Option<String>,
    pairs: TextPairs,
    truncate: Option<i64>,
    document_tokens: Option<i64>,
    scheduling: SchedulingFields,
}

/// The scores of the pairs, with their texts.
struct PairScores {
    model: Arc<ServedModel>,
    pairs: TextPairs,
    scores: Vec<f64>,
    prompt_tokens: usize,
}

pub(super) async fn rerank(
    State(app): State<AppState>,
    metadata: RequestMetadata,
    body: ReceivedBody,
) -> Result<Response, ApiError> {
    let (fields, scheduling, ignored) =
        parse_pooled::<RerankFields>(&body.bytes, &RERANK_FIELDS, app.unknown_fields)?;
    let with_documents = fields.return_documents.unwrap_or(true);
    let top = match fields.top_n {
        // As in vLLM, 0 means all.
        None | Some(0) => usize::MAX,
        Some(top) => usize::try_from(top).map_err(|_| RequestParamError::OutOfRange {
            param: "top_n",
            value: top.to_string(),
            allowed: "0 (all) and above".to_owned(),
        })?,
    };
    let text = |document| match document {
        Document::Text(text) | Document::Object { text } => text,
    };
    let documents = fields.documents.into_iter().map(text).collect();
    let names = PairFields { query: "query", documents: "documents" };
    let request = PairRequest {
        model: fields.model,
        pairs: TextPairs { queries: vec![fields.query], documents, fields: names },
        truncate: fields.truncate_prompt_tokens,
        document_tokens: fields.max_tokens_per_doc,
        scheduling,
    };
    let scored = score_pairs(&app, &metadata, body, request).await?;
    let result = |index: usize| {
        let mut result = json!({"index": index, "relevance_score": scored.scores[index]});
        if with_documents {
            result["document"] = json!({"text": scored.pairs.documents[index]});
        }
        result
    };
    let results: Vec<Value> = ranking(&scored.scores, top).into_iter().map(result).collect();
    let reply = json!({
        "id": format!("rerank-{}", metadata.origin.trace.id()),
        "object": "list",
        "model": scored.model.name(),
        "results": results,
        "usage": usage(scored.prompt_tokens),
    });
    Ok(ignored.name_in(Json(reply).into_response()))
}

pub(super) async fn score(
    State(app): State<AppState>,
    metadata: RequestMetadata,
    body: ReceivedBody,
) -> Result<Response, ApiError> {
    let (fields, scheduling, ignored) =
        parse_pooled::<ScoreFields>(&body.bytes, &SCORE_FIELDS, app.unknown_fields)?;
    let (queries, documents) = (fields.text_1.into_vec(), fields.text_2.into_vec());
    if queries.len() != 1 && queries.len() != documents.len() {
        let (first, second) = (queries.len(), documents.len());
        let message = format!(
            "`text_1` has {first} texts and `text_2` has {second}: expected one, or as many as `text_2`"
        );
        return Err(ApiError::invalid(Some("text_1"), message));
    }
    let names = PairFields { query: "text_1", documents: "text_2" };
    let request = PairRequest {
        model: fields.model,
        pairs: TextPairs { queries, documents, fields: names },
        truncate: fields.truncate_prompt_tokens,
        document_tokens: None,
        scheduling,
    };
    let scored = score_pairs(&app, &metadata, body, request).await?;
    let entry = |(index, score): (usize, &f64)| json!({"index": index, "object": "score", "score": score});
    let reply = json!({
        "id": format!("score-{}", metadata.origin.trace.id()),
        "object": "list",
        "created": metadata.created_unix_seconds,
        "model": scored.model.name(),
        "data": scored.scores.iter().enumerate().map(entry).collect::<Vec<_>>(),
        "usage": usage(scored.prompt_tokens),
    });
    Ok(ignored.name_in(Json(reply).into_response()))
}

async fn score_pairs(
    app: &AppState,
    metadata: &RequestMetadata,
    body: ReceivedBody,
    request: PairRequest,
) -> Result<PairScores, ApiError> {
    let PairRequest { model, pairs, truncate, document_tokens, scheduling } = request;
    let model = app.generator.registry.resolve(model.as_deref(), &metadata.models)?;
    app.generator.check_pooled(&model, PooledUse::Relevance, &metadata.models)?;
    check_counts(&model, &pairs)?;
    let params = scheduling.apply_to(RequestParams::default())?;
    let most = app.generator.input_tokens_max(&model);
    let limits = PairLimits {
        prompt: token_limit(truncate, &model, most)?,
        document: document_limit(document_tokens, most)?,
    };
    let bytes = pairs.prompt_bytes(&model)?;
    let tokenizing_model = model.clone();
    let tokenized = run_tokenizer(bytes, move || {
        let tokens = pairs.tokenize(&tokenizing_model, limits, most)?;
        Ok::<_, PairError>((tokens, pairs))
    });
    let (tokens, pairs) = tokenized.await?;
    drop(body);
    metadata.origin.keep_bytes(&tokens, &params);
    let prompts = TokenizedPrompts { param: pairs.fields.documents, tokens, at_text_start: false };
    let request = GenerationRequest::pooled(model.clone(), prompts, params, metadata.origin.clone())?;
    let pooling = model.description.pooling;
    let pooled = app.generator.embed(&request, |index| pairs.name_of(pooling, index)).await?;
    let scores = pairs.scores(pooling, &pooled.vectors);
    Ok(PairScores { model, pairs, scores, prompt_tokens: pooled.prompt_tokens })
}

fn check_counts(model: &ServedModel, pairs: &TextPairs) -> Result<(), ApiError> {
    let PairFields { query, documents: param } = pairs.fields;
    let (count, max) = (pairs.documents.len(), DOCUMENTS_MAX);
    if count > max {
        return Err(RequestParamError::TooManyEntries { param, count, max }.into());
    }
    if count == 0 {
        return Err(RequestParamError::EmptyPrompt { param }.into());
    }
    let (texts, max) = (pairs.prompt_count(model.description.pooling), EMBEDDING_INPUTS_MAX);
    if texts > max {
        let message = format!(
            "`{query}` and `{param}` have {texts} texts together, allowed are at most {max}: this model \
             computes an embedding of each"
        );
        return Err(ApiError::invalid(Some(param), message));
    }
    Ok(())
}

/// Cohere's clients send a limit that fits Cohere's models: a larger one than `most` means `most`,
/// and so does -1.
fn document_limit(asked: Option<i64>, most: u32) -> Result<Option<usize>, RequestParamError> {
    match asked {
        None => Ok(None),
        Some(-1) => Ok(Some(most as usize)),
        Some(asked @ 1..) => Ok(Some(usize::try_from(asked).unwrap_or(usize::MAX).min(most as usize))),
        Some(asked) => Err(RequestParamError::OutOfRange {
            param: "max_tokens_per_doc",
            value: asked.to_string(),
            allowed: "-1 and 1 and above".to_owned(),
        }),
    }
}

impl From<PairError> for ApiError {
    fn from(error: PairError) -> Self {
        let api = Self::invalid(Some(error.param()), error.to_string());
        match error.is_context_exceeded() {
            true => api.with_status(StatusCode::BAD_REQUEST, "context_length_exceeded"),
            false => api,
        }
    }
}
