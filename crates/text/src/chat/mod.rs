// SPDX-License-Identifier: Apache-2.0

//! Chat templates: renders a conversation to the prompt text that the model was trained on, with
//! the Jinja template in its file.
//!
//! A template is a program from a model file, so it runs with limits on instructions, recursion and
//! output. There is no built-in default template: a model that is prompted in the wrong format
//! gives worse answers without any error.

mod content;
mod continuation;
mod error;
mod functions;
mod json;
mod probe;
mod template;

pub use error::{LoadTemplateError, MAX_TEMPLATE_BYTES, RenderError};
pub use template::{ChatInput, ChatTemplate};
