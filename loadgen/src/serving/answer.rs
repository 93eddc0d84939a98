// SPDX-License-Identifier: Apache-2.0

//! What came of a request: the times of an answer's tokens, or why there is no whole answer.

use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

/// Characters of a server's error text that are kept.
const ERROR_TEXT_CHARS_MAX: usize = 300;

/// A complete answer. Times count from the start of the run.
#[derive(Clone, Debug, PartialEq)]
pub struct StreamedAnswer {
    /// When events with text came. Never empty.
    pub token_times: Vec<Duration>,
    /// The last event of the choice.
    pub end: Duration,
    pub prompt_tokens: u64,
    pub output_tokens: u64,
    pub text: String,
}

/// Why a request has no complete answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestFailure {
    #[error("no connection: {0}")]
    Connect(String),
    #[error("HTTP {status}: {text}")]
    Status { status: u16, text: String },
    #[error("the stream ends with an error: {0}")]
    StreamError(String),
    #[error("no event for {} s", .0.as_secs_f64())]
    Stalled(Duration),
    #[error("the stream breaks off before [DONE]")]
    Cut,
    #[error("the stream has no usage: the server does not support stream_options.include_usage")]
    NoUsage,
    #[error("the stream has no token")]
    NoTokens,
    #[error("an event is no chunk of a completion: {0}")]
    Malformed(String),
    #[error("an event is longer than 1 MiB, or the stream than 64 MiB")]
    TooLong,
}

impl RequestFailure {
    /// Failures are counted by kind: the status, or what broke.
    pub fn kind(&self) -> String {
        match self {
            Self::Connect(_) => "no connection".to_owned(),
            Self::Status { status, .. } => format!("HTTP {status}"),
            Self::StreamError(_) => "error in the stream".to_owned(),
            Self::Stalled(_) => "stalled".to_owned(),
            Self::Cut => "cut".to_owned(),
            Self::NoUsage => "no usage".to_owned(),
            Self::NoTokens => "no token".to_owned(),
            Self::Malformed(_) => "malformed".to_owned(),
            Self::TooLong => "too long".to_owned(),
        }
    }
}

/// The message of an OpenAI error object, or the beginning of another text.
pub fn error_text(body: &str) -> String {
    let message = serde_json::from_str::<Value>(body).ok().and_then(|value| {
        let error = value.get("error").unwrap_or(&value);
        let message = error.get("message").unwrap_or(error);
        message.as_str().map(str::to_owned)
    });
    let text = message.unwrap_or_else(|| body.trim().to_owned());
    text.chars().take(ERROR_TEXT_CHARS_MAX).collect()
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<ChunkChoice>,
    usage: Option<Usage>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct ChunkChoice {
    text: Option<String>,
    delta: Option<ChunkDelta>,
}

#[derive(Deserialize)]
struct ChunkDelta {
    content: Option<String>,
    /// Reasoning has two names: that of DeepSeek's API, and that of vLLM since 0.12.
    reasoning_content: Option<String>,
    reasoning: Option<String>,
    tool_calls: Option<Vec<Value>>,
}

#[derive(Clone, Copy, Deserialize)]
struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
}

/// Reads the events of one stream. The stream is a complete answer if it has tokens, usage and
/// `[DONE]`; nothing else is a success.
#[derive(Default)]
pub(crate) struct AnswerReader {
    token_times: Vec<Duration>,
    end: Option<Duration>,
    text: String,
    usage: Option<Usage>,
    pub(crate) is_done: bool,
}

impl AnswerReader {
    /// Takes the data of an event that came at this time.
    pub(crate) fn event(&mut self, data: &str, at: Duration) -> Result<(), RequestFailure> {
        if data.trim() == "[DONE]" {
            self.is_done = true;
            return Ok(());
        }
        let malformed = |error: serde_json::Error| RequestFailure::Malformed(error.to_string());
        let chunk: Chunk = serde_json::from_str(data).map_err(malformed)?;
        if let Some(error) = chunk.error {
            return Err(RequestFailure::StreamError(error_text(&error.to_string())));
        }
        if let Some(choice) = chunk.choices.into_iter().next() {
            self.end = Some(at);
            if self.take_text(choice) {
                self.token_times.push(at);
            }
        }
        self.usage = chunk.usage.or(self.usage);
        Ok(())
    }

