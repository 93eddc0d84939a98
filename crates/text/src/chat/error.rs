// SPDX-License-Identifier: Apache-2.0

//! Errors of loading and rendering a chat template, and the limits that they name.

/// Most bytes of a template's source; the longest known templates have about 30 KiB.
pub const MAX_TEMPLATE_BYTES: usize = 1 << 20;
/// Most instructions of one rendering. Real templates take some hundreds for each message.
///
/// This limits time and the number of values, but not their size: a template that doubles a string
/// forty times stays far below it and asks for a terabyte. minijinja has no limit on memory and no
/// hook for one. So a template is tried in a child process with a limit before the model is loaded.
/// Clients send values for a template, never templates.
pub(super) const MAX_INSTRUCTIONS: u64 = 20_000_000;
/// Most instructions of one rendering of a short conversation, when a template is loaded.
pub(super) const MAX_LOAD_INSTRUCTIONS: u64 = 1_000_000;
/// Most bytes of a rendered prompt; the same as the tokenizer's limit.
pub(super) const MAX_OUTPUT_BYTES: usize = crate::tokenizer_error::MAX_INPUT_BYTES;

/// Why a chat template could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadTemplateError {
    #[error("the model has no chat template (tokenizer.chat_template): use plain completions")]
    Missing,
    #[error("cannot read the chat template keys of the file")]
    Metadata {
        #[from]
        source: gguf::KeyError,
    },
    #[error("{name} has {bytes} bytes, more than {MAX_TEMPLATE_BYTES}")]
    TooLong { name: &'static str, bytes: usize },
    #[error("{name} is not a valid template")]
    Syntax { name: &'static str, source: minijinja::Error },
    /// The template is valid, but not fit for use: it exceeds a limit with a short conversation.
    #[error("{name} cannot render a short conversation")]
    Excessive { name: &'static str, source: Box<RenderError> },
}

impl RenderError {
    /// The template itself exceeds a limit, however short the conversation is.
    pub(super) fn is_excessive(&self) -> bool {
        matches!(self, Self::TooLong | Self::TooMuchWork { .. })
    }
}

/// Why a conversation could not be rendered. Only the client can repair these errors, except
/// `Template` and `TooMuchWork`.
#[derive(Debug, thiserror::Error)]
pub enum RenderError {
    #[error("messages[{index}]: {problem}")]
    InvalidMessage { index: usize, problem: &'static str },
    #[error("messages[{index}]: content of type {kind:?} is not supported, only text is")]
    UnsupportedPart { index: usize, kind: String },
    #[error("a prompt that continues the final message has no generation prompt")]
    GenerationPromptAndContinuation,
    #[error("the final message cannot be continued: {problem}")]
    Continuation { problem: &'static str },
    #[error("the template variable {name:?} is reserved for the server")]
    ReservedVariable { name: String },
    #[error("the model's chat template refuses the conversation: {message}")]
    Refused { message: String },
    #[error("the prompt would be longer than {MAX_OUTPUT_BYTES} bytes")]
    TooLong,
    #[error("the chat template ran for more than {limit} instructions")]
    TooMuchWork { limit: u64, source: minijinja::Error },
    #[error("the chat template failed: {}", detail(source))]
    Template { source: minijinja::Error },
}

fn detail(error: &minijinja::Error) -> String {
    let line = error.line().map(|line| format!(" at line {line}")).unwrap_or_default();
    format!("{}{line}", error.detail().map_or_else(|| error.kind().to_string(), str::to_owned))
}
