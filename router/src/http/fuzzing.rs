// SPDX-License-Identifier: Apache-2.0

//! Reads a body as each endpoint does, as far as it can be read without workers. Behind the feature
//! `fuzzing`.

use std::sync::Arc;

use axum::response::IntoResponse;

use super::chat::{fuzzing::check_chat, parse_chat};
use super::completions::fuzzing::check_completion;
use super::embeddings::check_embedding;
use super::error::ApiError;
use super::fields::{UnknownFields, parse_object};
use super::request::RequestMetadata;
use super::response_writer::ResponseEcho;
use super::{messages_input, responses_input};
use crate::access::ModelAccess;
use crate::generate::RequestOrigin;
use crate::model::ServedModel;

pub(crate) fn read_body(model: &Arc<ServedModel>, origin: &RequestOrigin, body: &[u8]) {
    let metadata = RequestMetadata {
        origin: origin.clone(),
        models: ModelAccess::default(),
        created_unix_seconds: 1_719_979_509,
    };
    let chat = |fields| check_chat(model, &metadata, parse_chat(fields, UnknownFields::Ignore)?);
    let response = |fields| {
        let _echo = ResponseEcho::new(&fields, &metadata);
        let translation = responses_input::translate(fields, Vec::new())?;
        chat(translation.chat).map_err(ApiError::of_responses)
    };
    let message = |fields| chat(messages_input::translate(fields)?).map_err(ApiError::of_messages);
    let results = [
        check_completion(model, &metadata, body),
        check_embedding(model, &metadata, body),
        parse_object(body).and_then(chat),
        parse_object(body).and_then(response),
        parse_object(body).and_then(message),
    ];
    for refusal in results.into_iter().filter_map(Result::err) {
        let texts = [refusal.body(), refusal.messages_body()];
        let has_text =
            |body: &serde_json::Value| body["error"]["message"].as_str().is_some_and(|text| !text.is_empty());
        assert!(texts.iter().all(has_text), "{refusal:?}");
        let status = refusal.into_response().status();
        assert!(status.is_client_error(), "{status}");
    }
}
