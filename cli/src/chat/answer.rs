// SPDX-License-Identifier: Apache-2.0

//! [`AnswerStream`]: reads the stream of one answer, piece by piece. What has come is kept, however
//! the stream ends.

use std::time::Instant;

use loadgen::serving::{SseReader, error_text};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::time::timeout;

use super::conversation::{ChatTurnMessage, MessageRole, ToolCall};
use super::server::{ChatServerError, STALL_TIMEOUT, root_cause};

/// An answer of 100,000 tokens with 600 bytes an event.
const STREAM_BYTES_MAX: usize = 64 << 20;
/// Calls of tools in one answer.
const TOOL_CALLS_MAX: usize = 128;

/// A piece of an answer's text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum AnswerPiece {
    Reasoning(String),
    Text(String),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AnswerUsage {
    pub(crate) prompt_tokens: u64,
    pub(crate) completion_tokens: u64,
}

/// What has come of an answer.
#[derive(Debug, Default)]
pub(crate) struct ChatAnswer {
    pub(crate) reasoning: String,
    pub(crate) text: String,
    pub(crate) tool_calls: Vec<ToolCall>,
    pub(crate) finish_reason: Option<String>,
    pub(crate) usage: Option<AnswerUsage>,
}

#[derive(Deserialize)]
struct AnswerChunk {
    #[serde(default)]
    choices: Vec<AnswerChunkChoice>,
    usage: Option<AnswerUsage>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct AnswerChunkChoice {
    delta: Option<AnswerDelta>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct AnswerDelta {
    content: Option<String>,
    /// Reasoning has two names: that of DeepSeek's API, and that of vLLM since 0.12.
    reasoning_content: Option<String>,
    reasoning: Option<String>,
    tool_calls: Option<Vec<CallDelta>>,
}

#[derive(Deserialize)]
struct CallDelta {
    #[serde(default)]
    index: usize,
    id: Option<String>,
    function: Option<FunctionDelta>,
}

#[derive(Deserialize)]
struct FunctionDelta {
    name: Option<String>,
    arguments: Option<String>,
}

impl ChatAnswer {
    /// The message of the assistant. Calls are complete only if the stream has ended.
    pub(crate) fn message(&self, with_calls: bool) -> ChatTurnMessage {
        let tool_calls = if with_calls { self.tool_calls.clone() } else { Vec::new() };
        ChatTurnMessage { tool_calls, ..ChatTurnMessage::new(MessageRole::Assistant, self.text.clone()) }
    }

    fn take(&mut self, delta: AnswerDelta) -> Vec<AnswerPiece> {
        let mut pieces = Vec::new();
        let is_text = |text: &String| !text.is_empty();
        if let Some(text) = delta.reasoning_content.or(delta.reasoning).filter(is_text) {
            self.reasoning.push_str(&text);
            pieces.push(AnswerPiece::Reasoning(text));
        }
        if let Some(text) = delta.content.filter(is_text) {
            self.text.push_str(&text);
            pieces.push(AnswerPiece::Text(text));
        }
        delta.tool_calls.into_iter().flatten().for_each(|call| self.take_call(call));
        pieces
    }

    /// The first delta of a call has its id and name, the next ones pieces of its arguments.
    fn take_call(&mut self, delta: CallDelta) {
        if delta.index >= TOOL_CALLS_MAX {
            return;
        }
        if self.tool_calls.len() <= delta.index {
            let call = ToolCall { kind: "function".to_owned(), ..ToolCall::default() };
            self.tool_calls.resize(delta.index + 1, call);
        }
        let call = &mut self.tool_calls[delta.index];
        call.id.extend(delta.id);
        if let Some(function) = delta.function {
            call.function.name.extend(function.name);
            call.function.arguments.extend(function.arguments);
        }
    }
}

pub(crate) struct AnswerStream {
    response: reqwest::Response,
    server: String,
    events: SseReader,
    bytes: usize,
    is_done: bool,
    pub(crate) answer: ChatAnswer,
    /// When the response began.
    pub(crate) began: Instant,
}

impl AnswerStream {
    pub(super) fn new(response: reqwest::Response, server: String) -> Self {
        Self {
            response,
            server,
            events: SseReader::default(),
            bytes: 0,
            is_done: false,
            answer: ChatAnswer::default(),
            began: Instant::now(),
        }
    }

    /// The next pieces; none at the end of the answer. May be cancelled: nothing is lost.
    pub(crate) async fn next(&mut self) -> Result<Option<Vec<AnswerPiece>>, ChatServerError> {
        while !self.is_done {
            let server = || self.server.clone();
            let chunk = timeout(STALL_TIMEOUT, self.response.chunk()).await;
            let chunk = chunk.map_err(|_| ChatServerError::Stalled { server: server() })?;
            let cut = |cause| ChatServerError::Cut { server: server(), cause };
            let chunk = chunk.map_err(|error| cut(root_cause(&error)))?;
            // Some servers end the stream without `[DONE]`; a finish reason is an end too.
            let Some(chunk) = chunk else {
                return match self.answer.finish_reason {
                    Some(_) => Ok(None),
                    None => Err(cut("the connection is closed".to_owned())),
                };
            };
            self.bytes += chunk.len();
            let too_long = || ChatServerError::TooLong { server: server() };
            let events = self.events.push(&chunk).map_err(|_| too_long())?;
            if self.bytes > STREAM_BYTES_MAX {
                return Err(too_long());
            }
            let mut pieces = Vec::new();
            for event in &events {
                pieces.extend(self.event(event)?);
            }
            if !pieces.is_empty() {
                return Ok(Some(pieces));
            }
        }
        Ok(None)
    }

    fn event(&mut self, data: &str) -> Result<Vec<AnswerPiece>, ChatServerError> {
        if data.trim() == "[DONE]" {
            self.is_done = true;
            return Ok(Vec::new());
        }
        let server = || self.server.clone();
        let chunk: AnswerChunk = serde_json::from_str(data)
            .map_err(|source| ChatServerError::Malformed { server: server(), source })?;
        if let Some(error) = chunk.error {
            let text = error_text(&error.to_string());
            return Err(ChatServerError::InStream { server: server(), text });
        }
        self.answer.usage = chunk.usage.or(self.answer.usage);
        let Some(choice) = chunk.choices.into_iter().next() else { return Ok(Vec::new()) };
        if choice.finish_reason.is_some() {
            self.answer.finish_reason = choice.finish_reason;
        }
        Ok(choice.delta.map(|delta| self.answer.take(delta)).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn text_reasoning_and_calls_come_together_from_their_deltas() {
        let mut answer = ChatAnswer::default();
        let mut take = |delta: Value| answer.take(serde_json::from_value(delta).unwrap());
        assert_eq!(take(json!({"role": "assistant", "content": ""})), []);
        assert_eq!(take(json!({"reasoning": "hm"})), [AnswerPiece::Reasoning("hm".to_owned())]);
        assert_eq!(take(json!({"content": "a"})), [AnswerPiece::Text("a".to_owned())]);
        take(json!({"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "g", "arguments": ""}}]}));
        take(
            json!({"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "f", "arguments": "{\"a\""}}]}),
        );
        take(json!({"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]}));
        take(json!({"tool_calls": [{"index": 1_000_000, "function": {"arguments": ":1}"}}]}));
        let message = answer.message(true);
        let calls: Vec<_> = message
            .tool_calls
            .iter()
            .map(|call| (call.id.as_str(), call.function.arguments.as_str()))
            .collect();
        assert_eq!((message.content.as_str(), calls), ("a", vec![("c1", "{\"a\":1}"), ("c2", "")]));
        assert!(answer.message(false).tool_calls.is_empty());
    }
}
