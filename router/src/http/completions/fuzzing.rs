// SPDX-License-Identifier: Apache-2.0

//! Does with a body what [`post`](super::post) does before it calls a worker. Behind the feature
//! `fuzzing`.

use std::sync::Arc;

use super::{CompletionFields, CompletionPrompts, FIELDS, completion_params, rename_top_logprobs};
use crate::fuzzing::check_calls;
use crate::generate::{GenerationRequest, TokenizedPrompts};
use crate::http::error::ApiError;
use crate::http::fields::{ParsedBody, UnknownFields, parse_body};
use crate::http::request::RequestMetadata;
use crate::model::ServedModel;

pub(in crate::http) fn check_completion(
    model: &Arc<ServedModel>,
    metadata: &RequestMetadata,
    body: &[u8],
) -> Result<(), ApiError> {
    let ParsedBody { endpoint, sampling, response, .. } =
        parse_body::<CompletionFields>(body, &FIELDS, UnknownFields::Ignore)?;
    let (params, _) = completion_params(sampling.params()?, &endpoint, response.options()?)?;
    let (add_special, echo) = (endpoint.add_special_tokens.unwrap_or(true), endpoint.echo.unwrap_or(false));
    let prompts = CompletionPrompts { field: endpoint.prompt, suffix: endpoint.suffix, add_special, echo };
    let (tokens, _) = prompts.tokenize(model)?;
    let prompts = TokenizedPrompts { param: "prompt", tokens, at_text_start: false };
    let request = GenerationRequest::new(model.clone(), prompts, params, metadata.origin.clone())
        .map_err(rename_top_logprobs)?;
    check_calls(&request);
    Ok(())
}
