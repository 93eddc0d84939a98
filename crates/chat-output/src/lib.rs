// SPDX-License-Identifier: Apache-2.0

//! Splits the text of a chat model into content, reasoning and tool calls, while it arrives.
//!
//! ```text
//! text --push--> OutputParser --> ChatEvent: text, reasoning, call started, arguments, call ended
//! ```
//!
//! 1. A parser is a plain value: text in, events out.
//! 2. The events, joined, do not depend on how the text was cut into pieces.
//! 3. A malformed call is text, and arbitrary text is never an error. Only markers, and white space
//!    beside them, are removed.
//! 4. Arguments are JSON that has been checked character by character.
//!
//! Each format is a function that reads characters and waits for more (`cursor.rs`).

#![forbid(unsafe_code)]

mod calls;
mod content;
mod cursor;
mod event;
mod format;
mod harmony;
mod json;
mod parser;
mod typed_value;

pub use event::ChatEvent;
pub use format::{ReasoningMarkers, ToolFormat};
pub use parser::{CallDelivery, OutputParser, OutputSyntax, ToolSignature};
