// SPDX-License-Identifier: Apache-2.0

//! What the server is: `/`, `/version` and `/server_info`.

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use super::ROUTES;
use super::fields::UnknownFields;
use super::models::{one_for_each_content, pooling_name};
use super::request::AppState;
use crate::access::ModelAccess;
use crate::generate::EMBEDDING_INPUTS_MAX;
use crate::params::{N_MAX, STOP_STRINGS_MAX, TOP_LOGPROBS_MAX};
use crate::sampling_defaults;

const VERSION: &str = env!("CARGO_PKG_VERSION");

pub(super) async fn root() -> Json<Value> {
    Json(json!({"name": "ballast", "version": VERSION, "routes": ROUTES}))
}

pub(super) async fn version() -> Json<Value> {
    Json(json!({"version": VERSION}))
}

/// The served models and the limits of requests.
pub(super) async fn server_info(State(app): State<AppState>, access: ModelAccess) -> Json<Value> {
    let models: Vec<Value> = one_for_each_content(app.generator.registry.snapshot_for(&access))
        .iter()
        .map(|snapshot| {
            let model = &snapshot.model;
            json!({
                "id": model.name(),
                "digest": model.digest_hex(),
                "max_model_len": model.description.context_tokens,
                "vocabulary": model.description.vocabulary,
                "weight_bytes": model.description.weight_bytes,
                "sampling_defaults": sampling_defaults::to_json(&model.description.sampling_defaults),
                "pooling": pooling_name(model.description.pooling),
                "embedding_length": model.description.embedding_length,
                "workers": snapshot.workers.len(),
                "has_tokenizer": model.text.tokenizer().is_ok(),
                "has_chat_template": model.text.syntax(false).is_some(),
            })
        })
        .collect();
    Json(json!({
        "version": VERSION,
        "models": models,
        "limits": {
            "n": N_MAX,
            "embedding_inputs": EMBEDDING_INPUTS_MAX,
            "stop": STOP_STRINGS_MAX,
            "top_logprobs": TOP_LOGPROBS_MAX,
            "request_timeout_ms": app.generator.request_timeout.as_millis() as u64,
            "strict_requests": app.unknown_fields == UnknownFields::Refuse,
        },
    }))
}
