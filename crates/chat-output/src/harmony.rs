// SPDX-License-Identifier: Apache-2.0

//! gpt-oss's format: messages with a channel and perhaps a recipient.
//!
//! ```text
//! <|channel|>analysis<|message|>reasoning<|end|>
//! <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{..}<|call|>
//! <|start|>assistant<|channel|>final<|message|>content<|return|>
//! ```

use crate::cursor::{JsonSink, NoCall, OutputCursor};
use crate::event::ChatEvent;

const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const START: &str = "<|start|>";
const ENDS: [&str; 3] = ["<|end|>", "<|return|>", "<|call|>"];
/// A longer header is text.
const HEADER_CHARS_MAX: usize = 256;

pub(crate) async fn run(mut cursor: OutputCursor) {
    let mut has_reasoning = false;
    loop {
        cursor.forget_raw();
        if cursor.accept(&ENDS).await.is_some() {
            continue;
        }
        let is_message = cursor.looking_at(&[START, CHANNEL, " to=functions."]).await.is_some();
        if !is_message {
            match cursor.next().await {
                Some(next) => cursor.emit(ChatEvent::Text(next.to_string())),
                None => return,
            }
            continue;
        }
        if read_message(&mut cursor, &mut has_reasoning).await.is_err() {
            let text = cursor.give_up_call();
            if !text.is_empty() {
                cursor.emit(ChatEvent::Text(text));
                read_rest_of_text(&mut cursor).await;
            }
        }
        cursor.set_in_reasoning(false);
    }
}

async fn read_message(cursor: &mut OutputCursor, has_reasoning: &mut bool) -> Result<(), NoCall> {
    let mut header = String::new();
    while cursor.accept(&[MESSAGE]).await.is_none() {
        header.push(cursor.next().await.ok_or(NoCall)?);
        if header.len() > HEADER_CHARS_MAX {
            return Err(NoCall);
        }
    }
    let word_after = |mark: &str| {
        let (_, rest) = header.split_once(mark)?;
        rest.split([' ', '<']).next()
    };
    match (word_after("to="), word_after(CHANNEL)) {
        (Some(recipient), _) => match recipient.strip_prefix("functions.") {
            Some(name) if !name.is_empty() => read_call(cursor, name).await,
            // A tool of the model's own surroundings, which a server does not have.
            _ => {
                cursor.forget_raw();
                read_body(cursor, |_| None).await;
                Ok(())
            }
        },
        (None, Some("analysis")) => {
            cursor.forget_raw();
            cursor.set_in_reasoning(true);
            if std::mem::replace(has_reasoning, true) {
                cursor.emit(ChatEvent::Reasoning("\n".to_owned()));
            }
            read_body(cursor, |text| Some(ChatEvent::Reasoning(text))).await;
            Ok(())
        }
        (None, _) => {
            cursor.forget_raw();
            read_body(cursor, |text| Some(ChatEvent::Text(text))).await;
            Ok(())
        }
    }
}

async fn read_call(cursor: &mut OutputCursor, name: &str) -> Result<(), NoCall> {
    cursor.skip_blanks().await;
    if cursor.peek().await != Some('{') {
        return Err(NoCall);
    }
    cursor.start_call(name, None);
    cursor.read_json(JsonSink::Arguments).await?;
    cursor.skip_blanks().await;
    if cursor.accept(&ENDS).await.is_none() && cursor.peek().await.is_some() {
        return Err(NoCall);
    }
    cursor.end_call();
    Ok(())
}

/// Reads the rest of a message that is no call, with its end marker.
async fn read_rest_of_text(cursor: &mut OutputCursor) {
    if let Some(end) = read_body(cursor, |text| Some(ChatEvent::Text(text))).await {
        cursor.emit(ChatEvent::Text(ENDS[end].to_owned()));
    }
}

/// Reads text up to the end of the message. Returns the end marker, if there is one.
async fn read_body(cursor: &mut OutputCursor, event: impl Fn(String) -> Option<ChatEvent>) -> Option<usize> {
    loop {
        if let Some(end) = cursor.accept(&ENDS).await {
            return Some(end);
        }
        if cursor.looking_at(&[START]).await.is_some() {
            return None;
        }
        let next = cursor.next().await?;
        if let Some(event) = event(next.to_string()) {
            cursor.emit(event);
        }
    }
}
