//! `POST /v1/chat/completions`: renders the messages with the model's own template and generates the reply.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::fields::{ParsedBody, parse_body};
use super::request::{App, Stamp, WholeBody, off_thread};
use super::response::{Answer, Surface, finish_reason, stop_reason};
use crate::choice::{Finish, Piece};
use crate::generate::{Job, Prompts};
use crate::model::Model;
use crate::wire::Logprob;

const FIELDS: [&str; 6] = [
    "messages",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "add_generation_prompt",
    "chat_template_kwargs",
];

#[derive(Debug, Deserialize)]
struct Fields {
    messages: Vec<Map<String, Value>>,
    max_completion_tokens: Option<i64>,
    logprobs: Option<bool>,
    top_logprobs: Option<i64>,
    add_generation_prompt: Option<bool>,
    chat_template_kwargs: Option<Map<String, Value>>,
}

const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

pub(crate) async fn post(
    State(app): State<App>,
    stamp: Stamp,
    WholeBody(body): WholeBody,
) -> Result<Response, ApiError> {
    let ParsedBody { endpoint, sampling, response } = parse_body::<Fields>(&body, &FIELDS)?;
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
    let model = app.generator.fleet.resolve(response.model.as_deref())?;

    let messages: Vec<Value> = endpoint.messages.into_iter().map(Value::Object).collect();
    let add_generation_prompt = endpoint.add_generation_prompt.unwrap_or(true);
    let variables = endpoint.chat_template_kwargs.unwrap_or_default();
    let encoding = model.clone();
    let tokens = off_thread(body.len(), move || {
        encoding.text.encode_chat(&messages, add_generation_prompt, &variables)
    })
    .await?;
    let prompts = Prompts { param: "messages", tokens: vec![tokens], at_text_start: true };
    let job = Job::new(model, prompts, params, stamp.origin.clone())?;
    let events = app.generator.start(&job).await?;

    let surface = Chat {
        id: format!("chatcmpl-{}", stamp.origin.request_id),
        created: stamp.created,
        with_logprobs: job.params().top_logprobs.is_some(),
        prompt_token_ids: options.return_token_ids.then(|| job.prompts().flatten().copied().collect()),
        model: job.model.clone(),
    };
    Answer::to(&job, surface, events, options).respond().await
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

struct Chat {
    id: String,
    created: i64,
    model: Arc<Model>,
    with_logprobs: bool,
    prompt_token_ids: Option<Vec<u32>>,
}

impl Chat {
    fn logprobs(&self, piece: &Piece) -> Value {
        if !self.with_logprobs {
            return Value::Null;
        }
        let content: Vec<Value> =
            piece.tokens.iter().zip(&piece.logprobs).map(|(&id, entry)| self.logprob(id, entry)).collect();
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

impl Surface for Chat {
    fn opening(&mut self, choice: u32) -> Option<Value> {
        Some(self.chunk(choice, json!({"role": "assistant", "content": ""})))
    }

    fn piece(&mut self, piece: Piece) -> Value {
        let logprobs = self.logprobs(&piece);
        let mut entry = self.chunk(piece.choice, json!({"content": piece.text}));
        entry["logprobs"] = logprobs;
        if self.prompt_token_ids.is_some() {
            entry["token_ids"] = json!(piece.tokens);
        }
        entry
    }

    fn ended(&mut self, choice: u32, finish: &Finish) -> Value {
        let mut entry = self.chunk(choice, json!({}));
        entry["finish_reason"] = json!(finish_reason(finish));
        entry["stop_reason"] = stop_reason(finish);
        entry
    }

    fn whole(&mut self, piece: Piece, finish: &Finish) -> Value {
        let mut entry = json!({
            "index": piece.choice,
            "message": {"role": "assistant", "content": piece.text, "refusal": null},
            "logprobs": self.logprobs(&piece),
            "finish_reason": finish_reason(finish),
            "stop_reason": stop_reason(finish),
        });
        if self.prompt_token_ids.is_some() {
            entry["token_ids"] = json!(piece.tokens);
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
