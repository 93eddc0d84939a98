//! `POST /v1/completions`: continues one or several prompts, given as text or token ids.

use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::fields::{ParsedBody, parse_body};
use super::request::{App, Stamp, WholeBody, off_thread};
use super::response::{Answer, Surface, finish_reason, stop_reason};
use crate::choice::{Finish, Piece};
use crate::generate::{CHOICES_MAX, Job, Prompts};
use crate::model::Model;
use crate::params::{RequestParamError, token_ids};

/// What OpenAI's API takes where the client names no figure.
const MAX_TOKENS_DEFAULT: i64 = 16;

const FIELDS: [&str; 5] = ["prompt", "echo", "logprobs", "best_of", "add_special_tokens"];

#[derive(Debug, Deserialize)]
struct Fields {
    prompt: Prompt,
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
enum Prompt {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<i64>),
    ManyTokens(Vec<Vec<i64>>),
}

pub(crate) async fn post(
    State(app): State<App>,
    stamp: Stamp,
    WholeBody(body): WholeBody,
) -> Result<Response, ApiError> {
    let ParsedBody { endpoint, sampling, response } = parse_body::<Fields>(&body, &FIELDS)?;
    let options = response.options()?;
    let model = app.generator.fleet.resolve(response.model.as_deref())?;
    let mut params = sampling.params()?;
    params.max_tokens.get_or_insert(MAX_TOKENS_DEFAULT);
    params.top_logprobs = endpoint.logprobs;
    params.best_of = endpoint.best_of;
    let chosen = endpoint.best_of.is_some_and(|best_of| best_of > params.n.unwrap_or(1));
    if chosen && options.stream {
        let message = "`best_of` above `n` cannot be streamed: the best are known at the end";
        return Err(ApiError::invalid(Some("best_of"), message));
    }
    if chosen {
        // They are chosen by their log probabilities.
        params.top_logprobs.get_or_insert(0);
    }
    let echo = endpoint.echo.unwrap_or(false);
    if echo && endpoint.logprobs.is_some() {
        return Err(ApiError::invalid(Some("echo"), "`echo` together with `logprobs` is not supported"));
    }
    let add_special = endpoint.add_special_tokens.unwrap_or(true);
    let prompt = endpoint.prompt;
    let encoding = model.clone();
    let (tokens, echoes) =
        off_thread(body.len(), move || encode(&encoding, prompt, add_special, echo)).await?;
    let prompts = Prompts { param: "prompt", tokens, at_text_start: false };
    let job = Job::new(model, prompts, params, stamp.origin.clone()).map_err(renamed)?;
    let events = app.generator.start(&job).await?;

    let surface = Completion {
        id: format!("cmpl-{}", stamp.origin.request_id),
        created: stamp.created,
        n: job.params().n as usize,
        with_logprobs: endpoint.logprobs.is_some(),
        token_ids: options.return_token_ids.then(|| job.prompts().map(<[u32]>::to_vec).collect()),
        text_offsets: vec![0; job.choices()],
        echoes,
        model: job.model.clone(),
    };
    Answer::to(&job, surface, events, options).respond().await
}

/// This surface calls them `logprobs`.
fn renamed(error: RequestParamError) -> RequestParamError {
    match error {
        RequestParamError::OutOfRange { param: "top_logprobs", value, allowed } => {
            RequestParamError::OutOfRange { param: "logprobs", value, allowed }
        }
        other => other,
    }
}

/// Token ids of each prompt and, for `echo`, their texts.
fn encode(
    model: &Model,
    prompt: Prompt,
    add_special: bool,
    echo: bool,
) -> Result<(Vec<Vec<u32>>, Vec<String>), ApiError> {
    let (texts, tokens) = match prompt {
        Prompt::Text(text) => (vec![text], vec![]),
        Prompt::Texts(texts) => (texts, vec![]),
        Prompt::Tokens(tokens) => (vec![], vec![tokens]),
        Prompt::ManyTokens(many) => (vec![], many),
    };
    let count = texts.len() + tokens.len();
    if count > CHOICES_MAX {
        return Err(RequestParamError::TooManyEntries { param: "prompt", count, max: CHOICES_MAX }.into());
    }
    let invalid = |error: text::EncodeError| ApiError::invalid(Some("prompt"), error.to_string());
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
        (true, true) => encoded.iter().map(|ids| model.text.decode(ids)).collect(),
    };
    Ok((encoded, echoes))
}

