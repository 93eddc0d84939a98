// SPDX-License-Identifier: Apache-2.0

//! `continue_final_message`: cuts a prompt at the end of the last message's text, so that the model
//! continues that message instead of starting another one.
//!
//! As in Hugging Face's code, a mark is appended to the text before rendering, and the prompt is
//! cut at the mark. Templates that trim a message trim after the mark.

use serde_json::Value;

use super::error::RenderError;

/// The final blank shows whether the template trims the message.
const MARK: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

#[derive(Debug)]
pub(super) struct ContinuedMessage {
    text: String,
}

impl ContinuedMessage {
    /// Appends the mark to the last message's text.
    pub(super) fn mark(messages: &mut [Value]) -> Result<Self, RenderError> {
        let failed = |problem| RenderError::Continuation { problem };
        let content = messages.last_mut().and_then(|message| message.get_mut("content"));
        let text = match content {
            Some(Value::String(text)) => text,
            Some(Value::Array(parts)) => {
                let last = parts.iter_mut().rev().find_map(|part| part.get_mut("text"));
                match last {
                    Some(Value::String(text)) => text,
                    _ => return Err(failed("it has no text")),
                }
            }
            _ => return Err(failed("it has no text")),
        };
        let original = text.clone();
        text.push_str(MARK);
        Ok(Self { text: original })
    }

    /// Cuts the rendered prompt at the mark.
    pub(super) fn cut(&self, mut prompt: String) -> Result<String, RenderError> {
        let at = prompt.rfind(MARK.trim_end()).filter(|_| prompt.contains(self.text.trim()));
        let at =
            at.ok_or(RenderError::Continuation { problem: "the chat template does not print its text" })?;
        let is_trimmed = !prompt[at..].starts_with(MARK);
        prompt.truncate(at);
        if is_trimmed {
            prompt.truncate(prompt.trim_end().len());
        }
        Ok(prompt)
    }
}
