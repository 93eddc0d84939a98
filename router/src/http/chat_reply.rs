// SPDX-License-Identifier: Apache-2.0

//! Writes the reply of a chat as OpenAI does: content, reasoning and tool calls, whole or streamed.

use std::sync::Arc;

use chat_output::{ChatEvent, OutputParser, OutputSyntax, ToolFormat};
use serde::Serialize;
use serde_json::{Value, json};

use super::response::{ChoiceFormat, stop_reason};
use super::token_names::TokenNames;
use super::tools::{RequestTools, ToolChoice};
use crate::choice::{FinishCause, OutputDelta};
use crate::generate::GenerationRequest;
use crate::model::ServedModel;
use crate::request_id::ClientRequestId;
use crate::wire::Logprob;

/// What a reply says of its request.
pub(super) struct ReplyFields {
    pub(super) id: String,
    pub(super) created: i64,
    pub(super) with_reasoning: bool,
    pub(super) with_logprobs: bool,
    pub(super) with_token_ids: bool,
    pub(super) names_tokens_by_id: bool,
    /// vLLM's `prompt_logprobs`.
    pub(super) prompt_logprobs: Option<Value>,
}

pub(super) struct ChatReply {
    fields: ReplyFields,
    model: Arc<ServedModel>,
    prompt_token_ids: Vec<u32>,
    choices: Vec<ReplyChoice>,
    reasoning_tokens: Option<u64>,
    calls: CallWriter,
}

/// One choice of the reply.
struct ReplyChoice {
    /// `None`: all text is content.
    parser: Option<OutputParser>,
    /// What a whole reply is made of.
    events: Vec<ChatEvent>,
    calls: usize,
}

/// A choice in a chunk.
#[derive(Serialize)]
pub(super) struct ChunkEntry {
    index: u32,
    delta: ChatDelta,
    logprobs: Value,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<Value>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum ChatDelta {
    Text { content: String },
    Reasoning { reasoning_content: String },
    Other(Value),
}

/// A choice in a whole reply.
#[derive(Serialize)]
pub(super) struct WholeEntry {
    index: u32,
    message: Value,
    logprobs: Value,
    finish_reason: &'static str,
    stop_reason: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

/// How calls are written.
#[derive(Clone, Copy)]
pub(super) struct CallWriter {
    choice: ToolChoice,
    /// Only the first call is written.
    is_single: bool,
    format: Option<ToolFormat>,
}

impl ChatReply {
    pub(super) fn new(
        fields: ReplyFields,
        request: &GenerationRequest,
        syntax: OutputSyntax,
        tools: &RequestTools,
    ) -> Self {
        let is_parsed = syntax.calls.is_some() || syntax.reasoning.is_some();
        let choice = || ReplyChoice {
            parser: is_parsed.then(|| OutputParser::new(syntax.clone())),
            events: Vec::new(),
            calls: 0,
        };
        let is_reasoning = syntax.reasoning.is_some() || syntax.calls == Some(ToolFormat::Harmony);
        Self {
            model: request.model.clone(),
            prompt_token_ids: request.prompts().flatten().copied().collect(),
            choices: (0..request.choices()).map(|_| choice()).collect(),
            reasoning_tokens: is_reasoning.then_some(0),
            calls: CallWriter::new(tools, syntax.calls),
            fields,
        }
    }

    fn logprobs(&self, delta: &OutputDelta) -> Value {
        if !self.fields.with_logprobs {
            return Value::Null;
        }
        let content: Vec<Value> =
            delta.tokens.iter().zip(&delta.logprobs).map(|(&id, entry)| self.logprob(id, entry)).collect();
        json!({"content": content, "refusal": null})
    }

    fn logprob(&self, id: u32, entry: &Logprob) -> Value {
        let names = TokenNames { model: &self.model, by_id: self.fields.names_tokens_by_id };
        let token = |id: u32, logprob: f32| {
            json!({
                "token": names.text(id),
                "logprob": logprob,
                "bytes": self.model.text.token_bytes(id),
            })
        };
        let mut value = token(id, entry.logprob);
        value["top_logprobs"] = entry.top.iter().map(|&(id, logprob)| token(id, logprob)).collect();
        value
    }