    /// Whether the choice has output. The first chunk of a chat has a role only, the last one a
    /// finish reason only.
    fn take_text(&mut self, choice: ChunkChoice) -> bool {
        let delta = choice.delta;
        let has_calls =
            delta.as_ref().and_then(|delta| delta.tool_calls.as_ref()).is_some_and(|c| !c.is_empty());
        let (content, reasoning) = match delta {
            Some(delta) => (delta.content, delta.reasoning_content.or(delta.reasoning)),
            None => (choice.text, None),
        };
        let content = content.unwrap_or_default();
        let has_text = !content.is_empty() || reasoning.is_some_and(|text| !text.is_empty());
        self.text.push_str(&content);
        has_text || has_calls
    }

    /// The answer, at the end of the stream.
    pub(crate) fn finish(mut self) -> Result<StreamedAnswer, RequestFailure> {
        if !self.is_done {
            return Err(RequestFailure::Cut);
        }
        let usage = self.usage.ok_or(RequestFailure::NoUsage)?;
        let end = self.end.filter(|_| usage.completion_tokens > 0).ok_or(RequestFailure::NoTokens)?;
        if self.token_times.is_empty() {
            // Tokens without text, such as the first half of a character: the end shows them.
            self.token_times.push(end);
        }
        Ok(StreamedAnswer {
            token_times: self.token_times,
            end,
            prompt_tokens: usage.prompt_tokens,
            output_tokens: usage.completion_tokens,
            text: self.text,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const USAGE: &str = r#"{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}"#;

    fn read(events: &[&str]) -> Result<StreamedAnswer, RequestFailure> {
        let mut reader = AnswerReader::default();
        for (at, event) in events.iter().enumerate() {
            reader.event(event, Duration::from_secs(at as u64))?;
        }
        reader.finish()
    }

    #[test]
    fn a_chat_counts_from_its_first_text_and_not_from_its_role() {
        let answer = read(&[
            r#"{"choices": [{"delta": {"role": "assistant", "content": ""}}]}"#,
            r#"{"choices": [{"delta": {"reasoning_content": "hm"}}], "usage": null}"#,
            r#"{"choices": [{"delta": {"content": "a"}}]}"#,
            r#"{"choices": [{"delta": {}, "finish_reason": "stop"}]}"#,
            USAGE,
            "[DONE]",
        ])
        .unwrap();
        assert_eq!(answer.token_times, [1, 2].map(Duration::from_secs));
        assert_eq!((answer.end, answer.text.as_str()), (Duration::from_secs(3), "a"));
        assert_eq!((answer.prompt_tokens, answer.output_tokens), (7, 3));
    }

    #[test]
    fn a_completion_counts_its_texts() {
        let text = r#"{"choices": [{"text": "x", "index": 0}]}"#;
        let answer = read(&[text, text, USAGE, "[DONE]"]).unwrap();
        assert_eq!((answer.token_times.len(), answer.text.as_str()), (2, "xx"));
    }

    #[test]
    fn a_stream_that_breaks_off_is_never_a_success() {
        let text = r#"{"choices": [{"text": "x", "finish_reason": "stop"}]}"#;
        assert_eq!(read(&[text, USAGE]), Err(RequestFailure::Cut));
        assert_eq!(read(&[text, "[DONE]"]), Err(RequestFailure::NoUsage));
        assert_eq!(read(&[USAGE, "[DONE]"]), Err(RequestFailure::NoTokens));
        assert_eq!(read(&[]), Err(RequestFailure::Cut));
        let error = r#"{"error": {"message": "the worker died", "code": 500}}"#;
        assert_eq!(read(&[text, error]), Err(RequestFailure::StreamError("the worker died".to_owned())));
        assert!(matches!(read(&[text, "{"]), Err(RequestFailure::Malformed(_))));
    }

    #[test]
    fn error_texts_are_short_and_without_their_json() {
        assert_eq!(error_text(r#"{"error": {"message": "no model"}}"#), "no model");
        assert_eq!(error_text(r#"{"error": "no model"}"#), "no model");
        assert_eq!(error_text(r#"{"message": "no model"}"#), "no model");
        assert_eq!(error_text(" plain\n"), "plain");
        assert_eq!(error_text(&"é".repeat(400)).chars().count(), 300);
    }
}
