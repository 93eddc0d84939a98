// SPDX-License-Identifier: Apache-2.0

//! `POST /v1/completions`: continues one or several prompts of text or token ids. With `suffix`, it
//! fills in the text between prompt and suffix.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::fields::{ParsedBody, ResponseOptions, parse_body};
use super::prompt_field::PromptField;
use super::prompt_scores::{ScoredPrompts, prompt_logprobs, score_prompts};
use super::request::{AppState, ReceivedBody, RequestMetadata, run_tokenizer};
use super::response::{ChoiceFormat, GenerationResponse, stop_reason};
use super::token_names::{TokenNames, token_id};
use crate::choice::{FinishCause, OutputDelta};
use crate::generate::{GenerationRequest, TokenizedPrompts};
use crate::model::ServedModel;
use crate::params::{RequestParamError, RequestParams};
use crate::wire::Logprob;

#[cfg(feature = "fuzzing")]
pub(super) mod fuzzing;
mod prompts;

use prompts::CompletionPrompts;

/// OpenAI's default.
const MAX_TOKENS_DEFAULT: i64 = 16;

const FIELDS: [&str; 6] = ["prompt", "suffix", "echo", "logprobs", "best_of", "add_special_tokens"];

#[derive(Debug, Deserialize)]
struct CompletionFields {
    prompt: PromptField,
    /// The text after the completion. Empty: the prompt is continued.
    #[serde(default)]
    suffix: String,
    echo: Option<bool>,
    logprobs: Option<i64>,
    best_of: Option<i64>,
    add_special_tokens: Option<bool>,
}

pub(crate) async fn post(
    State(app): State<AppState>,
    metadata: RequestMetadata,
    body: ReceivedBody,
) -> Result<Response, ApiError> {
    let ParsedBody { endpoint, sampling, response, ignored } =
        parse_body::<CompletionFields>(&body.bytes, &FIELDS, app.unknown_fields)?;
    let mut options = response.options()?;
    let model = app.generator.registry.resolve(response.model.as_deref(), &metadata.models)?;
    // Ids are all that a model without tokenizer can answer with.
    options.return_token_ids |= model.text.tokenizer().is_err();
    let (params, is_without_output) = completion_params(sampling.params()?, &endpoint, options)?;
    let echo = endpoint.echo.unwrap_or(false);
    let echoed_logprobs = endpoint.logprobs.filter(|_| echo).and_then(|top| u32::try_from(top).ok());
    let add_special = endpoint.add_special_tokens.unwrap_or(true);
    let prompts = CompletionPrompts { field: endpoint.prompt, suffix: endpoint.suffix, add_special, echo };
    let tokenizing_model = model.clone();
    let (tokens, echoes) =
        run_tokenizer(body.bytes.len(), move || prompts.tokenize(&tokenizing_model)).await?;
    drop(body);
    metadata.origin.keep_bytes(&tokens, &params);
    let prompts = TokenizedPrompts { param: "prompt", tokens, at_text_start: false };
    let request = GenerationRequest::new(model, prompts, params, metadata.origin.clone())
        .map_err(rename_top_logprobs)?
        .with_streaming(options.stream);
    let top = echoed_logprobs.max(options.prompt_logprobs);
    let scored = match top {
        Some(top) => Some(score_prompts(&app, &request, top).await?),
        None => None,
    };
    let events = match is_without_output {
        true => request.without_output(app.generator.usage_log.as_ref()),
        false => app.generator.start(&request).await?,
    };
    let format = CompletionFormat {
        id: format!("cmpl-{}", metadata.origin.trace.id()),
        created: metadata.created_unix_seconds,
        n: request.params().n as usize,
        with_logprobs: endpoint.logprobs.is_some(),
        with_token_ids: options.return_token_ids,
        names_tokens_by_id: options.names_tokens_by_id,
        echoed_logprobs,
        prompt_logprobs: options.prompt_logprobs,
        prompts: request.prompts().map(<[u32]>::to_vec).collect(),
        scored,
        text_offsets: vec![0; request.choices()],
        echoes,
        model: request.model.clone(),
    };
    let response = GenerationResponse::new(&request, format, events, options).respond().await?;
    Ok(ignored.name_in(response))
}

