// SPDX-License-Identifier: Apache-2.0

//! Answers a chat in the form of an API other than chat completions: OpenAI's responses and
//! Anthropic's messages. Both have one choice, made of items that begin and end, and name the
//! events of a stream.
//!
//! A writer sees the same calls for a whole reply and for a stream, so both have the same content.

use std::convert::Infallible;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::response::{IntoResponse, Response};
use chat_output::{ChatEvent, OutputParser};
use futures::stream;
use serde_json::Value;

use super::chat::StartedChat;
use super::chat_reply::CallWriter;
use super::error::ApiError;
use super::keep_alive::{KEEP_ALIVE_COMMENT, PacedEvents};
use super::response::event_stream;
use crate::choice::{ChoiceEvent, ChoiceOutcome, FinishCause, OutputDelta};

/// A part of a reply.
pub(super) enum ReplyPart {
    Text(String),
    Reasoning(String),
    CallStarted { id: String, name: String },
    Arguments(String),
}

/// How a reply ended, and what it cost.
pub(super) struct ReplyEnd {
    pub(super) finish: FinishCause,
    pub(super) usage: ReplyUsage,
}

#[derive(Clone, Copy, Default)]
pub(super) struct ReplyUsage {
    pub(super) prompt_tokens: u64,
    pub(super) cached_tokens: u64,
    pub(super) output_tokens: u64,
    pub(super) reasoning_tokens: u64,
}

/// Writes one reply as an API does. Implemented for responses and for messages.
pub(super) trait ReplyWriter: Send + 'static {
    /// The first events.
    fn begin(&mut self, out: &mut NamedEvents);
    fn write(&mut self, part: ReplyPart, out: &mut NamedEvents);
    /// The last events.
    fn end(&mut self, end: &ReplyEnd, out: &mut NamedEvents);
    /// The event of a reply that fails.
    fn fail(&mut self, error: &ApiError, out: &mut NamedEvents);
    /// The whole reply, after [`Self::end`].
    fn whole(&mut self) -> Value;
}

/// Server-sent events with names. Each has its name as `type` too.
#[derive(Default)]
pub(super) struct NamedEvents {
    bytes: Vec<u8>,
}

impl NamedEvents {
    pub(super) fn push(&mut self, event: &Value) {
        let name = event["type"].as_str().unwrap_or("message");
        self.bytes.extend_from_slice(format!("event: {name}\ndata: {event}\n\n").as_bytes());
    }
}

/// Reads the output of the one choice of a chat.
struct ReplyReader {
    /// `None`: all text is content.
    parser: Option<OutputParser>,
    calls: CallWriter,
    usage: ReplyUsage,
}

impl ReplyReader {
    fn push(&mut self, delta: OutputDelta) -> Vec<ReplyPart> {
        let Some(parser) = &mut self.parser else {
            return if delta.text.is_empty() { vec![] } else { vec![ReplyPart::Text(delta.text)] };
        };
        let was_reasoning = parser.in_reasoning();
        let events = parser.push(&delta.text);
        if was_reasoning || parser.in_reasoning() {
            self.usage.reasoning_tokens += delta.tokens.len() as u64;
        }
        self.parts(events)
    }

    fn finish(&mut self, outcome: &ChoiceOutcome) -> Vec<ReplyPart> {
        self.usage.output_tokens = u64::from(outcome.output_tokens);
        self.usage.cached_tokens = u64::from(outcome.cached_tokens);
        let events = self.parser.take().map(OutputParser::finish).unwrap_or_default();
        self.parts(events)
    }

    fn parts(&self, events: Vec<ChatEvent>) -> Vec<ReplyPart> {
        let part = |event| match event {
            ChatEvent::Text(text) => Some(ReplyPart::Text(text)),
            ChatEvent::Reasoning(text) => Some(ReplyPart::Reasoning(text)),
            ChatEvent::CallStarted { index, id, name } => {
                self.calls.writes(index).then(|| ReplyPart::CallStarted { id: self.calls.id(id), name })
            }
            ChatEvent::Arguments { index, json } => {
                self.calls.writes(index).then_some(ReplyPart::Arguments(json))
            }
            ChatEvent::CallEnded { .. } => None,
        };
        events.into_iter().filter_map(part).collect()
    }
}

/// A reply that is being generated.
pub(super) struct RunningReply<W> {
    writer: W,
    reader: ReplyReader,
    events: PacedEvents,
    out: NamedEvents,
    has_begun: bool,
    is_over: bool,
}

impl<W: ReplyWriter> RunningReply<W> {
    pub(super) fn new(chat: StartedChat, writer: W) -> Self {
        let prompt_tokens = chat.request.prompts().map(<[u32]>::len).sum::<usize>() as u64;
        let is_parsed = chat.syntax.calls.is_some() || chat.syntax.reasoning.is_some();
        let calls = CallWriter::new(&chat.tools, chat.syntax.calls);
        let reader = ReplyReader {
            parser: is_parsed.then(|| OutputParser::new(chat.syntax)),
            calls,
            usage: ReplyUsage { prompt_tokens, ..ReplyUsage::default() },
        };
        let out = NamedEvents::default();
        let events = PacedEvents::new(chat.events);
        Self { writer, reader, events, out, has_begun: false, is_over: false }
    }

    pub(super) async fn respond(mut self, stream: bool) -> Result<Response, ApiError> {
        if stream {
            return Ok(event_stream(Body::from_stream(stream::unfold(self, |mut running| async {
                let bytes = running.next_bytes().await?;
                Some((Ok::<_, Infallible>(bytes), running))
            }))));
        }
        while !self.is_over {
            let event = self.events.recv().await;
            self.handle(event)?;
            self.out.bytes.clear();
        }
        Ok(Json(self.writer.whole()).into_response())
    }

    async fn next_bytes(&mut self) -> Option<Bytes> {
        if !self.has_begun {
            self.has_begun = true;
            self.writer.begin(&mut self.out);
        }
        while self.out.bytes.is_empty() {
            if self.is_over {
                return None;
            }
            match self.events.next().await {
                Some(event) => {
                    if let Err(error) = self.handle(event) {
                        self.is_over = true;
                        self.writer.fail(&error, &mut self.out);
                    }
                }
                None => return Some(Bytes::from_static(KEEP_ALIVE_COMMENT)),
            }
        }
        Some(std::mem::take(&mut self.out.bytes).into())
    }

    fn handle(&mut self, event: Option<ChoiceEvent>) -> Result<(), ApiError> {
        let parts = match event {
            Some(ChoiceEvent::Output(delta)) => self.reader.push(delta),
            Some(ChoiceEvent::Ended { outcome, .. }) => {
                let outcome = outcome?;
                for part in self.reader.finish(&outcome) {
                    self.writer.write(part, &mut self.out);
                }
                let end = ReplyEnd { finish: outcome.finish, usage: self.reader.usage };
                self.writer.end(&end, &mut self.out);
                self.is_over = true;
                return Ok(());
            }
            // The task ended without its `Ended` event: the runtime is shutting down.
            None => return Err(ApiError::not_ready("the router is stopping")),
        };
        for part in parts {
            self.writer.write(part, &mut self.out);
        }
        Ok(())
    }
}
