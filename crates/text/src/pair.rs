// SPDX-License-Identifier: Apache-2.0

//! Prompts of a model that scores how well a document answers a query.
//!
//! A file may have a template with the placeholders `{query}` and `{document}`, as llama.cpp writes
//! it. Without a template the prompt is `[BOS] query [EOS] document [EOS]`, with the tokens that
//! the file says to add.

use gguf::{KeyError, Metadata};

use crate::tokenizer::{EncodeOptions, Tokenizer};
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

    /// The template with both texts in their places. A placeholder inside a text stays as it is.
    fn fill(template: &str, query: &str, document: &str) -> String {
        let mut filled = String::with_capacity(template.len() + query.len() + document.len());
        let mut rest = template;
        while let Some(at) = rest.find('{') {
            let (before, from) = rest.split_at(at);
            filled.push_str(before);
            let (text, taken) = match from {
                _ if from.starts_with(QUERY) => (query, QUERY.len()),
                _ if from.starts_with(DOCUMENT) => (document, DOCUMENT.len()),
                _ => ("{", 1),
            };
            filled.push_str(text);
            rest = &from[taken..];
        }
        filled.push_str(rest);
        filled
    }
}

impl Tokenizer {
    /// Encodes a query and a document as one prompt. Names of control tokens become those tokens in
    /// a template, as in llama.cpp.
    pub fn encode_pair(
        &self,
        template: &PairTemplate,
        query: &str,
        document: &str,
    ) -> Result<Vec<u32>, EncodeError> {
        if let Some(template) = &template.source {
            let text = PairTemplate::fill(template, query, document);
            return self.encode(&text, EncodeOptions { add_special: false, parse_special: true });
        }
        let end = self.eos.filter(|_| self.add_eos);
        let mut ids: Vec<u32> = self.bos.filter(|_| self.add_bos).into_iter().collect();
        for text in [query, document] {
            self.encode_part(text, false, true, &mut ids)?;
            ids.extend(end);
        }
        Ok(ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_stand_in_their_places_and_placeholders_in_texts_stay() {
        let fill = |template| PairTemplate::fill(template, "q {document}", "d {query}");
        assert_eq!(fill("<Q>{query}<D>{document}{"), "<Q>q {document}<D>d {query}{");
        assert_eq!(fill("{doc}{document}"), "{doc}d {query}");
    }
}
