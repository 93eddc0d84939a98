// SPDX-License-Identifier: Apache-2.0

//! `POST /v1/rerank` as Jina, Cohere and vLLM have it, and vLLM's `POST /score`: how well documents
//! answer a query.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
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
use crate::model::ServedModel;
use crate::params::{RequestParamError, RequestParams};
use crate::relevance::{TextPairs, ranking};

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
    /// Cohere's name for the same.
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
    /// The field that holds the documents.
    param: &'static str,
    truncate: Option<i64>,
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
    let pairs = TextPairs { queries: vec![fields.query], documents };
    let truncate = fields.truncate_prompt_tokens.or(fields.max_tokens_per_doc);
    let request = PairRequest { model: fields.model, pairs, param: "documents", truncate, scheduling };
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
    let pairs = TextPairs { queries, documents };
    let truncate = fields.truncate_prompt_tokens;
    let request = PairRequest { model: fields.model, pairs, param: "text_2", truncate, scheduling };
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
    let PairRequest { model, pairs, param, truncate, scheduling } = request;
    let model = app.generator.registry.resolve(model.as_deref(), &metadata.models)?;
    app.generator.check_pooled(&model, PooledUse::Relevance, &metadata.models)?;
    let (count, max) = (pairs.documents.len(), DOCUMENTS_MAX);
    if count > max {
        return Err(RequestParamError::TooManyEntries { param, count, max }.into());
    }
    if count == 0 {
        return Err(RequestParamError::EmptyPrompt { param }.into());
    }
    let params = scheduling.apply_to(RequestParams::default())?;
    let limit = token_limit(truncate, &model)?;
    let tokenizing_model = model.clone();
    let tokenized = run_tokenizer(body.bytes.len(), move || {
        let tokens = pairs.tokenize(&tokenizing_model, limit);
        let tokens = tokens.map_err(|error| ApiError::invalid(Some(param), error.to_string()))?;
        Ok::<_, ApiError>((tokens, pairs))
    });
    let (tokens, pairs) = tokenized.await?;
    drop(body);
    metadata.origin.keep_bytes(&tokens, &params);
    let prompts = TokenizedPrompts { param, tokens, at_text_start: false };
    let request = GenerationRequest::pooled(model.clone(), prompts, params, metadata.origin.clone())?;
    let pooled = app.generator.embed(&request).await?;
    let scores = pairs.scores(model.description.pooling, &pooled.vectors);
    Ok(PairScores { model, pairs, scores, prompt_tokens: pooled.prompt_tokens })
}
