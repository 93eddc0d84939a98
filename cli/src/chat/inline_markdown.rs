// SPDX-License-Identifier: Apache-2.0

//! The spans of a line of Markdown: emphasis, code, links, escaped characters. [`next_step`]
//! decides about text of which the end may be missing.

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

use super::styled_text::Style;

/// A marker without its end is printed after this many bytes of text.
const HELD_BYTES_MAX: usize = 1000;
/// What is no span, in front of a span: pulldown-cmark then sees no start of a block. Emphasis
/// depends on whether a word is in front.
const WORD: char = 'x';
const NO_WORD: char = '.';

#[derive(Debug, PartialEq, Eq)]
pub(super) struct SpanPart {
    pub(super) style: Style,
    pub(super) text: String,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum SpanStep {
    /// The next characters decide.
    Hold,
    /// Bytes that are no marker.
    Literal {
        bytes: usize,
    },
    Span {
        bytes: usize,
        parts: Vec<SpanPart>,
    },
}

fn is_mark(character: char) -> bool {
    matches!(character, '*' | '_' | '~' | '`' | '[' | '\\')
}

/// What to do with the beginning of a text that is not empty. `before` is the character in front of
/// it; `is_end` says that its line ends after it.
pub(super) fn next_step(text: &str, before: char, is_end: bool) -> SpanStep {
    let Some(mark) = text.chars().next() else { return SpanStep::Hold };
    if !is_mark(mark) {
        return SpanStep::Literal { bytes: text.find(is_mark).unwrap_or(text.len()) };
    }
    let hold_or = |bytes| match is_end || text.len() > HELD_BYTES_MAX {
        true => SpanStep::Literal { bytes },
        false => SpanStep::Hold,
    };
    match mark {
        '\\' => match text[1..].chars().next() {
            None => hold_or(1),
            Some(next) if next.is_ascii_punctuation() => {
                let parts = vec![SpanPart { style: Style::NONE, text: next.to_string() }];
                SpanStep::Span { bytes: 2, parts }
            }
            Some(_) => SpanStep::Literal { bytes: 1 },
        },
        '[' => link_step(text, before, hold_or),
        _ => emphasis_step(text, mark, before, is_end, hold_or),
    }
}

/// `[text](address)`. Anything else in brackets is text.
fn link_step(text: &str, before: char, hold_or: impl Fn(usize) -> SpanStep) -> SpanStep {
    let Some(close) = text.find(']') else { return hold_or(1) };
    match text[close + 1..].chars().next() {
        None => hold_or(1),
        Some('(') => match text[close..].find(')') {
            None => hold_or(1),
            Some(end) => span(text, close + end + 1, before).unwrap_or(SpanStep::Literal { bytes: 1 }),
        },
        Some(_) => SpanStep::Literal { bytes: 1 },
    }
}

fn emphasis_step(
    text: &str,
    mark: char,
    before: char,
    is_end: bool,
    hold_or: impl Fn(usize) -> SpanStep,
) -> SpanStep {
    let length = text.chars().take_while(|character| *character == mark).count();
    let rest = &text[length..];
    let Some(next) = rest.chars().next() else { return hold_or(length) };
    let is_no_marker = match mark {
        '`' => false,
        '_' => next.is_whitespace() || before.is_alphanumeric(),
        '~' => next.is_whitespace() || length != 2,
        _ => next.is_whitespace(),
    };
    if is_no_marker {
        return SpanStep::Literal { bytes: length };
    }
    // The span ends where a run of marks does, which the character after it shows.
    let mut last = text.chars().rev();
    let may_end = match is_end {
        true => rest.contains(mark),
        false => last.next() != Some(mark) && last.next() == Some(mark) && rest.contains(mark),
    };
    match may_end {
        true => span(text, text.len(), before).unwrap_or_else(|| hold_or(length)),
        false => hold_or(length),
    }
}

/// The span at the beginning of these bytes, if pulldown-cmark finds one there.
fn span(text: &str, bytes: usize, before: char) -> Option<SpanStep> {
    let prefix = if before.is_alphanumeric() { WORD } else { NO_WORD };
    let source = format!("{prefix}{}", &text[..bytes]);
    let start = prefix.len_utf8();
    let events = Parser::new_ext(&source, Options::ENABLE_STRIKETHROUGH).into_offset_iter();
    let mut events = events.skip_while(|(_, range)| range.start < start);
    let (first, range) = events.next()?;
    if range.start != start || !matches!(first, Event::Start(_) | Event::Code(_)) {
        return None;
    }
    let inside = events.take_while(|(_, inner)| inner.end <= range.end);
    let mut parts = Vec::new();
    let mut styles: Vec<(Style, Option<String>)> = Vec::new();
    for event in std::iter::once(first).chain(inside.map(|(event, _)| event)) {
        let style = styles.iter().fold(Style::NONE, |all, (style, _)| all.and(*style));
        let mut push = |style: Style, text: &str| parts.push(SpanPart { style, text: text.to_owned() });
        match event {
            Event::Start(tag) => styles.push(style_of(&tag)),
            Event::End(TagEnd::Paragraph) => break,
            Event::End(_) => {
                if let Some((_, Some(address))) = styles.pop() {
                    push(Style::DIM, &format!(" ({address})"));
                }
            }
            Event::Code(code) => push(style.and(Style::CODE), &code),
            Event::Text(text) | Event::InlineHtml(text) | Event::Html(text) => push(style, &text),
            _ => return None,
        }
    }
    Some(SpanStep::Span { bytes: range.end - start, parts })
}

/// The style of a span, and the address of a link.
fn style_of(tag: &Tag<'_>) -> (Style, Option<String>) {
    match tag {
        Tag::Strong => (Style { is_bold: true, ..Style::NONE }, None),
        Tag::Emphasis => (Style { is_italic: true, ..Style::NONE }, None),
        Tag::Strikethrough => (Style { is_struck: true, ..Style::NONE }, None),
        Tag::Link { dest_url, title, .. } | Tag::Image { dest_url, title, .. } => {
            let title = if title.is_empty() { String::new() } else { format!(" \"{title}\"") };
            (Style { is_underlined: true, ..Style::NONE }, Some(format!("{dest_url}{title}")))
        }
        _ => (Style::NONE, None),
    }
}