struct Completion {
    id: String,
    created: i64,
    model: std::sync::Arc<Model>,
    n: usize,
    with_logprobs: bool,
    /// Of the prompts, where the client wants token ids.
    token_ids: Option<Vec<Vec<u32>>>,
    /// Characters of each choice so far.
    text_offsets: Vec<usize>,
    /// Texts of the prompts, where the client wants them back.
    echoes: Vec<String>,
}

impl Completion {
    fn prompt_of(&self, choice: u32) -> usize {
        choice as usize / self.n
    }

    fn entry(&mut self, piece: Piece, finish: Option<&Finish>) -> Value {
        let logprobs = match self.with_logprobs {
            true => self.logprobs(&piece),
            false => Value::Null,
        };
        let mut entry = json!({
            "index": piece.choice,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": finish.map(finish_reason),
            "stop_reason": finish.map(stop_reason),
        });
        if self.token_ids.is_some() {
            entry["token_ids"] = json!(piece.tokens);
        }
        entry
    }

    fn logprobs(&mut self, piece: &Piece) -> Value {
        let texts: Vec<String> = piece.tokens.iter().map(|&id| self.model.text.token_text(id)).collect();
        let offset = &mut self.text_offsets[piece.choice as usize];
        let offsets: Vec<usize> =
            texts.iter().map(|text| std::mem::replace(offset, *offset + text.chars().count())).collect();
        // The one that was drawn stands there, too, among the most probable or not.
        let top = |(text, entry): (&String, &crate::wire::Logprob)| {
            let most =
                entry.top.iter().map(|&(id, logprob)| (self.model.text.token_text(id), json!(logprob)));
            let mut pairs: Map<_, _> = most.collect();
            pairs.entry(text).or_insert(json!(entry.logprob));
            Value::Object(pairs)
        };
        json!({
            "tokens": texts,
            "token_logprobs": piece.logprobs.iter().map(|entry| entry.logprob).collect::<Vec<_>>(),
            "top_logprobs": texts.iter().zip(&piece.logprobs).map(top).collect::<Vec<_>>(),
            "text_offset": offsets,
        })
    }

    fn with_prompt_ids(&self, choice: u32, mut entry: Value) -> Value {
        if let Some(prompts) = &self.token_ids {
            entry["prompt_token_ids"] = json!(prompts[self.prompt_of(choice)]);
        }
        entry
    }
}

impl Surface for Completion {
    fn opening(&mut self, choice: u32) -> Option<Value> {
        if self.echoes.is_empty() && self.token_ids.is_none() {
            return None;
        }
        let text = self.echoes.get(self.prompt_of(choice)).cloned().unwrap_or_default();
        let entry = self.entry(Piece { choice, tokens: vec![], text, logprobs: vec![] }, None);
        Some(self.with_prompt_ids(choice, entry))
    }

    fn piece(&mut self, piece: Piece) -> Value {
        self.entry(piece, None)
    }

    fn ended(&mut self, choice: u32, finish: &Finish) -> Value {
        let piece = Piece { choice, tokens: vec![], text: String::new(), logprobs: vec![] };
        let mut entry = self.entry(piece, Some(finish));
        entry["logprobs"] = Value::Null;
        entry
    }

    fn whole(&mut self, mut piece: Piece, finish: &Finish) -> Value {
        let choice = piece.choice;
        if let Some(echo) = self.echoes.get(self.prompt_of(choice)) {
            piece.text.insert_str(0, echo);
        }
        let entry = self.entry(piece, Some(finish));
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
