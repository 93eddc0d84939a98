// SPDX-License-Identifier: Apache-2.0

//! Finds the texts of special tokens in a text, before the text is split and merged.
//!
//! The leftmost match wins; of several there, the longest, as in HF `tokenizers`. User-defined
//! tokens always match. Control and unknown tokens match only if the caller trusts the text
//! (`parse_special`), because a client's text must not become a turn marker.

use aho_corasick::{AhoCorasick, MatchKind};

use crate::tokenizer_error::LoadTokenizerError;
use crate::vocabulary::TokenKind;

/// A special token, or the text between two of them, which is never empty.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Fragment<'t> {
    Token(u32),
    Text(&'t str),
}

#[derive(Debug)]
pub(crate) struct SpecialTokens {
    all: TextMatcher,
    user_defined: TextMatcher,
}

#[derive(Debug)]
struct TextMatcher {
    texts: AhoCorasick,
    ids: Vec<u32>,
}

impl TextMatcher {
    fn new<'a>(tokens: impl Iterator<Item = (u32, &'a str)>) -> Result<Self, LoadTokenizerError> {
        let (ids, texts): (Vec<u32>, Vec<&str>) = tokens.unzip();
        let texts = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(texts)
            .map_err(|source| LoadTokenizerError::SpecialTokens { source })?;
        Ok(Self { texts, ids })
    }
}

impl SpecialTokens {
    pub(crate) fn new(tokens: &[&str], kinds: &[TokenKind]) -> Result<Self, LoadTokenizerError> {
        let of_kinds = |wanted: &'static [TokenKind]| {
            (0..)
                .zip(tokens.iter().copied())
                .zip(kinds)
                .filter(move |((_, text), kind)| wanted.contains(kind) && !text.is_empty())
                .map(|(token, _)| token)
        };
        Ok(Self {
            all: TextMatcher::new(of_kinds(&[
                TokenKind::Control,
                TokenKind::Unknown,
                TokenKind::UserDefined,
            ]))?,
            user_defined: TextMatcher::new(of_kinds(&[TokenKind::UserDefined]))?,
        })
    }

    pub(crate) fn split<'t>(&self, text: &'t str, parse_special: bool) -> impl Iterator<Item = Fragment<'t>> {
        let finder = if parse_special { &self.all } else { &self.user_defined };
        let mut matches = finder.texts.find_iter(text);
        let mut at = 0;
        let mut found = None;
        std::iter::from_fn(move || {
            if let Some(id) = found.take() {
                return Some(Fragment::Token(id));
            }
            let (start, end, id) = match matches.next() {
                Some(m) => (m.start(), m.end(), Some(finder.ids[m.pattern().as_usize()])),
                None => (text.len(), text.len(), None),
            };
            let before = &text[at..start];
            at = end;
            match before.is_empty() {
                true => id.map(Fragment::Token),
                false => {
                    found = id;
                    Some(Fragment::Text(before))
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Fragment::{Text, Token};

    fn split(text: &str, parse_special: bool) -> Vec<Fragment<'_>> {
        let tokens = ["<a>", "<a><b>", "<user>", "plain", ""];
        let kinds = [
            TokenKind::Control,
            TokenKind::Control,
            TokenKind::UserDefined,
            TokenKind::Normal,
            TokenKind::Control,
        ];
        SpecialTokens::new(&tokens, &kinds).unwrap().split(text, parse_special).collect()
    }

    #[test]
    fn longest_of_the_leftmost_is_cut_out() {
        assert_eq!(split("x<a><b><a>y", true), [Text("x"), Token(1), Token(0), Text("y")]);
        assert_eq!(split("", true), []);
    }

    #[test]
    fn control_tokens_stay_text_unless_parsed_but_user_defined_ones_do_not() {
        assert_eq!(split("<a>plain<user>", false), [Text("<a>plain"), Token(2)]);
    }
}
