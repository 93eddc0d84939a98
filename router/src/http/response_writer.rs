// SPDX-License-Identifier: Apache-2.0

//! Writes a reply as OpenAI's responses API does: a list of items, and numbered events.

use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::reply_stream::{NamedEvents, ReplyEnd, ReplyPart, ReplyUsage, ReplyWriter};
use super::request::RequestMetadata;
use crate::admission::Tenant;
use crate::choice::FinishCause;
use crate::model::ServedModel;
use crate::request_id::ClientRequestId;
use crate::response_store::{ResponseStore, StoredResponse};
use crate::sampling_defaults::decimal;

/// What a response says of its request: the field, and its value if the client sent none. Sampling
/// parameters have defaults of the model.
fn echoed() -> [(&'static str, Value); 18] {
    [
        ("instructions", Value::Null),
        ("max_output_tokens", Value::Null),
        ("max_tool_calls", Value::Null),
        ("parallel_tool_calls", json!(true)),
        ("previous_response_id", Value::Null),
        ("prompt_cache_key", Value::Null),
        ("reasoning", json!({"effort": null, "summary": null})),
        ("safety_identifier", Value::Null),
        ("service_tier", json!("default")),
        ("store", json!(true)),
        ("temperature", Value::Null),
        ("text", json!({"format": {"type": "text"}})),
        ("tool_choice", json!("auto")),
        ("tools", json!([])),
        ("top_p", Value::Null),
        ("truncation", json!("disabled")),
        ("user", Value::Null),
        ("metadata", json!({})),
    ]
}

/// The response without its output.
pub(super) struct ResponseEcho(Map<String, Value>);

impl ResponseEcho {
    pub(super) fn new(fields: &Map<String, Value>, metadata: &RequestMetadata) -> Self {
        let mut echo = Map::new();
        echo.insert("id".to_owned(), json!(format!("resp_{}", ClientRequestId::random().0)));
        echo.insert("object".to_owned(), json!("response"));
        echo.insert("created_at".to_owned(), json!(metadata.created_unix_seconds));
        echo.insert("background".to_owned(), json!(false));
        for (name, default) in echoed() {
            echo.insert(name.to_owned(), fields.get(name).cloned().unwrap_or(default));
        }
        Self(echo)
    }

    pub(super) fn with_model(mut self, model: &ServedModel) -> Self {
        self.0.insert("model".to_owned(), json!(model.name()));
        let defaults = &model.description.sampling_defaults;
        for (name, default, parameter) in [
            ("temperature", defaults.temperature, &sampling_params::TEMPERATURE),
            ("top_p", defaults.top_p, &sampling_params::TOP_P),
        ] {
            if let Some(value @ Value::Null) = self.0.get_mut(name) {
                *value = decimal(default.unwrap_or(parameter.default));
            }
        }
        self
    }
}

pub(super) struct ResponseWriter {
    echo: Map<String, Value>,
    tenant: Tenant,
    /// The conversation before this reply.
    messages: Vec<Value>,
    store: Option<ResponseStore>,
    sequence_number: u64,
    /// Complete items.
    output: Vec<Value>,
    open: Option<OpenItem>,
    whole: Value,
}

/// The item that is being written.
struct OpenItem {
    kind: ItemKind,
    id: String,
    text: String,
}

enum ItemKind {
    Message,
    Reasoning,
    Call { call_id: String, name: String },
}

impl OpenItem {
    fn json(&self, status: &str) -> Value {
        let (id, text) = (&self.id, &self.text);
        match &self.kind {
            ItemKind::Message => json!({
                "id": id, "type": "message", "status": status, "role": "assistant",
                "content": if status == "in_progress" { json!([]) } else { json!([text_part(text)]) },
            }),
            ItemKind::Reasoning => json!({
                "id": id, "type": "reasoning", "status": status, "summary": [],
                "content": if status == "in_progress" { json!([]) } else { json!([reasoning_part(text)]) },
            }),
            ItemKind::Call { call_id, name } => json!({
                "id": id, "type": "function_call", "status": status, "call_id": call_id, "name": name,
                "arguments": text,
            }),
        }
    }

    fn part(&self) -> Option<Value> {
        match self.kind {
            ItemKind::Message => Some(text_part(&self.text)),
            ItemKind::Reasoning => Some(reasoning_part(&self.text)),
            ItemKind::Call { .. } => None,
        }
    }
}

fn text_part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

fn reasoning_part(text: &str) -> Value {
    json!({"type": "reasoning_text", "text": text})
}

impl ResponseWriter {
    pub(super) fn new(
        echo: ResponseEcho,
        tenant: Tenant,
        messages: Vec<Value>,
        store: Option<ResponseStore>,
    ) -> Self {
        Self {
            echo: echo.0,
            tenant,
            messages,
            store,
            sequence_number: 0,
            output: Vec::new(),
            open: None,
            whole: Value::Null,
        }
    }

    fn event(&mut self, out: &mut NamedEvents, name: &str, fields: Value) {
        let mut event = json!({"type": name, "sequence_number": self.sequence_number});
        self.sequence_number += 1;
        if let (Value::Object(event), Value::Object(fields)) = (&mut event, fields) {
            event.extend(fields);
        }
        out.push(&event);
    }

    fn response(&self, status: &str) -> Value {
        let mut response = self.echo.clone();
        response.insert("status".to_owned(), json!(status));
        response.insert("error".to_owned(), Value::Null);
        response.insert("incomplete_details".to_owned(), Value::Null);
        response.insert("output".to_owned(), json!(self.output));
        response.insert("usage".to_owned(), Value::Null);
        Value::Object(response)
    }

    fn begin_item(&mut self, kind: ItemKind, out: &mut NamedEvents) {
        self.end_item("completed", out);
        let prefix = match kind {
            ItemKind::Message => "msg",
            ItemKind::Reasoning => "rs",
            ItemKind::Call { .. } => "fc",
        };
        let id = format!("{prefix}_{}", ClientRequestId::random().0);
        let item = OpenItem { kind, id, text: String::new() };
        let index = self.output.len();
        self.event(
            out,
            "response.output_item.added",
            json!({"output_index": index, "item": item.json("in_progress")}),
        );
        if let Some(part) = item.part() {
            let fields = json!({"item_id": item.id, "output_index": index, "content_index": 0, "part": part});
            self.event(out, "response.content_part.added", fields);
        }
        self.open = Some(item);
    }

    fn append(&mut self, text: &str, out: &mut NamedEvents) {
        let index = self.output.len();
        let Some(item) = &mut self.open else { return };
        item.text.push_str(text);
        let mut fields = json!({"item_id": item.id, "output_index": index, "delta": text});
        let name = match item.kind {
            ItemKind::Message => {
                fields["content_index"] = json!(0);
                fields["logprobs"] = json!([]);
                "response.output_text.delta"
            }
            ItemKind::Reasoning => {
                fields["content_index"] = json!(0);
                "response.reasoning_text.delta"
            }
            ItemKind::Call { .. } => "response.function_call_arguments.delta",
        };
        self.event(out, name, fields);
    }

    fn end_item(&mut self, status: &str, out: &mut NamedEvents) {
        let Some(item) = self.open.take() else { return };
        let index = self.output.len();
        let place = json!({"item_id": item.id, "output_index": index});
        let with = |more: Value| {
            let mut fields = place.clone();
            if let (Value::Object(fields), Value::Object(more)) = (&mut fields, more) {
                fields.extend(more);
            }
            fields
        };
        match &item.kind {
            ItemKind::Message => {
                let fields = with(json!({"content_index": 0, "text": item.text, "logprobs": []}));
                self.event(out, "response.output_text.done", fields);
            }
            ItemKind::Reasoning => {
                let fields = with(json!({"content_index": 0, "text": item.text}));
                self.event(out, "response.reasoning_text.done", fields);
            }
            ItemKind::Call { name, .. } => {
                let fields = with(json!({"arguments": item.text, "name": name}));
                self.event(out, "response.function_call_arguments.done", fields);
            }
        }
        if let Some(part) = item.part() {
            let fields = with(json!({"content_index": 0, "part": part}));
            self.event(out, "response.content_part.done", fields);
        }
        let done = item.json(status);
        self.event(out, "response.output_item.done", json!({"output_index": index, "item": done}));
        self.output.push(done);
    }

    /// Keeps the conversation with this reply.
    fn store(&mut self) {
        let (Some(store), Some(id)) = (&self.store, self.whole["id"].as_str()) else { return };
        let mut messages = std::mem::take(&mut self.messages);
        messages.push(assistant_message(&self.output));
        let stored = StoredResponse {
            body: self.whole.to_string().into_bytes().into(),
            messages: json!(messages).to_string().into_bytes().into(),
        };
        store.insert(id.to_owned(), self.tenant.clone(), stored);
    }
}

/// The reply as the next request of a chat has it.
fn assistant_message(output: &[Value]) -> Value {
    let of_kind = |kind: &'static str| output.iter().filter(move |item| item["type"] == kind);
    let text = |kind: &'static str| -> String {
        of_kind(kind).filter_map(|item| item["content"][0]["text"].as_str()).collect()
    };
    let calls: Vec<Value> = of_kind("function_call")
        .map(|item| {
            let function = json!({"name": item["name"], "arguments": item["arguments"]});
            json!({"id": item["call_id"], "type": "function", "function": function})
        })
        .collect();
    let mut message = json!({"role": "assistant", "content": text("message")});
    let reasoning = text("reasoning");
    if !reasoning.is_empty() {
        message["reasoning_content"] = json!(reasoning);
    }
    if !calls.is_empty() {
        message["tool_calls"] = json!(calls);
    }
    message
}

