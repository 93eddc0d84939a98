// SPDX-License-Identifier: Apache-2.0

//! [`OutputParser`]: text in, events out.

use std::pin::Pin;
use std::sync::{MutexGuard, PoisonError};
use std::task::{Context, Waker};

use serde_json::Value;

use crate::cursor::{OutputCursor, SharedText, TextHandle};
use crate::event::ChatEvent;
use crate::format::{ReasoningMarkers, ToolFormat};
use crate::{content, harmony};

/// A function that the model may call.
#[derive(Clone, Debug)]
pub struct ToolSignature {
    pub name: String,
    /// JSON schema of the arguments. Formats without JSON types take the types from it.
    pub parameters: Value,
}

/// When the events of a call are given out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallDelivery {
    /// When the call is complete. A malformed call is text.
    Complete,
    /// As the call is written. For output that a grammar keeps well-formed: what has been given out
    /// of a malformed call cannot become text.
    Streamed,
}

/// How a model writes its output.
#[derive(Clone, Debug)]
pub struct OutputSyntax {
    /// `None`: calls are text.
    pub calls: Option<ToolFormat>,
    /// `None`: reasoning is text.
    pub reasoning: Option<ReasoningMarkers>,
    /// The prompt ended inside reasoning.
    pub starts_in_reasoning: bool,
    pub delivery: CallDelivery,
    pub tools: Vec<ToolSignature>,
}

/// The parser of one output.
pub struct OutputParser {
    shared: TextHandle,
    /// `None` after the end.
    task: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl OutputParser {
    pub fn new(syntax: OutputSyntax) -> Self {
        let shared = TextHandle::default();
        lock(&shared).in_reasoning = syntax.starts_in_reasoning && syntax.reasoning.is_some();
        let cursor = OutputCursor::new(shared.clone(), syntax.delivery == CallDelivery::Complete);
        let task: Pin<Box<dyn Future<Output = ()> + Send>> = match syntax.calls {
            Some(ToolFormat::Harmony) => Box::pin(harmony::run(cursor)),
            _ => Box::pin(content::run(cursor, syntax)),
        };
        Self { shared, task: Some(task) }
    }

    /// Takes more text. Returns what became certain.
    pub fn push(&mut self, text: &str) -> Vec<ChatEvent> {
        {
            let mut shared = lock(&self.shared);
            let read = std::mem::take(&mut shared.read);
            shared.input.drain(..read);
            shared.input.push_str(text);
        }
        self.advance()
    }

    /// The output is at its end. Returns what was held back.
    pub fn finish(mut self) -> Vec<ChatEvent> {
        lock(&self.shared).ended = true;
        self.advance()
    }

    /// Whether the next character belongs to reasoning, as far as it is certain.
    pub fn in_reasoning(&self) -> bool {
        lock(&self.shared).in_reasoning
    }

    fn advance(&mut self) -> Vec<ChatEvent> {
        let mut context = Context::from_waker(Waker::noop());
        if let Some(task) = &mut self.task
            && task.as_mut().poll(&mut context).is_ready()
        {
            self.task = None;
        }
        std::mem::take(&mut lock(&self.shared).events)
    }
}

fn lock(shared: &TextHandle) -> MutexGuard<'_, SharedText> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
