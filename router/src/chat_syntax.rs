// SPDX-License-Identifier: Apache-2.0

//! How a model writes reasoning and tool calls, found in its chat template.

use chat_output::{ReasoningMarkers, ToolFormat};
use text::{EncodeOptions, TokenKind, Tokenizer};

#[derive(Clone, Debug)]
pub(crate) struct ChatSyntax {
    pub(crate) format: ToolFormat,
    /// `None`: the model does not reason, as far as its template shows.
    pub(crate) reasoning: Option<ReasoningMarkers>,
    /// The model begins with reasoning though no prompt opens it.
    pub(crate) always_reasons: bool,
    /// Mistral: a call's arguments follow `[ARGS]` (v11) instead of standing in a list.
    pub(crate) has_argument_marks: bool,
    /// DeepSeek V3 and R1: arguments stand in a fence.
    pub(crate) has_fences: bool,
}

impl ChatSyntax {
    pub(crate) fn of_template(source: &str) -> Self {
        let reasoning = ReasoningMarkers::of_template(source);
        Self {
            format: ToolFormat::of_template(source),
            always_reasons: reasoning.as_ref().is_some_and(|markers| markers.are_never_opened_by(source)),
            reasoning,
            has_argument_marks: source.contains("[ARGS]"),
            has_fences: source.contains("```json"),
        }
    }

    /// Whether output after this prompt begins inside reasoning.
    pub(crate) fn starts_in_reasoning(&self, prompt: &str) -> bool {
        self.always_reasons
            || self.reasoning.as_ref().is_some_and(|markers| markers.are_open_at_the_end_of(prompt))
    }

    /// Ids of the control tokens that the parser of the output has to see.
    pub(crate) fn visible_tokens(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let reasoning = self.reasoning.iter().flat_map(|markers| [&*markers.open, &*markers.close]);
        let texts = self.format.markers().iter().copied().chain(reasoning);
        let mut ids: Vec<u32> = texts.flat_map(|text| control_tokens(tokenizer, text)).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }
}

/// The control tokens in a text.
pub(crate) fn control_tokens(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    let options = EncodeOptions { add_special: false, parse_special: true };
    let mut ids = tokenizer.encode(text, options).unwrap_or_default();
    ids.retain(|&id| tokenizer.kind(id) == Some(TokenKind::Control));
    ids
}
