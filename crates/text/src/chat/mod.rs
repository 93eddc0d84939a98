//! Chat templates: a conversation to the prompt text that the model was trained on, by the Jinja template in its file.
//!
//! A template is a program from a model file, so it runs with bounds on instructions, recursion and output. There is
//! no built-in template to fall back on: a model asked in the wrong format answers badly without anybody noticing.

mod content;
mod functions;
mod json;
mod template;

pub use template::{ChatInput, ChatTemplate, LoadTemplateError, RenderError};
