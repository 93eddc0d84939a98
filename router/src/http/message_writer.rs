// SPDX-License-Identifier: Apache-2.0

//! Writes a reply as Anthropic's messages API does: a list of blocks, of which one is open at a
//! time.

use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::reply_stream::{NamedEvents, ReplyEnd, ReplyPart, ReplyUsage, ReplyWriter};
use crate::choice::FinishCause;

pub(super) struct MessageWriter {
    id: String,
    model: String,
    prompt_tokens: u64,
    /// Complete blocks.
    content: Vec<Value>,
    open: Option<OpenBlock>,
    has_calls: bool,
    whole: Value,
}

enum OpenBlock {
    Text(String),
    Thinking(String),
    ToolUse { id: String, name: String, input: String },
}

impl OpenBlock {
    fn start(&self) -> Value {
        match self {
            Self::Text(_) => json!({"type": "text", "text": ""}),
            Self::Thinking(_) => json!({"type": "thinking", "thinking": "", "signature": ""}),
            Self::ToolUse { id, name, .. } => {
                json!({"type": "tool_use", "id": id, "name": name, "input": {}})
            }
        }
    }

    fn whole(self) -> Value {
        match self {
            Self::Text(text) => json!({"type": "text", "text": text}),
            Self::Thinking(text) => json!({"type": "thinking", "thinking": text, "signature": ""}),
            Self::ToolUse { id, name, input } => {
                // Arguments that `max_tokens` cut are no JSON.
                let input: Value = serde_json::from_str(&input).unwrap_or_else(|_| Map::new().into());
                json!({"type": "tool_use", "id": id, "name": name, "input": input})
            }
        }
    }
}

impl MessageWriter {
    pub(super) fn new(id: String, model: String, prompt_tokens: u64) -> Self {
        let (content, whole) = (Vec::new(), Value::Null);
        Self { id, model, prompt_tokens, content, open: None, has_calls: false, whole }
    }

    fn message(&self, stop_reason: Value, stop_sequence: Value, usage: Value) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": self.content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": usage,
        })
    }

    fn begin_block(&mut self, block: OpenBlock, out: &mut NamedEvents) {
        self.end_block(out);
        let (index, start) = (self.content.len(), block.start());
        out.push(&json!({"type": "content_block_start", "index": index, "content_block": start}));
        self.open = Some(block);
    }

    fn delta(&self, delta: Value, out: &mut NamedEvents) {
        out.push(&json!({"type": "content_block_delta", "index": self.content.len(), "delta": delta}));
    }

    fn end_block(&mut self, out: &mut NamedEvents) {
        let Some(block) = self.open.take() else { return };
        if matches!(block, OpenBlock::Thinking(_)) {
            // Clients send it back. Nothing here checks it.
            self.delta(json!({"type": "signature_delta", "signature": ""}), out);
        }
        out.push(&json!({"type": "content_block_stop", "index": self.content.len()}));
        self.content.push(block.whole());
    }
}

/// As Anthropic counts: cached tokens are no input tokens.
fn usage_json(usage: ReplyUsage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens.saturating_sub(usage.cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
    })
}

impl ReplyWriter for MessageWriter {
    fn begin(&mut self, out: &mut NamedEvents) {
        let usage = usage_json(ReplyUsage { prompt_tokens: self.prompt_tokens, ..ReplyUsage::default() });
        let message = self.message(Value::Null, Value::Null, usage);
        out.push(&json!({"type": "message_start", "message": message}));
    }

    fn write(&mut self, part: ReplyPart, out: &mut NamedEvents) {
        match part {
            ReplyPart::Text(text) => {
                if !matches!(self.open, Some(OpenBlock::Text(_))) {
                    // White space between calls is no block of its own.
                    if text.trim().is_empty() && (self.open.is_some() || !self.content.is_empty()) {
                        return;
                    }
                    self.begin_block(OpenBlock::Text(String::new()), out);
                }
                self.delta(json!({"type": "text_delta", "text": text}), out);
                if let Some(OpenBlock::Text(whole)) = &mut self.open {
                    whole.push_str(&text);
                }
            }
            ReplyPart::Reasoning(text) => {
                if !matches!(self.open, Some(OpenBlock::Thinking(_))) {
                    self.begin_block(OpenBlock::Thinking(String::new()), out);
                }
                self.delta(json!({"type": "thinking_delta", "thinking": text}), out);
                if let Some(OpenBlock::Thinking(whole)) = &mut self.open {
                    whole.push_str(&text);
                }
            }
            ReplyPart::CallStarted { id, name } => {
                self.has_calls = true;
                self.begin_block(OpenBlock::ToolUse { id, name, input: String::new() }, out);
            }
            ReplyPart::Arguments(json) => {
                self.delta(json!({"type": "input_json_delta", "partial_json": json}), out);
                if let Some(OpenBlock::ToolUse { input, .. }) = &mut self.open {
                    input.push_str(&json);
                }
            }
        }
    }

    fn end(&mut self, end: &ReplyEnd, out: &mut NamedEvents) {
        self.end_block(out);
        let (reason, sequence) = match &end.finish {
            FinishCause::Length => ("max_tokens", Value::Null),
            FinishCause::StopString(stop) => ("stop_sequence", json!(stop)),
            FinishCause::StopToken(_) if self.has_calls => ("tool_use", Value::Null),
            FinishCause::StopToken(_) => ("end_turn", Value::Null),
        };
        let usage = usage_json(end.usage);
        self.whole = self.message(json!(reason), sequence.clone(), usage.clone());
        let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
        out.push(&json!({"type": "message_delta", "delta": delta, "usage": usage}));
        out.push(&json!({"type": "message_stop"}));
    }

    fn fail(&mut self, error: &ApiError, out: &mut NamedEvents) {
        out.push(&error.messages_body());
    }

    fn whole(&mut self) -> Value {
        std::mem::take(&mut self.whole)
    }
}
