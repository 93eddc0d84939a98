// SPDX-License-Identifier: Apache-2.0

//! [`AnswerPrinter`]: what standard output shows of an answer while it comes.

use std::io::IsTerminal;

use service::printable::printable_lines;

use super::answer::AnswerPiece;
use super::markdown::MarkdownStream;
use super::styled_text::{Style, StyledText};

/// How answers are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AnswerStyle {
    /// The bytes of the answer, for programs.
    Raw,
    /// On a terminal, without escape sequences.
    Plain,
    /// On a terminal, with the styles of Markdown.
    Markdown,
}

impl AnswerStyle {
    /// Follows standard output, and NO_COLOR (https://no-color.org).
    pub(crate) fn of_stdout() -> Self {
        let has_no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let is_dumb = std::env::var_os("TERM").is_some_and(|terminal| terminal == "dumb");
        match std::io::stdout().is_terminal() {
            false => Self::Raw,
            true if has_no_color || is_dumb => Self::Plain,
            true => Self::Markdown,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Part {
    #[default]
    Nothing,
    Reasoning,
    Text,
}

/// Printer of one answer.
pub(crate) struct AnswerPrinter {
    style: AnswerStyle,
    shows_reasoning: bool,
    markdown: MarkdownStream,
    part: Part,
}

impl AnswerPrinter {
    /// Reasoning is for people: [`AnswerStyle::Raw`] never shows it.
    pub(crate) fn new(style: AnswerStyle, shows_reasoning: bool) -> Self {
        let shows_reasoning = shows_reasoning && style != AnswerStyle::Raw;
        Self { style, shows_reasoning, markdown: MarkdownStream::default(), part: Part::default() }
    }

    /// What is to be printed for a piece, as it is.
    pub(crate) fn piece(&mut self, piece: &AnswerPiece) -> String {
        match piece {
            AnswerPiece::Reasoning(_) if !self.shows_reasoning => String::new(),
            AnswerPiece::Reasoning(text) => {
                let begin = match (self.style, self.part) {
                    (_, Part::Reasoning) => "",
                    (AnswerStyle::Plain, _) => "Reasoning:\n",
                    _ => "",
                };
                self.part = Part::Reasoning;
                begin.to_owned() + &self.dim(text)
            }
            AnswerPiece::Text(text) => {
                let begin = match (self.style, self.part) {
                    (AnswerStyle::Plain, Part::Reasoning) => "\n\nAnswer:\n",
                    (_, Part::Reasoning) => "\n\n",
                    _ => "",
                };
                self.part = Part::Text;
                begin.to_owned() + &self.text(text)
            }
        }
    }

    /// The end of the answer.
    pub(crate) fn finish(&mut self) -> String {
        self.markdown.finish() + "\n"
    }

    fn dim(&self, text: &str) -> String {
        match self.style {
            AnswerStyle::Markdown => {
                let mut out = StyledText::default();
                out.push(Style::DIM, text);
                out.finish()
            }
            AnswerStyle::Plain | AnswerStyle::Raw => printable_lines(text),
        }
    }

    fn text(&mut self, text: &str) -> String {
        match self.style {
            AnswerStyle::Raw => text.to_owned(),
            AnswerStyle::Plain => printable_lines(text),
            AnswerStyle::Markdown => self.markdown.push(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn print(style: AnswerStyle, shows_reasoning: bool) -> String {
        let mut printer = AnswerPrinter::new(style, shows_reasoning);
        let reasoning = |text: &str| AnswerPiece::Reasoning(text.to_owned());
        let text = |text: &str| AnswerPiece::Text(text.to_owned());
        let pieces = [reasoning("h"), reasoning("m"), text("**a"), text("**\u{1b}c")];
        pieces.iter().map(|piece| printer.piece(piece)).collect::<String>() + &printer.finish()
    }

    #[test]
    fn programs_get_the_answer_alone_and_terminals_no_control_characters() {
        assert_eq!(print(AnswerStyle::Raw, true), "**a**\u{1b}c\n");
        assert_eq!(print(AnswerStyle::Plain, true), "Reasoning:\nhm\n\nAnswer:\n**a**\\u{1b}c\n");
        assert_eq!(print(AnswerStyle::Plain, false), "**a**\\u{1b}c\n");
        let dim = |text: &str| format!("\u{1b}[0;2m{text}\u{1b}[0m");
        let expected = format!("{}{}\n\n\u{1b}[0;1ma\u{1b}[0m\\u{{1b}}c\n", dim("h"), dim("m"));
        assert_eq!(print(AnswerStyle::Markdown, true), expected);
    }
}
