// SPDX-License-Identifier: Apache-2.0

//! The one grammar of a request's output.
//!
//! A request may bring a grammar, allowed tokens, or words that must not occur. Allowed tokens and
//! such words are grammars too. Two of the three are refused.

use prost::Message;
use serde_json::json;

use super::{RequestParamError, RequestParams, STOP_STRING_BYTES_MAX, TokenLimits, token_ids};

/// The worker's limit for choices of 1 MiB plus the encoding around each, which this length
/// includes. The worker allows other grammars less.
pub(super) const GRAMMAR_BYTES_MAX: usize = 1536 << 10;

/// Each makes the automaton of the output larger.
const BAD_WORDS_MAX: usize = 16;
const ALLOWED_TOKENS_MAX: usize = 4096;

/// The grammar of a structured output and the name of the field that defined it. A worker compiles
/// the grammar and reports errors in it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RequestGrammar {
    pub(crate) param: &'static str,
    pub(crate) source: proto::v1::Grammar,
}

impl RequestGrammar {
    pub(crate) fn lark(param: &'static str, lark: String) -> Self {
        let kind = Some(proto::v1::grammar::Kind::Lark(lark));
        Self { param, source: proto::v1::Grammar { kind, ..proto::v1::Grammar::default() } }
    }
}

impl RequestParams {
    /// The grammar of the output. Allowed tokens and bad words are grammars too.
    pub(super) fn output_grammar(
        &self,
        limits: TokenLimits,
    ) -> Result<Option<RequestGrammar>, RequestParamError> {
        let allowed = token_ids("allowed_token_ids", &self.allowed_tokens, limits)?;
        for (param, count) in [("allowed_token_ids", allowed.len()), ("bad_words", self.bad_words.len())] {
            let max = if param == "bad_words" { BAD_WORDS_MAX } else { ALLOWED_TOKENS_MAX };
            if count > max {
                return Err(RequestParamError::TooManyEntries { param, count, max });
            }
        }
        for (index, word) in self.bad_words.iter().enumerate() {
            if word.is_empty() || word.len() > STOP_STRING_BYTES_MAX {
                let (bytes, max) = (word.len(), STOP_STRING_BYTES_MAX);
                return Err(RequestParamError::StringLength { param: "bad_words", index, bytes, max });
            }
        }
        let mut grammars = self.grammar.clone().into_iter().collect::<Vec<_>>();
        if !allowed.is_empty() {
            let ids: Vec<String> = allowed.iter().map(u32::to_string).collect();
            grammars
                .push(RequestGrammar::lark("allowed_token_ids", format!("start: <[{}]>*\n", ids.join(","))));
        }
        if !self.bad_words.is_empty() {
            let words: Vec<String> = self.bad_words.iter().map(|word| json!(word).to_string()).collect();
            let lark = format!(
                "start: TEXT?\nTEXT: /(.|\\n)+/ & ~(/(.|\\n)*/ ({}) /(.|\\n)*/)\n",
                words.join(" | ")
            );
            grammars.push(RequestGrammar::lark("bad_words", lark));
        }
        match &grammars[..] {
            [first, second, ..] => {
                Err(RequestParamError::TwoGrammars { param: second.param, other: first.param })
            }
            [grammar] => self.check_grammar(grammar).map(|()| grammars.pop()),
            [] => Ok(None),
        }
    }

    fn check_grammar(&self, grammar: &RequestGrammar) -> Result<(), RequestParamError> {
        let (param, bytes) = (grammar.param, grammar.source.encoded_len());
        if bytes > GRAMMAR_BYTES_MAX {
            return Err(RequestParamError::GrammarLength { param, bytes });
        }
        if self.ignore_eos {
            return Err(RequestParamError::IgnoreEosWithGrammar { with: param });
        }
        Ok(())
    }
}
