// SPDX-License-Identifier: Apache-2.0

//! [`OutputCursor`]: reads the output character by character, and waits where the text so far ends.
//!
//! A format is written as an `async fn` over a cursor, as if the whole text were there. It suspends
//! where a decision needs more text and goes on with the next piece ([`crate::OutputParser`] polls
//! it). So every decision depends on the text only, not on how it was cut.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;

use crate::event::ChatEvent;

/// The text between a parser and its cursor.
#[derive(Debug, Default)]
pub(crate) struct SharedText {
    pub(crate) input: String,
    /// Bytes of `input` that have been read.
    pub(crate) read: usize,
    pub(crate) ended: bool,
    pub(crate) events: Vec<ChatEvent>,
    pub(crate) in_reasoning: bool,
}

pub(crate) type TextHandle = Arc<Mutex<SharedText>>;

/// The text is no call of this format, or it ended in the middle of one.
#[derive(Debug)]
pub(crate) struct NoCall;

/// Where characters go that a JSON scanner reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JsonSink {
    Nowhere,
    /// [`OutputCursor::taken`].
    Buffer,
    /// The arguments of the open call.
    Arguments,
}

pub(crate) struct OutputCursor {
    shared: TextHandle,
    /// Events of a call wait until the call is complete.
    holds_calls: bool,
    held: Vec<ChatEvent>,
    /// What was read since the last complete call or text: becomes text if it is no call.
    raw: String,
    /// Calls that have ended.
    calls: usize,
    is_open: bool,
    pub(crate) taken: String,
}

impl OutputCursor {
    pub(crate) fn new(shared: TextHandle, holds_calls: bool) -> Self {
        Self {
            shared,
            holds_calls,
            held: Vec::new(),
            raw: String::new(),
            calls: 0,
            is_open: false,
            taken: String::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, SharedText> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next character, or `None` at the end of the output.
    pub(crate) async fn peek(&self) -> Option<char> {
        poll_fn(|_| {
            let shared = self.lock();
            match shared.input[shared.read..].chars().next() {
                None if !shared.ended => Poll::Pending,
                next => Poll::Ready(next),
            }
        })
        .await
    }

    pub(crate) async fn next(&mut self) -> Option<char> {
        let next = self.peek().await?;
        self.lock().read += next.len_utf8();
        self.raw.push(next);
        Some(next)
    }

    /// Reads a character into a sink.
    pub(crate) async fn take(&mut self, sink: JsonSink) -> Result<char, NoCall> {
        let next = self.next().await.ok_or(NoCall)?;
        match sink {
            JsonSink::Nowhere => {}
            JsonSink::Buffer => self.taken.push(next),
            JsonSink::Arguments => self.write_arguments(next.encode_utf8(&mut [0; 4])),
        }
        Ok(next)
    }

    /// Which of the texts the output goes on with. Waits until it is certain.
    pub(crate) async fn looking_at(&self, texts: &[&str]) -> Option<usize> {
        poll_fn(|_| {
            let shared = self.lock();
            let rest = &shared.input[shared.read..];
            if let Some(found) = texts.iter().position(|text| rest.starts_with(text)) {
                return Poll::Ready(Some(found));
            }
            let may_follow = !shared.ended && texts.iter().any(|text| text.starts_with(rest));
            if may_follow { Poll::Pending } else { Poll::Ready(None) }
        })
        .await
    }

    /// Reads one of the texts if the output goes on with it.
    pub(crate) async fn accept(&mut self, texts: &[&str]) -> Option<usize> {
        let found = self.looking_at(texts).await?;
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.read += texts[found].len();
        self.raw.push_str(texts[found]);
        Some(found)
    }

    pub(crate) async fn expect(&mut self, text: &str) -> Result<(), NoCall> {
        self.accept(&[text]).await.map(drop).ok_or(NoCall)
    }

    pub(crate) async fn skip_blanks(&mut self) {
        while self.peek().await.is_some_and(char::is_whitespace) {
            self.next().await;
        }
    }

    /// Reads up to one of the texts, and the text itself. Returns what stands before it.
    pub(crate) async fn read_until(&mut self, texts: &[&str]) -> Result<(String, usize), NoCall> {
        let mut before = String::new();
        loop {
            if let Some(found) = self.accept(texts).await {
                return Ok((before, found));
            }
            before.push(self.next().await.ok_or(NoCall)?);
        }
    }

    pub(crate) fn emit(&mut self, event: ChatEvent) {
        match self.holds_calls && self.is_open {
            true => ChatEvent::append(&mut self.held, event),
            false => ChatEvent::append(&mut self.lock().events, event),
        }
    }

    pub(crate) fn set_in_reasoning(&self, in_reasoning: bool) {
        self.lock().in_reasoning = in_reasoning;
    }

    pub(crate) fn start_call(&mut self, name: &str, id: Option<String>) {
        self.is_open = true;
        self.emit(ChatEvent::CallStarted { index: self.calls, id, name: name.to_owned() });
    }

    pub(crate) fn write_arguments(&mut self, json: &str) {
        self.emit(ChatEvent::Arguments { index: self.calls, json: json.to_owned() });
    }

    /// Ends the open call, and gives its events out.
    pub(crate) fn end_call(&mut self) {
        self.emit(ChatEvent::CallEnded { index: self.calls });
        self.calls += 1;
        self.is_open = false;
        for event in std::mem::take(&mut self.held) {
            self.emit(event);
        }
        self.forget_raw();
    }

    /// What has been read is text, or a marker: it cannot become text any more.
    pub(crate) fn forget_raw(&mut self) {
        self.raw.clear();
    }

    /// Gives up a call. Returns what has been read of it, for the content. A call whose beginning
    /// has been given out ends where it is.
    pub(crate) fn give_up_call(&mut self) -> String {
        let was_given_out = self.is_open && !self.holds_calls;
        self.held.clear();
        self.taken.clear();
        if was_given_out {
            self.end_call();
            return String::new();
        }
        self.is_open = false;
        std::mem::take(&mut self.raw)
    }
}
