// SPDX-License-Identifier: Apache-2.0

//! `POST /v1/completions`: continues one or several prompts of text or token ids.

use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::fields::{ParsedBody, parse_body};
use super::request::{AppState, ReceivedBody, RequestMetadata, run_tokenizer};
use super::response::{ChoiceFormat, GenerationResponse, stop_reason};
use crate::choice::{FinishCause, OutputDelta};
use crate::generate::{CHOICES_MAX, GenerationRequest, TokenizedPrompts};
use crate::model::{EncodeTextError, ServedModel};
use crate::params::{RequestParamError, token_ids};

/// OpenAI's default.
const MAX_TOKENS_DEFAULT: i64 = 16;

const FIELDS: [&str; 5] = ["prompt", "echo", "logprobs", "best_of", "add_special_tokens"];

#[derive(Debug, Deserialize)]
struct CompletionFields {
    prompt: PromptField,
    echo: Option<bool>,
    logprobs: Option<i64>,
    best_of: Option<i64>,
    add_special_tokens: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a string, an array of strings, an array of token ids, or an array of such arrays"
)]
enum PromptField {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<i64>),
    ManyTokens(Vec<Vec<i64>>),
}

pub(crate) async fn post(
    State(app): State<AppState>,
    metadata: RequestMetadata,
    body: ReceivedBody,
) -> Result<Response, ApiError> {
    let ParsedBody { endpoint, sampling, response } = parse_body::<CompletionFields>(&body.bytes, &FIELDS)?;
    let mut options = response.options()?;
    let model = app.generator.registry.resolve(response.model.as_deref(), &metadata.models)?;
    // Ids are all that a model without tokenizer can answer with.
    options.return_token_ids |= model.text.tokenizer().is_err();
    let mut params = sampling.params()?;
    params.max_tokens.get_or_insert(MAX_TOKENS_DEFAULT);
    params.top_logprobs = endpoint.logprobs;
    params.best_of = endpoint.best_of;
    let selects_best = endpoint.best_of.is_some_and(|best_of| best_of > params.n.unwrap_or(1));
    if selects_best && options.stream {
        let message = "`best_of` above `n` cannot be streamed: the best choices are known at the end only";
        return Err(ApiError::invalid(Some("best_of"), message));
    }
    if selects_best {
        // The best choices are those with the highest log probabilities.
        params.top_logprobs.get_or_insert(0);
    }
    let echo = endpoint.echo.unwrap_or(false);
    if echo && endpoint.logprobs.is_some() {
        return Err(ApiError::invalid(Some("echo"), "`echo` together with `logprobs` is not supported"));
    }
    let add_special = endpoint.add_special_tokens.unwrap_or(true);
    let prompt = endpoint.prompt;
    let tokenizing_model = model.clone();
    let (tokens, echoes) = run_tokenizer(body.bytes.len(), move || {
        tokenize_prompts(&tokenizing_model, prompt, add_special, echo)
    })
    .await?;
    drop(body);
    metadata.origin.keep_bytes(&tokens, &params);
    let prompts = TokenizedPrompts { param: "prompt", tokens, at_text_start: false };
    let request = GenerationRequest::new(model, prompts, params, metadata.origin.clone())
        .map_err(rename_top_logprobs)?;
    let events = app.generator.start(&request).await?;

    let format = CompletionFormat {
        id: format!("cmpl-{}", metadata.origin.request_id),
        created: metadata.created_unix_seconds,
        n: request.params().n as usize,
        with_logprobs: endpoint.logprobs.is_some(),
        prompt_token_ids: options.return_token_ids.then(|| request.prompts().map(<[u32]>::to_vec).collect()),
        text_offsets: vec![0; request.choices()],
        echoes,
        model: request.model.clone(),
    };
    GenerationResponse::new(&request, format, events, options).respond().await
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

/// Token ids of each prompt and, for `echo`, its text.
fn tokenize_prompts(
    model: &ServedModel,
    prompt: PromptField,
    add_special: bool,
    echo: bool,
) -> Result<(Vec<Vec<u32>>, Vec<String>), ApiError> {
    let (texts, tokens) = match prompt {
        PromptField::Text(text) => (vec![text], vec![]),
        PromptField::Texts(texts) => (texts, vec![]),
        PromptField::Tokens(tokens) => (vec![], vec![tokens]),
        PromptField::ManyTokens(many) => (vec![], many),
    };
    let count = texts.len() + tokens.len();
    if count > CHOICES_MAX {
        return Err(RequestParamError::TooManyEntries { param: "prompt", count, max: CHOICES_MAX }.into());
    }
    let invalid = |error: EncodeTextError| ApiError::invalid(Some("prompt"), error.to_string());
    let mut encoded = Vec::with_capacity(count);
    for text in &texts {
        encoded.push(model.text.encode(text, add_special).map_err(invalid)?);
    }
    for ids in &tokens {
        encoded.push(token_ids("prompt", ids, model.limits())?);
    }
    let echoes = match (echo, texts.is_empty()) {
        (false, _) => vec![],
        (true, false) => texts,
        (true, true) => {
            let texts: Result<_, _> = encoded.iter().map(|ids| model.text.decode(ids)).collect();
            texts.map_err(|error| ApiError::invalid(Some("echo"), format!("`echo`: {error}")))?
        }
    };
    Ok((encoded, echoes))
}

struct CompletionFormat {
    id: String,
    created: i64,
    model: std::sync::Arc<ServedModel>,
    n: usize,
    with_logprobs: bool,
    /// Token ids of the prompts, if the client asks for them.
    prompt_token_ids: Option<Vec<Vec<u32>>>,
    /// Number of characters of each choice so far.
    text_offsets: Vec<usize>,
    /// Texts of the prompts, if the client asks for `echo`.
    echoes: Vec<String>,
}

impl CompletionFormat {
    fn prompt_of(&self, choice: u32) -> usize {
        choice as usize / self.n
    }

    fn entry(&mut self, delta: OutputDelta, finish: Option<&FinishCause>) -> Value {
        let logprobs = match self.with_logprobs {
            true => self.logprobs(&delta),
            false => Value::Null,
        };
        let mut entry = json!({
            "index": delta.choice,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": finish.map(FinishCause::reason),
            "stop_reason": finish.map(stop_reason),
        });
        if self.prompt_token_ids.is_some() {
            entry["token_ids"] = json!(delta.tokens);
        }
        entry
    }

    fn logprobs(&mut self, delta: &OutputDelta) -> Value {
        let texts: Vec<String> = delta.tokens.iter().map(|&id| self.model.text.token_text(id)).collect();
        let offset = &mut self.text_offsets[delta.choice as usize];
        let offsets: Vec<usize> =
            texts.iter().map(|text| std::mem::replace(offset, *offset + text.chars().count())).collect();
        // The sampled token is always included, even if it is not among the most probable ones.
        let top = |(text, entry): (&String, &crate::wire::Logprob)| {
            let most =
                entry.top.iter().map(|&(id, logprob)| (self.model.text.token_text(id), json!(logprob)));
            let mut pairs: Map<_, _> = most.collect();
            pairs.entry(text).or_insert(json!(entry.logprob));
            Value::Object(pairs)
        };
        json!({
            "tokens": texts,
            "token_logprobs": delta.logprobs.iter().map(|entry| entry.logprob).collect::<Vec<_>>(),
            "top_logprobs": texts.iter().zip(&delta.logprobs).map(top).collect::<Vec<_>>(),
            "text_offset": offsets,
        })
    }

    fn with_prompt_ids(&self, choice: u32, mut entry: Value) -> Value {
        if let Some(prompts) = &self.prompt_token_ids {
            entry["prompt_token_ids"] = json!(prompts[self.prompt_of(choice)]);
        }
        entry
    }
}

impl ChoiceFormat for CompletionFormat {
    fn first_entry(&mut self, choice: u32) -> Option<Value> {
        if self.echoes.is_empty() && self.prompt_token_ids.is_none() {
            return None;
        }
        let text = self.echoes.get(self.prompt_of(choice)).cloned().unwrap_or_default();
        let entry = self.entry(OutputDelta { choice, tokens: vec![], text, logprobs: vec![] }, None);
        Some(self.with_prompt_ids(choice, entry))
    }

    fn delta_entries(&mut self, delta: OutputDelta) -> Vec<Value> {
        vec![self.entry(delta, None)]
    }

    fn last_entries(&mut self, choice: u32, finish: &FinishCause) -> Vec<Value> {
        let delta = OutputDelta { choice, tokens: vec![], text: String::new(), logprobs: vec![] };
        let mut entry = self.entry(delta, Some(finish));
        entry["logprobs"] = Value::Null;
        vec![entry]
    }

    fn whole_entry(&mut self, mut delta: OutputDelta, finish: &FinishCause) -> Value {
        let choice = delta.choice;
        if let Some(echo) = self.echoes.get(self.prompt_of(choice)) {
            delta.text.insert_str(0, echo);
        }
        let entry = self.entry(delta, Some(finish));
        self.with_prompt_ids(choice, entry)
    }

    fn envelope(&self, choices: Vec<Value>, _streaming: bool) -> Value {
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model.name(),
            "system_fingerprint": self.model.system_fingerprint(),
            "choices": choices,
        })
    }
}