fn usage_json(usage: ReplyUsage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    })
}

impl ReplyWriter for ResponseWriter {
    fn begin(&mut self, out: &mut NamedEvents) {
        for name in ["response.created", "response.in_progress"] {
            let response = self.response("in_progress");
            self.event(out, name, json!({"response": response}));
        }
    }

    fn write(&mut self, part: ReplyPart, out: &mut NamedEvents) {
        let is_open = |kind: fn(&ItemKind) -> bool| self.open.as_ref().is_some_and(|item| kind(&item.kind));
        match part {
            ReplyPart::Text(text) => {
                if !is_open(|kind| matches!(kind, ItemKind::Message)) {
                    // White space between calls is no message of its own.
                    if text.trim().is_empty() && (self.open.is_some() || !self.output.is_empty()) {
                        return;
                    }
                    self.begin_item(ItemKind::Message, out);
                }
                self.append(&text, out);
            }
            ReplyPart::Reasoning(text) => {
                if !is_open(|kind| matches!(kind, ItemKind::Reasoning)) {
                    self.begin_item(ItemKind::Reasoning, out);
                }
                self.append(&text, out);
            }
            ReplyPart::CallStarted { id, name } => {
                self.begin_item(ItemKind::Call { call_id: id, name }, out);
            }
            ReplyPart::Arguments(json) => self.append(&json, out),
        }
    }

    fn end(&mut self, end: &ReplyEnd, out: &mut NamedEvents) {
        let is_complete = end.finish != FinishCause::Length;
        let status = if is_complete { "completed" } else { "incomplete" };
        if self.open.is_none() && self.output.is_empty() {
            self.begin_item(ItemKind::Message, out);
        }
        self.end_item(status, out);
        let mut whole = self.response(status);
        if !is_complete {
            whole["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        whole["usage"] = usage_json(end.usage);
        self.whole = whole;
        self.store();
        let whole = self.whole.clone();
        self.event(out, &format!("response.{status}"), json!({"response": whole}));
    }

    fn fail(&mut self, error: &ApiError, out: &mut NamedEvents) {
        let error = error.body()["error"].clone();
        let code = error["code"].as_str().unwrap_or("server_error").to_owned();
        let mut response = self.response("failed");
        response["error"] = json!({"code": code, "message": error["message"]});
        self.event(out, "response.failed", json!({"response": response}));
    }

    fn whole(&mut self) -> Value {
        std::mem::take(&mut self.whole)
    }
}
