// SPDX-License-Identifier: Apache-2.0

//! Prompts of a model that scores how well a document answers a query.
//!
//! A file may have a template with the placeholders `{query}` and `{document}`, as llama.cpp writes
//! it. Without a template the prompt is `[BOS] query [EOS] document [EOS]`, with the tokens that
//! the file says to add.

use gguf::{KeyError, Metadata};

use crate::special::Fragment;
use crate::tokenizer::Tokenizer;
use crate::tokenizer_error::EncodeError;

const PAIR_TEMPLATE: &str = "tokenizer.chat_template.rerank";
const QUERY: &str = "{query}";
const DOCUMENT: &str = "{document}";

/// The file's template for pairs of texts.
#[derive(Clone, Debug, Default)]
pub struct PairTemplate {
    source: Option<String>,
}

impl PairTemplate {
    pub fn from_metadata(metadata: &Metadata) -> Result<Self, KeyError> {
        Ok(Self { source: metadata.get::<&str>(PAIR_TEMPLATE)?.map(str::to_owned) })
    }

    /// Bytes of a prompt that are neither query nor document.
    pub fn text_bytes(&self) -> usize {
        self.source.as_ref().map_or(0, String::len)
    }

    /// The template's own texts and the two texts, in order. A placeholder inside a text stays as
    /// it is.
    fn parts<'a>(template: &'a str, query: &'a str, document: &'a str) -> Vec<PairPart<'a>> {
        let mut parts = Vec::new();
        let mut rest = template;
        while !rest.is_empty() {
            let next = [(QUERY, query), (DOCUMENT, document)]
                .into_iter()
                .filter_map(|(name, text)| Some((rest.find(name)?, name, text)))
                .min_by_key(|(at, ..)| *at);
            let Some((at, name, text)) = next else { break };
            parts.push(PairPart::Literal(&rest[..at]));
            parts.push(PairPart::Text(text));
            rest = &rest[at + name.len()..];
        }
        parts.push(PairPart::Literal(rest));
        parts
    }
}

/// A part of a prompt.
#[derive(Debug, PartialEq, Eq)]
enum PairPart<'a> {
    /// Of the template. Its author may write control tokens.
    Literal(&'a str),
    /// Of a client, whose text must not become a control token.
    Text(&'a str),
}

impl Tokenizer {
    /// Encodes a query and a document as one prompt. Names of control tokens become those tokens in
    /// the template only: in a query or a document they are text.
    pub fn encode_pair(
        &self,
        template: &PairTemplate,
        query: &str,
        document: &str,
    ) -> Result<Vec<u32>, EncodeError> {
        let mut ids = Vec::with_capacity((template.text_bytes() + query.len() + document.len()) / 4 + 8);
        let Some(template) = &template.source else {
            let end = self.eos.filter(|_| self.add_eos);
            ids.extend(self.bos.filter(|_| self.add_bos));
            for text in [query, document] {
                self.encode_part(text, false, true, &mut ids)?;
                ids.extend(end);
            }
            return Ok(ids);
        };
        // The text between two control tokens is encoded as a whole, as the model was trained:
        // tokens may reach from the template into a text.
        let mut run = String::new();
        for part in PairTemplate::parts(template, query, document) {
            let literal = match part {
                PairPart::Literal(literal) => literal,
                PairPart::Text(text) => {
                    run.push_str(text);
                    continue;
                }
            };
            for fragment in self.special.split(literal, true) {
                match fragment {
                    Fragment::Text(text) => run.push_str(text),
                    Fragment::Token(id) => {
                        self.encode_part(&run, false, true, &mut ids)?;
                        run.clear();
                        ids.push(id);
                    }
                }
            }
        }
        self.encode_part(&run, false, true, &mut ids)?;
        Ok(ids)
    }

    /// Encodes the longest start of `text` that `encode` turns into at most `limit` ids; perhaps a
    /// few characters less. Returns it with its ids, or `None` if even an empty text has more.
    ///
    /// Where a text is cut its last tokens merge differently, so that only a new encoding tells
    /// the number of ids. Each round cuts twice as many tokens as the one before or more, so that
    /// there are few rounds.
    pub fn encode_start<'t>(
        &self,
        text: &'t str,
        limit: usize,
        encode: impl Fn(&str) -> Result<Vec<u32>, EncodeError>,
    ) -> Result<Option<(&'t str, Vec<u32>)>, EncodeError> {
        let mut ids = encode(text)?;
        if ids.len() <= limit {
            return Ok(Some((text, ids)));
        }
        let mut alone = Vec::new();
        self.encode_part(text, false, true, &mut alone)?;
        let mut cut_min = 1;
        while !alone.is_empty() {
            let excess = ids.len() - limit;
            alone.truncate(alone.len().saturating_sub(excess.max(cut_min)));
            cut_min *= 2;
            let start = self.start_of(text, &alone);
            ids = encode(start)?;
            if ids.len() <= limit {
                return Ok(Some((start, ids)));
            }
        }
        Ok(None)
    }

    /// The start of `text` of which these ids are the encoding, without a divided character.
    fn start_of<'t>(&self, text: &'t str, ids: &[u32]) -> &'t str {
        let bytes: usize = ids.iter().filter_map(|&id| self.token_bytes(id)).map(<[u8]>::len).sum();
        let bytes = bytes.saturating_sub(usize::from(self.adds_space_prefix()));
        // `str::floor_char_boundary` is newer than the oldest compiler that builds this.
        let at = (0..=bytes.min(text.len())).rev().find(|&at| text.is_char_boundary(at));
        &text[..at.unwrap_or_default()]
    }
}

