// SPDX-License-Identifier: Apache-2.0

//! The server that is measured, and the requests in its API.

use std::str::FromStr;

use serde_json::{Value, json};

/// Which API takes the prompts. The names are those of vLLM's `--backend`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServingBackend {
    /// `/v1/completions`
    Completions,
    /// `/v1/chat/completions`
    Chat,
}

impl ServingBackend {
    pub fn name(self) -> &'static str {
        match self {
            Self::Completions => "openai",
            Self::Chat => "openai-chat",
        }
    }

    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
        }
    }
}

impl FromStr for ServingBackend {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [Self::Completions, Self::Chat]
            .into_iter()
            .find(|backend| backend.name() == text)
            .ok_or_else(|| format!("{text:?} is neither \"openai\" (completions) nor \"openai-chat\""))
    }
}

/// What all requests have in common.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestTemplate {
    pub backend: ServingBackend,
    pub model: String,
    pub temperature: f64,
    /// The answer goes on to its full length, so that every run does the same work.
    pub ignore_eos: bool,
}

/// A prompt and its answer, earlier in the conversation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PastTurn {
    pub(crate) prompt: String,
    pub(crate) answer: String,
}

impl RequestTemplate {
    pub(crate) fn body(&self, past: &[PastTurn], prompt: &str, output_tokens: u32) -> Value {
        let mut body = json!({
            "model": self.model,
            "max_tokens": output_tokens,
            "temperature": self.temperature,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        if self.ignore_eos {
            // Not in OpenAI's own API, which refuses it.
            body["ignore_eos"] = json!(true);
        }
        let message = |role: &str, content: &str| json!({"role": role, "content": content});
        match self.backend {
            ServingBackend::Completions => {
                let lines = past.iter().flat_map(|turn| [turn.prompt.as_str(), turn.answer.as_str()]);
                body["prompt"] = lines.chain([prompt]).collect::<Vec<_>>().join("\n").into();
            }
            ServingBackend::Chat => {
                let earlier = past
                    .iter()
                    .flat_map(|turn| [message("user", &turn.prompt), message("assistant", &turn.answer)]);
                body["messages"] = earlier.chain([message("user", prompt)]).collect();
            }
        }
        body
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(backend: ServingBackend, ignore_eos: bool) -> Value {
        let template = RequestTemplate { backend, model: "m".to_owned(), temperature: 0.0, ignore_eos };
        let past = PastTurn { prompt: "one".to_owned(), answer: "two".to_owned() };
        template.body(&[past], "three", 9)
    }

    #[test]
    fn a_conversation_is_sent_whole() {
        let chat = body(ServingBackend::Chat, true);
        let roles: Vec<_> = chat["messages"].as_array().unwrap().iter().map(|m| m["role"].as_str()).collect();
        assert_eq!(roles, [Some("user"), Some("assistant"), Some("user")]);
        assert_eq!(chat["messages"][2]["content"], "three");
        assert_eq!(body(ServingBackend::Completions, true)["prompt"], "one\ntwo\nthree");
    }

    #[test]
    fn requests_stream_with_usage() {
        let body = body(ServingBackend::Completions, false);
        assert_eq!((&body["stream"], &body["max_tokens"]), (&json!(true), &json!(9)));
        assert_eq!(body["stream_options"]["include_usage"], true);
        assert!(body.get("ignore_eos").is_none());
    }
}
