// SPDX-License-Identifier: Apache-2.0

//! Reads JSON character by character, and refuses the first character that is no JSON.

use crate::cursor::{JsonSink, NoCall, OutputCursor};

/// Deepest nesting of brackets, as in serde_json.
const DEPTH_MAX: usize = 120;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Expected {
    Value,
    /// A value, or the end of an empty list.
    FirstItem,
    /// A key, or the end of an empty object.
    FirstKey,
    Key,
    CommaOrEnd,
}

impl OutputCursor {
    /// Reads one JSON value. White space before it is no part of it.
    pub(crate) async fn read_json(&mut self, sink: JsonSink) -> Result<(), NoCall> {
        let mut open: Vec<char> = Vec::new();
        let mut expected = Expected::Value;
        self.skip_blanks().await;
        loop {
            self.take_blanks(sink).await?;
            let next = self.peek().await.ok_or(NoCall)?;
            match (expected, next) {
                (Expected::Value | Expected::FirstItem, '{' | '[') => {
                    self.take(sink).await?;
                    open.push(next);
                    if open.len() > DEPTH_MAX {
                        return Err(NoCall);
                    }
                    expected = if next == '{' { Expected::FirstKey } else { Expected::FirstItem };
                    continue;
                }
                (Expected::FirstItem, ']') | (Expected::FirstKey, '}') => {
                    self.take(sink).await?;
                    open.pop();
                }
                (Expected::CommaOrEnd, ',') => {
                    self.take(sink).await?;
                    expected = if open.last() == Some(&'{') { Expected::Key } else { Expected::Value };
                    continue;
                }
                (Expected::CommaOrEnd, '}' | ']') => {
                    let opened = open.pop();
                    if opened != Some(if next == '}' { '{' } else { '[' }) {
                        return Err(NoCall);
                    }
                    self.take(sink).await?;
                }
                (Expected::FirstKey | Expected::Key, '"') => {
                    self.read_json_string(sink).await?;
                    self.take_blanks(sink).await?;
                    if self.take(sink).await? != ':' {
                        return Err(NoCall);
                    }
                    expected = Expected::Value;
                    continue;
                }
                (Expected::Value | Expected::FirstItem, _) => self.read_scalar(next, sink).await?,
                _ => return Err(NoCall),
            }
            if open.is_empty() {
                return Ok(());
            }
            expected = Expected::CommaOrEnd;
        }
    }

    async fn take_blanks(&mut self, sink: JsonSink) -> Result<(), NoCall> {
        while self.peek().await.is_some_and(|next| matches!(next, ' ' | '\t' | '\n' | '\r')) {
            self.take(sink).await?;
        }
        Ok(())
    }

    async fn read_scalar(&mut self, first: char, sink: JsonSink) -> Result<(), NoCall> {
        match first {
            '"' => self.read_json_string(sink).await,
            't' => self.read_word("true", sink).await,
            'f' => self.read_word("false", sink).await,
            'n' => self.read_word("null", sink).await,
            _ => self.read_number(sink).await,
        }
    }

    async fn read_word(&mut self, word: &str, sink: JsonSink) -> Result<(), NoCall> {
        for expected in word.chars() {
            if self.peek().await != Some(expected) {
                return Err(NoCall);
            }
            self.take(sink).await?;
        }
        Ok(())
    }

    async fn read_number(&mut self, sink: JsonSink) -> Result<(), NoCall> {
        if self.peek().await == Some('-') {
            self.take(sink).await?;
        }
        match self.peek().await {
            Some('0') => drop(self.take(sink).await?),
            _ => self.read_digits(sink).await?,
        }
        if self.peek().await == Some('.') {
            self.take(sink).await?;
            self.read_digits(sink).await?;
        }
        if matches!(self.peek().await, Some('e' | 'E')) {
            self.take(sink).await?;
            if matches!(self.peek().await, Some('+' | '-')) {
                self.take(sink).await?;
            }
            self.read_digits(sink).await?;
        }
        Ok(())
    }

    async fn read_digits(&mut self, sink: JsonSink) -> Result<(), NoCall> {
        let mut count = 0;
        while self.peek().await.is_some_and(|next| next.is_ascii_digit()) {
            self.take(sink).await?;
            count += 1;
        }
        if count == 0 { Err(NoCall) } else { Ok(()) }
    }

    /// Reads a string with its quotes.
    async fn read_json_string(&mut self, sink: JsonSink) -> Result<(), NoCall> {
        if self.peek().await != Some('"') {
            return Err(NoCall);
        }
        self.take(sink).await?;
        loop {
            match self.peek().await {
                Some('"') => return self.take(sink).await.map(drop),
                Some('\\') => {
                    self.take(sink).await?;
                    self.read_escape(sink).await?;
                }
                Some(next) if next >= ' ' => drop(self.take(sink).await?),
                _ => return Err(NoCall),
            }
        }
    }

    /// Reads what follows a backslash. Half a surrogate pair is no text.
    async fn read_escape(&mut self, sink: JsonSink) -> Result<(), NoCall> {
        match self.peek().await.ok_or(NoCall)? {
            '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => self.take(sink).await.map(drop),
            'u' => match self.read_unit(sink).await? {
                0xD800..=0xDBFF => {
                    self.read_word("\\", sink).await?;
                    let low = self.read_unit(sink).await?;
                    if (0xDC00..=0xDFFF).contains(&low) { Ok(()) } else { Err(NoCall) }
                }
                0xDC00..=0xDFFF => Err(NoCall),
                _ => Ok(()),
            },
            _ => Err(NoCall),
        }
    }

    async fn read_unit(&mut self, sink: JsonSink) -> Result<u32, NoCall> {
        self.read_word("u", sink).await?;
        let mut unit = 0;
        for _ in 0..4 {
            let digit = self.peek().await.and_then(|next| next.to_digit(16)).ok_or(NoCall)?;
            self.take(sink).await?;
            unit = unit * 16 + digit;
        }
        Ok(unit)
    }

    /// Reads a JSON string, and returns its text.
    pub(crate) async fn read_text(&mut self) -> Result<String, NoCall> {
        self.skip_blanks().await;
        self.taken.clear();
        self.read_json_string(JsonSink::Buffer).await?;
        serde_json::from_str(&std::mem::take(&mut self.taken)).map_err(|_| NoCall)
    }
}