#[cfg(test)]
mod tests {
    use super::PairPart::{Literal, Text};
    use super::*;
    use crate::vocabulary::{RawVocabulary, TokenKind};

    const END: u32 = 256;

    /// Each byte is a token. The last one is the control token `<end>`.
    fn tokenizer() -> Tokenizer {
        let bytes: Vec<String> = (0..256).map(|byte| format!("<0x{byte:02X}>")).collect();
        let tokens: Vec<&str> = bytes.iter().map(String::as_str).chain(["<end>"]).collect();
        let kinds = [vec![TokenKind::Byte; 256], vec![TokenKind::Control]].concat();
        let scores = vec![0.0; tokens.len()];
        Tokenizer::new(&RawVocabulary {
            model: "llama",
            tokens,
            kinds,
            scores,
            bos: Some(END),
            add_bos: Some(false),
            add_space_prefix: Some(false),
            ..RawVocabulary::default()
        })
        .unwrap()
    }

    fn template(source: &str) -> PairTemplate {
        PairTemplate { source: Some(source.to_owned()) }
    }

    #[test]
    fn texts_stand_in_their_places_and_placeholders_in_texts_stay() {
        let parts = |template| PairTemplate::parts(template, "q {document}", "d {query}");
        let found = [Literal("<Q>"), Text("q {document}"), Literal("<D>"), Text("d {query}"), Literal("{")];
        assert_eq!(parts("<Q>{query}<D>{document}{"), found);
        assert_eq!(parts("{doc}{document}"), [Literal("{doc}"), Text("d {query}"), Literal("")]);
    }

    #[test]
    fn control_tokens_are_those_of_the_template_and_never_those_of_a_text() {
        let ids =
            |source, query, document| tokenizer().encode_pair(&template(source), query, document).unwrap();
        let ends = |ids: &[u32]| ids.iter().filter(|&&id| id == END).count();
        assert_eq!(ids("a{query}<end>{document}", "b", "c"), [97, 98, END, 99]);
        assert_eq!(ends(&ids("{query}<end>{document}", "x<end>", "<end>y")), 1);
        assert_eq!(ends(&ids("<{query}{document}>", "e", "nd")), 0, "a name of template and texts");
    }

    #[test]
    fn a_document_is_cut_between_characters_until_its_prompt_fits() {
        let (tokenizer, template) = (tokenizer(), template("{query}<end>{document}."));
        let cut = |document: &'static str, limit| {
            let encode = |start: &str| tokenizer.encode_pair(&template, "q", start);
            tokenizer.encode_start(document, limit, encode).unwrap().map(|(start, ids)| (start, ids.len()))
        };
        assert_eq!(cut("abcdef", 9), Some(("abcdef", 9)));
        assert_eq!(cut("abcdef", 7), Some(("abcd", 7)));
        assert_eq!(cut("\u{1f600}\u{1f600}", 10), Some(("\u{1f600}", 7)), "a character is never divided");
        assert_eq!(cut("\u{1f600}", 6), Some(("", 3)));
        assert_eq!(cut("abc", 2), None, "query and template alone");
        // An encoding that grows where the text is cut.
        let grows = |start: &str| Ok(vec![0; if start.len() == 100 { 100 } else { start.len() + 40 }]);
        let text = "x".repeat(100);
        let (start, ids) = tokenizer.encode_start(&text, 90, grows).unwrap().unwrap();
        assert!(ids.len() <= 90 && start.len() >= 30, "{}", start.len());
    }
}
