// SPDX-License-Identifier: Apache-2.0

//! `/v1/models`: the models that the caller may use, with those that are idle.

use axum::Json;
use axum::extract::{Path, State};
use proto::v1::Pooling;
use serde_json::{Value, json};

use super::AppState;
use super::error::ApiError;
use crate::access::ModelAccess;
use crate::registry::{ModelSnapshot, ResolveError};
use crate::sampling_defaults;

/// Those with workers first.
pub(super) async fn models(State(app): State<AppState>, access: ModelAccess) -> Json<Value> {
    Json(json!({"object": "list", "data": entries(&app, &access)}))
}

pub(super) async fn model(
    State(app): State<AppState>,
    access: ModelAccess,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let entries = entries(&app, &access);
    match entries.iter().find(|entry| entry["id"] == name.as_str()) {
        Some(entry) => Ok(Json(entry.clone())),
        None => {
            let known = entries.iter().filter_map(|entry| entry["id"].as_str().map(str::to_owned)).collect();
            Err(ResolveError::unknown(&name, known).into())
        }
    }
}

/// One entry for each name.
fn entries(app: &AppState, access: &ModelAccess) -> Vec<Value> {
    let models = one_for_each_content(app.generator.registry.snapshot_for(access));
    let heard = |snapshot: &ModelSnapshot| {
        access.names_of(&snapshot.model).map(|name| model_entry(snapshot, name)).collect::<Vec<_>>()
    };
    let unheard = app.generator.registry.unheard_idle_models(access).into_iter().flat_map(|model| {
        model.names.iter().map(|name| unheard_entry(name, &model.name)).collect::<Vec<_>>()
    });
    models.iter().flat_map(heard).chain(unheard).collect()
}

/// An idle model of which this router knows no more than its name.
fn unheard_entry(id: &str, root: &str) -> Value {
    json!({
        "id": id,
        "object": "model",
        "created": 0,
        "owned_by": "ballast",
        "root": root,
        "parent": null,
        "max_model_len": null,
        "digest": null,
        "sampling_defaults": {},
        "pooling": null,
        "embedding_length": null,
        "workers": 0,
    })
}

/// How the model makes embeddings (`mean`, `last`), or that it scores pairs of texts (`rank`).
pub(super) fn pooling_name(pooling: Pooling) -> Option<&'static str> {
    match pooling {
        Pooling::Unspecified => None,
        Pooling::Mean => Some("mean"),
        Pooling::Last => Some("last"),
        Pooling::Rank => Some("rank"),
    }
}

/// Joins the workers of one content under one name, which devices may compute differently.
pub(super) fn one_for_each_content(models: Vec<ModelSnapshot>) -> Vec<ModelSnapshot> {
    let mut joined: Vec<ModelSnapshot> = Vec::with_capacity(models.len());
    for snapshot in models {
        let content = |snapshot: &ModelSnapshot| {
            (snapshot.model.name().to_owned(), snapshot.model.description.digest.clone())
        };
        match joined.iter_mut().find(|other| content(other) == content(&snapshot)) {
            Some(other) => other.workers.extend(snapshot.workers),
            None => joined.push(snapshot),
        }
    }
    joined
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
        "sampling_defaults": sampling_defaults::to_json(&model.description.sampling_defaults),
        "pooling": pooling_name(model.description.pooling),
        "embedding_length": model.description.embedding_length,
        "workers": snapshot.workers.len(),
    })
}
