// SPDX-License-Identifier: Apache-2.0

//! [`StyledText`]: text with the escape sequences of its styles. Control characters of the text
//! itself are escaped, so that no other sequence reaches the terminal.

use service::printable::printable_lines;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Style {
    pub(crate) is_bold: bool,
    pub(crate) is_dim: bool,
    pub(crate) is_italic: bool,
    pub(crate) is_underlined: bool,
    pub(crate) is_struck: bool,
    pub(crate) is_code: bool,
}

impl Style {
    pub(crate) const DIM: Style = Style { is_dim: true, ..Style::NONE };
    pub(crate) const CODE: Style = Style { is_code: true, ..Style::NONE };
    pub(crate) const NONE: Style = Style {
        is_bold: false,
        is_dim: false,
        is_italic: false,
        is_underlined: false,
        is_struck: false,
        is_code: false,
    };

    /// Both styles together.
    pub(crate) fn and(self, other: Style) -> Style {
        Style {
            is_bold: self.is_bold || other.is_bold,
            is_dim: self.is_dim || other.is_dim,
            is_italic: self.is_italic || other.is_italic,
            is_underlined: self.is_underlined || other.is_underlined,
            is_struck: self.is_struck || other.is_struck,
            is_code: self.is_code || other.is_code,
        }
    }

    /// The parameters of the sequence "select graphic rendition" (ECMA-48). Code is cyan.
    fn parameters(self) -> impl Iterator<Item = &'static str> {
        let all = [
            (self.is_bold, ";1"),
            (self.is_dim, ";2"),
            (self.is_italic, ";3"),
            (self.is_underlined, ";4"),
            (self.is_struck, ";9"),
            (self.is_code, ";36"),
        ];
        all.into_iter().filter_map(|(is_set, parameter)| is_set.then_some(parameter))
    }
}

/// A sequence is written where the style changes.
#[derive(Debug, Default)]
pub(crate) struct StyledText {
    out: String,
    style: Style,
}

impl StyledText {
    pub(crate) fn push(&mut self, style: Style, text: &str) {
        if text.is_empty() {
            return;
        }
        if style != self.style {
            self.out += "\u{1b}[0";
            self.out.extend(style.parameters());
            self.out.push('m');
            self.style = style;
        }
        self.out += &printable_lines(text);
    }

    /// The text, after which the terminal has no style.
    pub(crate) fn finish(mut self) -> String {
        if self.style != Style::NONE {
            self.out += "\u{1b}[0m";
        }
        self.out
    }
}