/// The parameters, and whether the request asks for its prompt only.
fn completion_params(
    mut params: RequestParams,
    fields: &CompletionFields,
    options: ResponseOptions,
) -> Result<(RequestParams, bool), ApiError> {
    params.max_tokens.get_or_insert(MAX_TOKENS_DEFAULT);
    params.top_logprobs = fields.logprobs;
    params.best_of = fields.best_of;
    options.check_streaming(&params)?;
    let selects_best = fields.best_of.is_some_and(|best_of| best_of > params.n.unwrap_or(1));
    if selects_best && !params.beam_search {
        // The best choices are those with the highest log probabilities.
        params.top_logprobs.get_or_insert(0);
    }
    let echo = fields.echo.unwrap_or(false);
    let is_without_output = params.max_tokens == Some(0) && (echo || options.prompt_logprobs.is_some());
    if is_without_output {
        // For the check of the context: a choice has at least one token.
        params.max_tokens = Some(1);
    }
    if echo && params.truncate_prompt_tokens.is_some() {
        let message = "`echo` cannot be used together with `truncate_prompt_tokens`";
        return Err(ApiError::invalid(Some("echo"), message));
    }
    if !fields.suffix.is_empty() {
        check_suffix(&params, echo && fields.logprobs.is_some())?;
    }
    Ok((params, is_without_output))
}

/// Refuses what does not fit a prompt of a prefix and a suffix.
fn check_suffix(params: &RequestParams, echoes_logprobs: bool) -> Result<(), ApiError> {
    let message = match (params.truncate_prompt_tokens, echoes_logprobs) {
        (Some(_), _) => {
            "`suffix` cannot be used together with `truncate_prompt_tokens`, which would cut the begin \
             of the prompt"
        }
        // The prompt's tokens are those of prefix and suffix, and its text is the prefix.
        (None, true) => "`suffix` cannot be used together with `echo` and `logprobs`; use `prompt_logprobs`",
        (None, false) => return Ok(()),
    };
    Err(ApiError::invalid(Some("suffix"), message))
}

/// Names the parameter as this endpoint does: `logprobs`.
fn rename_top_logprobs(error: RequestParamError) -> RequestParamError {
    match error {
        RequestParamError::OutOfRange { param: "top_logprobs", value, allowed } => {
            RequestParamError::OutOfRange { param: "logprobs", value, allowed }
        }
        other => other,
    }
}

struct CompletionFormat {
    id: String,
    created: i64,
    model: Arc<ServedModel>,
    n: usize,
    with_logprobs: bool,
    with_token_ids: bool,
    names_tokens_by_id: bool,
    /// The number of alternatives of the prompt's tokens in `logprobs`.
    echoed_logprobs: Option<u32>,
    /// The same in vLLM's `prompt_logprobs`.
    prompt_logprobs: Option<u32>,
    prompts: Vec<Vec<u32>>,
    scored: Option<ScoredPrompts>,
    /// Number of characters of each choice so far.
    text_offsets: Vec<usize>,
    /// Texts of the prompts, if the client asks for `echo`.
    echoes: Vec<String>,
}

/// A choice in a response or a chunk.
#[derive(Serialize)]
pub(super) struct CompletionEntry {
    index: u32,
    text: String,
    logprobs: Value,
    finish_reason: Option<&'static str>,
    stop_reason: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Value>,
}

/// A token with its log probability. The first token of a prompt and a stop token have none.
type TokenEntry<'a> = (u32, Option<&'a Logprob>);

impl CompletionFormat {
    fn prompt_of(&self, choice: u32) -> usize {
        choice as usize / self.n
    }

    /// `begins`: the output begins with this entry, after the prompt.
    fn entry(
        &mut self,
        mut delta: OutputDelta,
        begins: bool,
        finish: Option<&FinishCause>,
    ) -> CompletionEntry {
        let logprobs = match self.with_logprobs {
            true => self.logprobs(&delta, begins, finish),
            false => Value::Null,
        };
        let echo = self.echoes.get(self.prompt_of(delta.choice)).filter(|_| begins);
        if let Some(echo) = echo {
            delta.text.insert_str(0, echo);
        }
        let mut entry = CompletionEntry {
            index: delta.choice,
            text: delta.text,
            logprobs,
            finish_reason: finish.map(FinishCause::reason),
            stop_reason: finish.map_or(Value::Null, stop_reason),
            token_ids: self.with_token_ids.then_some(delta.tokens),
            prompt_token_ids: None,
            prompt_logprobs: None,
        };
        if begins {
            self.add_prompt(&mut entry);
        }
        entry
    }

    /// What an entry says of its prompt.
    fn add_prompt(&self, entry: &mut CompletionEntry) {
        let prompt = self.prompt_of(entry.index);
        if self.with_token_ids {
            entry.prompt_token_ids = Some(self.prompts[prompt].clone());
        }
        if let (Some(scored), Some(top)) = (&self.scored, self.prompt_logprobs) {
            let (tokens, scores) = (&self.prompts[prompt], &scored.prompts[prompt]);
            entry.prompt_logprobs = Some(prompt_logprobs(self.names(), tokens, scores, top as usize));
        }
    }

