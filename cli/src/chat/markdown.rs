// SPDX-License-Identifier: Apache-2.0

//! [`MarkdownStream`]: renders Markdown on a terminal while it comes.
//!
//! 1. What is printed is never changed: no cursor moves, so nothing flickers.
//! 2. Text is held back only while it may be the marker of a block (at the start of a line) or of a
//!    span, at most to the end of the line. A marker that turns out to be none is printed.
//! 3. The result does not depend on how the text is cut into pieces.
//!
//! pulldown-cmark decides what a span is. It parses whole documents, so it gets single spans.

use super::inline_markdown::{SpanStep, next_step};
use super::styled_text::{Style, StyledText};

/// Width of a horizontal rule.
const RULE_COLUMNS: usize = 40;
const BULLET: &str = "• ";
const QUOTE_BAR: &str = "│ ";

/// Where the next character stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Position {
    /// At the start of a line, whose block is not known.
    LineStart,
    /// In a line of text with this style.
    Text(Style),
    /// In a line of a code block that is no closing fence.
    Code,
}

/// The fence that opened a code block.
#[derive(Clone, Copy, Debug)]
struct Fence {
    mark: char,
    length: usize,
}

#[derive(Debug)]
pub(crate) struct MarkdownStream {
    position: Position,
    fence: Option<Fence>,
    /// Text that is not printed yet.
    held: String,
    /// The character before the held text.
    before: char,
}

impl Default for MarkdownStream {
    fn default() -> Self {
        Self { position: Position::LineStart, fence: None, held: String::new(), before: '\n' }
    }
}

impl MarkdownStream {
    /// Takes the next piece, and returns what is to be printed now.
    pub(crate) fn push(&mut self, text: &str) -> String {
        let mut out = StyledText::default();
        for character in text.chars() {
            if character == '\n' {
                self.end_line(&mut out);
                out.push(Style::NONE, "\n");
                (self.position, self.before) = (Position::LineStart, '\n');
            } else {
                self.held.push(character);
                self.advance(&mut out, false);
            }
        }
        out.finish()
    }

    /// Returns what was held back at the end of the text.
    pub(crate) fn finish(&mut self) -> String {
        let mut out = StyledText::default();
        self.end_line(&mut out);
        *self = Self::default();
        out.finish()
    }

    fn end_line(&mut self, out: &mut StyledText) {
        self.advance(out, true);
        // An empty line holds nothing, a complete one was advanced to its end.
        self.held.clear();
    }

    /// Prints what is certain. At the end of a line, everything is.
    fn advance(&mut self, out: &mut StyledText, is_end: bool) {
        if self.position == Position::LineStart {
            match self.fence {
                Some(fence) => self.start_code_line(fence, out, is_end),
                None => self.start_line(out, is_end),
            }
        }
        match self.position {
            Position::LineStart => {}
            Position::Code => out.push(Style::CODE, &std::mem::take(&mut self.held)),
            Position::Text(style) => self.advance_text(style, out, is_end),
        }
    }

    fn start_code_line(&mut self, fence: Fence, out: &mut StyledText, is_end: bool) {
        let line = self.held.trim();
        let may_close = line.chars().all(|character| character == fence.mark);
        if !may_close {
            self.position = Position::Code;
        } else if is_end && line.len() >= fence.length {
            out.push(Style::DIM, &std::mem::take(&mut self.held));
            self.fence = None;
        } else if is_end {
            self.position = Position::Code;
        }
    }

    /// Finds the block of a line. Block quotes nest, so there may be several.
    fn start_line(&mut self, out: &mut StyledText, is_end: bool) {
        while let Some(block) = BlockStart::of(&self.held, is_end) {
            let mut style = Style::NONE;
            match block {
                BlockStart::Text => {}
                BlockStart::Quote { bytes } => {
                    out.push(Style::DIM, QUOTE_BAR);
                    self.held.drain(..bytes);
                    continue;
                }
                BlockStart::Heading { level, bytes } => {
                    style = Style { is_bold: true, is_underlined: level == 1, ..Style::NONE };
                    self.held.drain(..bytes);
                }
                BlockStart::Bullet { indent } => {
                    out.push(Style::NONE, &self.held[..indent]);
                    out.push(Style::NONE, BULLET);
                    self.held.drain(..indent + 2);
                }
                BlockStart::Rule => {
                    out.push(Style::DIM, &"─".repeat(RULE_COLUMNS));
                    self.held.clear();
                }
                BlockStart::Fence(fence) => {
                    out.push(Style::DIM, &std::mem::take(&mut self.held));
                    self.fence = Some(fence);
                }
            }
            self.position = Position::Text(style);
            return;
        }
    }

    fn advance_text(&mut self, style: Style, out: &mut StyledText, is_end: bool) {
        while !self.held.is_empty() {
            let bytes = match next_step(&self.held, self.before, is_end) {
                SpanStep::Hold => return,
                SpanStep::Literal { bytes } => {
                    out.push(style, &self.held[..bytes]);
                    bytes
                }
                SpanStep::Span { bytes, parts } => {
                    parts.iter().for_each(|part| out.push(style.and(part.style), &part.text));
                    bytes
                }
            };
            self.before = self.held[..bytes].chars().next_back().unwrap_or(self.before);
            self.held.drain(..bytes);
        }
    }
}

/// What a line begins with.
#[derive(Debug)]
enum BlockStart {
    Text,
    Heading { level: usize, bytes: usize },
    Bullet { indent: usize },
    Quote { bytes: usize },
    Rule,
    Fence(Fence),
}

impl BlockStart {
    /// `None` if the rest of the line is needed. `is_whole` says that it is there.
    fn of(line: &str, is_whole: bool) -> Option<BlockStart> {
        let rest = line.trim_start_matches([' ', '\t']);
        let indent = line.len() - rest.len();
        let text = Some(BlockStart::Text);
        let Some(mark) = rest.chars().next() else { return text.filter(|_| is_whole) };
        let length = rest.chars().take_while(|character| *character == mark).count();
        // Marks are ASCII: as many bytes as characters.
        let after = &rest[(length * mark.len_utf8()).min(rest.len())..];
        let is_open = after.is_empty() && !is_whole;
        match mark {
            '#' if length <= 6 && is_open => None,
            '#' if length <= 6 && after.starts_with(' ') => {
                Some(BlockStart::Heading { level: length, bytes: indent + length + 1 })
            }
            '>' if rest == ">" && !is_whole => None,
            '>' => {
                let bytes = indent + if rest[1..].starts_with(' ') { 2 } else { 1 };
                Some(BlockStart::Quote { bytes })
            }
            '-' | '*' | '+' if length == 1 && after.starts_with(' ') => Some(BlockStart::Bullet { indent }),
            '-' | '*' | '_' | '+' if is_open => None,
            '-' | '*' | '_' if length >= 3 && after.trim().is_empty() => {
                if is_whole {
                    Some(BlockStart::Rule)
                } else {
                    None
                }
            }
            '`' | '~' if length >= 3 && !is_whole => None,
            '`' | '~' if length >= 3 && (mark == '~' || !after.contains('`')) => {
                Some(BlockStart::Fence(Fence { mark, length }))
            }
            '`' | '~' if is_open => None,
            _ => text,
        }
    }
}

#[cfg(test)]
#[path = "markdown_tests.rs"]
mod tests;