    /// Counts the tokens of a delta whose text begins or ends inside reasoning.
    fn push(&mut self, choice: u32, tokens: usize, text: &str) -> Option<Vec<ChatEvent>> {
        let parser = self.choices[choice as usize].parser.as_mut()?;
        let was_reasoning = parser.in_reasoning();
        let events = parser.push(text);
        if let Some(count) = self.reasoning_tokens.as_mut().filter(|_| was_reasoning || parser.in_reasoning())
        {
            *count += tokens as u64;
        }
        Some(events)
    }

    /// The `delta` of each chunk that the events become.
    fn deltas(&mut self, choice: u32, events: Vec<ChatEvent>) -> Vec<ChatDelta> {
        let writer = self.calls;
        let with_reasoning = self.fields.with_reasoning;
        let choice = &mut self.choices[choice as usize];
        let delta = |event| match event {
            ChatEvent::Text(content) => Some(ChatDelta::Text { content }),
            ChatEvent::Reasoning(reasoning_content) => {
                with_reasoning.then_some(ChatDelta::Reasoning { reasoning_content })
            }
            ChatEvent::CallStarted { index, id, name } => {
                let call = writer.call(index, id, &name)?;
                choice.calls += 1;
                Some(ChatDelta::Other(json!({"tool_calls": [call]})))
            }
            ChatEvent::Arguments { index, json } => writer.writes(index).then(|| {
                ChatDelta::Other(json!({"tool_calls": [{"index": index, "function": {"arguments": json}}]}))
            }),
            ChatEvent::CallEnded { .. } => None,
        };
        events.into_iter().filter_map(delta).collect()
    }

    fn chunk(index: u32, delta: ChatDelta) -> ChunkEntry {
        let logprobs = Value::Null;
        ChunkEntry { index, delta, logprobs, finish_reason: None, token_ids: None, stop_reason: None }
    }

    fn finish_reason(&self, calls: usize, finish: &FinishCause) -> &'static str {
        match finish {
            // As OpenAI does: the client of a named tool knows that there is a call.
            FinishCause::StopToken(_) | FinishCause::StopString(_)
                if calls > 0 && self.calls.choice != ToolChoice::Named =>
            {
                "tool_calls"
            }
            finish => finish.reason(),
        }
    }

    /// The message of a whole reply, and the number of its calls.
    fn message(&mut self, choice: u32, text: String) -> (Value, usize) {
        let choice = &mut self.choices[choice as usize];
        let Some(parser) = choice.parser.take() else {
            return (json!({"role": "assistant", "content": text, "refusal": null}), 0);
        };
        let mut events = std::mem::take(&mut choice.events);
        events.extend(parser.finish());
        let (mut content, mut reasoning) = (String::new(), String::new());
        let mut calls: Vec<Value> = Vec::new();
        let mut arguments: Vec<String> = Vec::new();
        for event in events {
            match event {
                ChatEvent::Text(text) => content.push_str(&text),
                ChatEvent::Reasoning(text) => reasoning.push_str(&text),
                ChatEvent::CallStarted { index, id, name } => {
                    calls.extend(self.calls.call(index, id, &name));
                    arguments.push(String::new());
                }
                ChatEvent::Arguments { index, json } => arguments[index].push_str(&json),
                ChatEvent::CallEnded { .. } => {}
            }
        }
        for (call, arguments) in calls.iter_mut().zip(arguments) {
            call["function"]["arguments"] = json!(arguments);
            call.as_object_mut().and_then(|call| call.shift_remove("index"));
        }
        let has_no_content = content.trim().is_empty() && !(calls.is_empty() && reasoning.is_empty());
        let content = if has_no_content { Value::Null } else { json!(content) };
        let mut message = json!({"role": "assistant", "content": content, "refusal": null});
        if !reasoning.is_empty() && self.fields.with_reasoning {
            message["reasoning_content"] = json!(reasoning);
        }
        let count = calls.len();
        if count > 0 {
            message["tool_calls"] = Value::Array(calls);
        }
        (message, count)
    }
}

impl CallWriter {
    pub(super) fn new(tools: &RequestTools, format: Option<ToolFormat>) -> Self {
        let is_single = !tools.parallel || tools.choice == ToolChoice::Named;
        Self { choice: tools.choice, is_single, format }
    }

    pub(super) fn writes(self, index: usize) -> bool {
        self.choice != ToolChoice::None && (index == 0 || !self.is_single)
    }