    fn names(&self) -> TokenNames<'_> {
        TokenNames { model: &self.model, by_id: self.names_tokens_by_id }
    }

    /// The token that ended the choice. With `echo`, clients that score a prompt take away the last
    /// entry for the one token that they had to ask for. Workers do not report its log probability.
    fn echoed_stop(&self, finish: Option<&FinishCause>) -> Option<TokenEntry<'static>> {
        match (self.echoed_logprobs, finish) {
            (Some(_), Some(FinishCause::StopToken(Some(id)))) => Some((*id, None)),
            _ => None,
        }
    }

    fn logprobs(&mut self, delta: &OutputDelta, begins: bool, finish: Option<&FinishCause>) -> Value {
        let prompt = self.prompt_of(delta.choice);
        let mut entries: Vec<TokenEntry<'_>> = Vec::new();
        if let (Some(scored), true) = (&self.scored, begins && self.echoed_logprobs.is_some()) {
            let of_tokens = std::iter::once(None).chain(scored.prompts[prompt].iter().map(Some));
            entries.extend(self.prompts[prompt].iter().copied().zip(of_tokens));
        }
        entries.extend(delta.tokens.iter().copied().zip(delta.logprobs.iter().map(Some)));
        entries.extend(self.echoed_stop(finish));
        // Offsets count characters of the text, whatever the tokens are named.
        let mut offset = self.text_offsets[delta.choice as usize];
        let mut offsets = Vec::with_capacity(entries.len());
        for (id, _) in &entries {
            offsets.push(offset);
            let text = self.model.text.token_text(*id);
            // A BOS that the tokenizer has added is no text of the prompt.
            let is_added =
                begins && offset == 0 && self.echoes.get(prompt).is_some_and(|echo| !echo.starts_with(&text));
            offset += if is_added { 0 } else { text.chars().count() };
        }
        let names = self.names();
        let top_max = self.echoed_logprobs.map_or(usize::MAX, |top| top as usize);
        let value = json!({
            "tokens": entries.iter().map(|(id, _)| names.key(*id)).collect::<Vec<_>>(),
            "token_logprobs": entries.iter().map(|(_, entry)| entry.map(|it| it.logprob)).collect::<Vec<_>>(),
            "top_logprobs": entries
                .iter()
                .map(|(id, entry)| entry.map_or(Value::Null, |it| top_logprobs(names, *id, it, top_max)))
                .collect::<Vec<_>>(),
            "text_offset": offsets,
        });
        self.text_offsets[delta.choice as usize] = offset;
        value
    }
}

/// The most probable tokens, and the token itself. If two have the same name, the less probable one
/// is named by its id.
fn top_logprobs(names: TokenNames<'_>, id: u32, entry: &Logprob, top_max: usize) -> Value {
    let mut pairs = Map::new();
    let own =
        std::iter::once((id, entry.logprob)).filter(|_| !entry.top.iter().take(top_max).any(|it| it.0 == id));
    for (token, logprob) in entry.top.iter().take(top_max).copied().chain(own) {
        let name = names.key(token);
        let name = if pairs.contains_key(&name) { token_id(token) } else { name };
        pairs.insert(name, json!(logprob));
    }
    Value::Object(pairs)
}

impl ChoiceFormat for CompletionFormat {
    type ChunkEntry = CompletionEntry;
    type WholeEntry = CompletionEntry;

    fn first_entry(&mut self, choice: u32) -> Option<CompletionEntry> {
        if self.echoes.is_empty() && !self.with_token_ids {
            return None;
        }
        let nothing = OutputDelta { choice, ..OutputDelta::default() };
        Some(self.entry(nothing, true, None))
    }

    fn delta_entries(&mut self, delta: OutputDelta, mut write: impl FnMut(&CompletionEntry)) {
        write(&self.entry(delta, false, None));
    }

    fn last_entries(&mut self, choice: u32, finish: &FinishCause) -> Vec<CompletionEntry> {
        let nothing = OutputDelta { choice, ..OutputDelta::default() };
        let mut entry = self.entry(nothing, false, Some(finish));
        if self.echoed_stop(Some(finish)).is_none() {
            entry.logprobs = Value::Null;
        }
        vec![entry]
    }

    fn whole_entry(&mut self, delta: OutputDelta, finish: &FinishCause) -> CompletionEntry {
        self.entry(delta, true, Some(finish))
    }

    fn envelope(&self, _streaming: bool) -> Value {
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model.name(),
            "system_fingerprint": self.model.system_fingerprint(),
        })
    }
}
