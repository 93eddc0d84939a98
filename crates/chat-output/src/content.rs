// SPDX-License-Identifier: Apache-2.0

//! Reads output as content with optional reasoning before it and calls anywhere.
//!
//! White space beside a marker is no content: it waits until more text follows.

use crate::calls;
use crate::cursor::OutputCursor;
use crate::event::ChatEvent;
use crate::parser::OutputSyntax;

/// The content, or one stretch of reasoning.
struct TextRun {
    is_reasoning: bool,
    blanks: String,
    has_text: bool,
    /// White space at the start is dropped: it follows a marker.
    trims_start: bool,
    /// White space at the end is dropped: the last that came was a marker.
    after_marker: bool,
}

impl TextRun {
    fn new(is_reasoning: bool, trims_start: bool) -> Self {
        Self { is_reasoning, blanks: String::new(), has_text: false, trims_start, after_marker: trims_start }
    }

    fn push(&mut self, cursor: &mut OutputCursor, next: char) {
        if next.is_whitespace() {
            if self.has_text || !self.trims_start {
                self.blanks.push(next);
            }
            return;
        }
        self.has_text = true;
        self.after_marker = false;
        let mut text = std::mem::take(&mut self.blanks);
        text.push(next);
        self.emit(cursor, text);
    }

    fn emit(&self, cursor: &mut OutputCursor, text: String) {
        cursor.emit(if self.is_reasoning { ChatEvent::Reasoning(text) } else { ChatEvent::Text(text) });
    }

    /// The output ends.
    fn finish(mut self, cursor: &mut OutputCursor) {
        let blanks = std::mem::take(&mut self.blanks);
        if !self.after_marker && !blanks.is_empty() {
            self.emit(cursor, blanks);
        }
    }
}

pub(crate) async fn run(mut cursor: OutputCursor, syntax: OutputSyntax) {
    let mut content = TextRun::new(false, false);
    if syntax.starts_in_reasoning && syntax.reasoning.is_some() {
        read_reasoning(&mut cursor, &syntax).await;
        content = TextRun::new(false, true);
    }
    let triggers = syntax.calls.map_or(&[][..], |format| format.triggers());
    let frames = syntax.calls.map_or(&[][..], |format| format.frames_of_content());
    let mut may_be_bare_call = syntax.calls.is_some();
    loop {
        if !content.has_text
            && let Some(markers) = &syntax.reasoning
        {
            // An end marker alone: the prompt closed the reasoning, and the model closes it again.
            let marker = cursor.accept(&[&markers.open, &markers.close]).await;
            if marker == Some(0) {
                read_reasoning(&mut cursor, &syntax).await;
            }
            if marker.is_some() {
                content = TextRun::new(false, true);
                continue;
            }
        }
        cursor.forget_raw();
        let is_trigger = cursor.looking_at(triggers).await.is_some();
        let is_start = may_be_bare_call && cursor.peek().await.is_some_and(|next| !next.is_whitespace());
        may_be_bare_call &= !is_start;
        if let Some(format) = syntax.calls.filter(|_| is_trigger || is_start) {
            let read = match is_trigger {
                true => calls::read_marked(&mut cursor, format, &syntax.tools).await,
                false => calls::read_bare(&mut cursor, format, &syntax.tools).await,
            };
            match read {
                Ok(()) => content.after_marker = true,
                Err(_) => {
                    cursor.give_up_call().chars().for_each(|next| content.push(&mut cursor, next));
                }
            }
            continue;
        }
        if cursor.accept(frames).await.is_some() {
            content.after_marker = true;
            continue;
        }
        match cursor.next().await {
            Some(next) => content.push(&mut cursor, next),
            None => break,
        }
    }
    content.finish(&mut cursor);
}

/// Reads reasoning up to its end marker, to the start of a call where the format allows it, or to
/// the end of the output.
async fn read_reasoning(cursor: &mut OutputCursor, syntax: &OutputSyntax) {
    let Some(markers) = &syntax.reasoning else { return };
    let ending_calls = syntax.calls.filter(|format| format.call_ends_reasoning());
    let triggers = ending_calls.map_or(&[][..], |format| format.triggers());
    let mut run = TextRun::new(true, true);
    cursor.set_in_reasoning(true);
    loop {
        cursor.forget_raw();
        // The open marker may stand in the prompt and in the output.
        if !run.has_text && cursor.accept(&[&markers.open]).await.is_some() {
            continue;
        }
        if cursor.looking_at(triggers).await.is_some() || cursor.accept(&[&markers.close]).await.is_some() {
            break;
        }
        match cursor.next().await {
            Some(next) => run.push(cursor, next),
            None => {
                run.finish(cursor);
                break;
            }
        }
    }
    cursor.forget_raw();
    cursor.set_in_reasoning(false);
}