    /// The id of a call. `id` is the one that the model wrote.
    pub(super) fn id(self, id: Option<String>) -> String {
        let random = ClientRequestId::random().0;
        match (self.format, id) {
            (Some(ToolFormat::KimiK2), Some(id)) => id,
            // Mistral's templates accept ids of 9 letters and digits only.
            (Some(ToolFormat::Mistral), Some(id))
                if id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric()) =>
            {
                id
            }
            (Some(ToolFormat::Mistral), _) => random[..9].to_owned(),
            _ => format!("call_{}", &random[..24]),
        }
    }

    /// The beginning of a call, with an id.
    fn call(self, index: usize, id: Option<String>, name: &str) -> Option<Value> {
        let id = self.id(id);
        let function = json!({"name": name, "arguments": ""});
        self.writes(index)
            .then(|| json!({"index": index, "id": id, "type": "function", "function": function}))
    }
}

impl ChoiceFormat for ChatReply {
    type ChunkEntry = ChunkEntry;
    type WholeEntry = WholeEntry;

    fn first_entry(&mut self, choice: u32) -> Option<ChunkEntry> {
        Some(Self::chunk(choice, ChatDelta::Other(json!({"role": "assistant", "content": ""}))))
    }

    fn delta_entries(&mut self, delta: OutputDelta, mut write: impl FnMut(&ChunkEntry)) {
        let choice = delta.choice;
        let mut logprobs = self.logprobs(&delta);
        let mut token_ids = self.fields.with_token_ids.then(|| delta.tokens.clone());
        let mut deltas = match self.push(choice, delta.tokens.len(), &delta.text) {
            Some(events) => self.deltas(choice, events),
            None => vec![ChatDelta::Text { content: delta.text }],
        };
        if deltas.is_empty() && (token_ids.is_some() || !logprobs.is_null()) {
            deltas.push(ChatDelta::Other(json!({})));
        }
        // Log probabilities and ids are in the first chunk.
        for delta in deltas {
            let (logprobs, token_ids) = (std::mem::take(&mut logprobs), token_ids.take());
            write(&ChunkEntry { logprobs, token_ids, ..Self::chunk(choice, delta) });
        }
    }

    fn last_entries(&mut self, choice: u32, finish: &FinishCause) -> Vec<ChunkEntry> {
        let rest = self.choices[choice as usize].parser.take().map(OutputParser::finish).unwrap_or_default();
        let deltas = self.deltas(choice, rest);
        let mut entries: Vec<ChunkEntry> =
            deltas.into_iter().map(|delta| Self::chunk(choice, delta)).collect();
        entries.push(ChunkEntry {
            finish_reason: Some(self.finish_reason(self.choices[choice as usize].calls, finish)),
            stop_reason: Some(stop_reason(finish)),
            ..Self::chunk(choice, ChatDelta::Other(json!({})))
        });
        entries
    }

    fn read_delta(&mut self, delta: &OutputDelta) {
        if let Some(events) = self.push(delta.choice, delta.tokens.len(), &delta.text) {
            self.choices[delta.choice as usize].events.extend(events);
        }
    }

    fn whole_entry(&mut self, delta: OutputDelta, finish: &FinishCause) -> WholeEntry {
        let logprobs = self.logprobs(&delta);
        let (message, calls) = self.message(delta.choice, delta.text);
        WholeEntry {
            index: delta.choice,
            message,
            logprobs,
            finish_reason: self.finish_reason(calls, finish),
            stop_reason: stop_reason(finish),
            token_ids: self.fields.with_token_ids.then_some(delta.tokens),
        }
    }

    fn reasoning_tokens(&self) -> Option<u64> {
        self.reasoning_tokens
    }

    fn envelope(&self, streaming: bool) -> Value {
        let mut value = json!({
            "id": self.fields.id,
            "object": if streaming { "chat.completion.chunk" } else { "chat.completion" },
            "created": self.fields.created,
            "model": self.model.name(),
            "system_fingerprint": self.model.system_fingerprint(),
        });
        if self.fields.with_token_ids && !streaming {
            value["prompt_token_ids"] = json!(self.prompt_token_ids);
        }
        if let Some(scores) = &self.fields.prompt_logprobs {
            value["prompt_logprobs"] = scores.clone();
        }
        value
    }
}
