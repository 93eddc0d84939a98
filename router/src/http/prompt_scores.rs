// SPDX-License-Identifier: Apache-2.0

//! Log probabilities of prompts: for `echo` with `logprobs`, and vLLM's `prompt_logprobs`.

use serde_json::{Map, Value, json};
use tokio::sync::OwnedSemaphorePermit;

use super::error::ApiError;
use super::request::AppState;
use super::token_names::TokenNames;
use crate::generate::GenerationRequest;
use crate::scoring::{PromptScores, SCORED_ENTRIES_MAX};
use crate::wire::Logprob;

/// Bytes of a log probability with its token, of which the JSON values are made.
const ENTRY_BYTES: usize = size_of::<(u32, f32)>();

/// The scores of a request's prompts, and the right to write them as JSON.
pub(super) struct ScoredPrompts {
    pub(super) prompts: Vec<PromptScores>,
    _writing: Option<OwnedSemaphorePermit>,
}

/// Scores the prompts with `top` alternatives for each token.
pub(super) async fn score_prompts(
    app: &AppState,
    request: &GenerationRequest,
    top: u32,
) -> Result<ScoredPrompts, ApiError> {
    let tokens: usize = request.prompts().map(<[u32]>::len).sum();
    // Each choice repeats the scores of its prompt.
    let entries = tokens.saturating_mul(request.params().n as usize).saturating_mul(top as usize + 1);
    if entries > SCORED_ENTRIES_MAX {
        let message = format!(
            "the prompts have {entries} log probabilities, allowed are {SCORED_ENTRIES_MAX}; send fewer \
             prompts or ask for fewer alternatives"
        );
        return Err(ApiError::invalid(Some("prompt"), message));
    }
    let prompts = app.generator.score(request, top).await?;
    Ok(ScoredPrompts { prompts, _writing: app.reserve_json(entries * ENTRY_BYTES).await })
}

/// vLLM's `prompt_logprobs`: null for the first token, then an object from token ids to log
/// probabilities. `rank` is null if a token is not among the alternatives.
pub(super) fn prompt_logprobs(
    names: TokenNames<'_>,
    prompt: &[u32],
    scores: &PromptScores,
    top: usize,
) -> Value {
    let entry = |id: u32, logprob: f32, rank: Option<usize>| {
        (id.to_string(), json!({"logprob": logprob, "rank": rank, "decoded_token": names.text(id)}))
    };
    let of_token = |(&id, score): (&u32, &Logprob)| {
        let alternatives = score.top.iter().take(top);
        let mut entries: Map<String, Value> =
            alternatives.zip(1..).map(|(&(id, logprob), rank)| entry(id, logprob, Some(rank))).collect();
        if !entries.contains_key(&id.to_string()) {
            entries.extend([entry(id, score.logprob, None)]);
        }
        Value::Object(entries)
    };
    let rest = prompt.iter().skip(1).zip(scores).map(of_token);
    std::iter::once(Value::Null).chain(rest).collect()
}
