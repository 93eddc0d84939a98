// SPDX-License-Identifier: Apache-2.0

//! `POST /v1/chat/completions`: renders the messages with the model's chat template and generates
//! the reply.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::fields::{ParsedBody, parse_body};
use super::request::{AppState, ReceivedBody, RequestMetadata, run_tokenizer};
use super::response::{ChoiceFormat, GenerationResponse, stop_reason};
use crate::choice::{FinishCause, OutputDelta};
use crate::generate::{GenerationRequest, TokenizedPrompts};
use crate::model::{Conversation, ServedModel};
use crate::wire::Logprob;

const FIELDS: [&str; 7] = [
    "messages",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
];

#[derive(Debug, Deserialize)]
struct ChatFields {
    messages: Vec<Map<String, Value>>,
    max_completion_tokens: Option<i64>,
    logprobs: Option<bool>,
    top_logprobs: Option<i64>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    chat_template_kwargs: Option<Map<String, Value>>,
}

const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

pub(crate) async fn post(
    State(app): State<AppState>,
    metadata: RequestMetadata,
    body: ReceivedBody,
) -> Result<Response, ApiError> {
    let ParsedBody { endpoint, sampling, response } = parse_body::<ChatFields>(&body.bytes, &FIELDS)?;
    let options = response.options()?;
    let mut params = sampling.params()?;
    params.max_tokens = endpoint.max_completion_tokens.or(params.max_tokens);
    params.top_logprobs = match (endpoint.logprobs.unwrap_or(false), endpoint.top_logprobs) {
        (true, top) => Some(top.unwrap_or(0)),
        (false, None) => None,
        (false, Some(_)) => {
            let message = "`top_logprobs` is only allowed when `logprobs` is true";
            return Err(ApiError::invalid(Some("top_logprobs"), message));
        }
    };
    check_messages(&endpoint.messages)?;
    let model = app.generator.registry.resolve(response.model.as_deref(), &metadata.models)?;

    let continue_final_message = endpoint.continue_final_message.unwrap_or(false);
    let conversation = Conversation {
        messages: endpoint.messages.into_iter().map(Value::Object).collect(),
        add_generation_prompt: endpoint.add_generation_prompt.unwrap_or(!continue_final_message),
        continue_final_message,
        variables: endpoint.chat_template_kwargs.unwrap_or_default(),
    };
    let tokenizing_model = model.clone();
    let tokens =
        run_tokenizer(body.bytes.len(), move || tokenizing_model.text.encode_chat(&conversation)).await?;
    let tokens = vec![tokens];
    drop(body);
    metadata.origin.keep_bytes(&tokens, &params);
    let prompts = TokenizedPrompts { param: "messages", tokens, at_text_start: true };
    let request = GenerationRequest::new(model, prompts, params, metadata.origin.clone())?;
    let events = app.generator.start(&request).await?;

    let format = ChatFormat {
        id: format!("chatcmpl-{}", metadata.origin.request_id),
        created: metadata.created_unix_seconds,
        with_logprobs: request.params().top_logprobs.is_some(),
        prompt_token_ids: options.return_token_ids.then(|| request.prompts().flatten().copied().collect()),
        model: request.model.clone(),
    };
    GenerationResponse::new(&request, format, events, options).respond().await
}

fn check_messages(messages: &[Map<String, Value>]) -> Result<(), ApiError> {
    if messages.is_empty() {
        return Err(ApiError::invalid(Some("messages"), "`messages` is empty: at least one is needed"));
    }
    for (index, message) in messages.iter().enumerate() {
        let param = format!("messages[{index}].role");
        match message.get("role") {
            Some(Value::String(role)) if ROLES.contains(&role.as_str()) => {}
            Some(role) => {
                let shown: String = role.to_string().chars().take(80).collect();
                let message = format!("`{param}` is {shown}, allowed are {}", ROLES.join(", "));
                return Err(ApiError::invalid(Some(&param), message));
            }
            None => return Err(ApiError::invalid(Some(&param), format!("`{param}` is missing"))),
        }
    }
    Ok(())
}

struct ChatFormat {
    id: String,
    created: i64,
    model: Arc<ServedModel>,
    with_logprobs: bool,
    prompt_token_ids: Option<Vec<u32>>,
}

impl ChatFormat {
    fn logprobs(&self, delta: &OutputDelta) -> Value {
        if !self.with_logprobs {
            return Value::Null;
        }
        let content: Vec<Value> =
            delta.tokens.iter().zip(&delta.logprobs).map(|(&id, entry)| self.logprob(id, entry)).collect();
        json!({"content": content, "refusal": null})
    }

    fn logprob(&self, id: u32, entry: &Logprob) -> Value {
        let token = |id: u32, logprob: f32| {
            json!({
                "token": self.model.text.token_text(id),
                "logprob": logprob,
                "bytes": self.model.text.token_bytes(id),
            })
        };
        let mut value = token(id, entry.logprob);
        value["top_logprobs"] = entry.top.iter().map(|&(id, logprob)| token(id, logprob)).collect();
        value
    }

    fn chunk(&self, choice: u32, delta: Value) -> Value {
        json!({"index": choice, "delta": delta, "logprobs": null, "finish_reason": null})
    }
}

impl ChoiceFormat for ChatFormat {
    fn first_entry(&mut self, choice: u32) -> Option<Value> {
        Some(self.chunk(choice, json!({"role": "assistant", "content": ""})))
    }

    fn delta_entry(&mut self, delta: OutputDelta) -> Value {
        let logprobs = self.logprobs(&delta);
        let mut entry = self.chunk(delta.choice, json!({"content": delta.text}));
        entry["logprobs"] = logprobs;
        if self.prompt_token_ids.is_some() {
            entry["token_ids"] = json!(delta.tokens);
        }
        entry
    }

    fn last_entry(&mut self, choice: u32, finish: &FinishCause) -> Value {
        let mut entry = self.chunk(choice, json!({}));
        entry["finish_reason"] = json!(finish.reason());
        entry["stop_reason"] = stop_reason(finish);
        entry
    }

    fn whole_entry(&mut self, delta: OutputDelta, finish: &FinishCause) -> Value {
        let mut entry = json!({
            "index": delta.choice,
            "message": {"role": "assistant", "content": delta.text, "refusal": null},
            "logprobs": self.logprobs(&delta),
            "finish_reason": finish.reason(),
            "stop_reason": stop_reason(finish),
        });
        if self.prompt_token_ids.is_some() {
            entry["token_ids"] = json!(delta.tokens);
        }
        entry
    }

    fn envelope(&self, choices: Vec<Value>, streaming: bool) -> Value {
        let mut value = json!({
            "id": self.id,
            "object": if streaming { "chat.completion.chunk" } else { "chat.completion" },
            "created": self.created,
            "model": self.model.name(),
            "system_fingerprint": self.model.system_fingerprint(),
            "choices": choices,
        });
        if let Some(ids) = self.prompt_token_ids.as_ref().filter(|_| !streaming) {
            value["prompt_token_ids"] = json!(ids);
        }
        value
    }
}
