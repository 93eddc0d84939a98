// SPDX-License-Identifier: Apache-2.0

//! A model's vocabulary as the trie that masks are computed over. Built once per model, which takes
//! some tens of milliseconds. 150,000 tokens take about 15 MB.

use std::sync::Arc;

use llguidance::ParserFactory;
use llguidance::api::ParserLimits;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{
    ApproximateTokEnv, INVALID_TOKEN, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie,
};
use text::{TokenKind, Tokenizer};

/// Precedes the name of a control token. No text contains this byte.
const SPECIAL_MARKER: u8 = TokTrie::SPECIAL_TOKEN_MARKER;
/// Longer tokens (runs of blanks in some vocabularies) are never allowed. This bounds the depth of
/// the trie.
const TOKEN_BYTES_MAX: usize = 200;

/// Limits work and memory of one matcher. A mask takes about 50 us on average and tens of
/// milliseconds at most. The slowest mask of a hostile grammar (rules repeated about ten thousand
/// times) took half a second.
const PARSER_LIMITS: ParserLimits = ParserLimits {
    // An alternative takes two items. Rules are limited to 4,000.
    max_items_in_row: 10_000,
    initial_lexer_fuel: 1_000_000,
    step_lexer_fuel: 200_000,
    step_max_items: 200_000,
    // A state takes 1 to 2 kB, so a hostile grammar can make a request hold 20 MB.
    max_lexer_states: 10_000,
    max_grammar_size: 200_000,
    precompute_large_lexemes: false,
    verbose_errors: false,
};

pub struct GrammarVocabulary {
    pub(crate) factory: ParserFactory,
}

#[derive(Debug, thiserror::Error)]
pub enum GrammarVocabularyError {
    #[error("the vocabulary cannot be used for grammars: {reason}")]
    Unusable { reason: String },
}

impl GrammarVocabulary {
    pub fn new(tokenizer: &Tokenizer) -> Result<Self, GrammarVocabularyError> {
        let words: Vec<Vec<u8>> = (0..tokenizer.len() as u32).map(|id| trie_word(tokenizer, id)).collect();
        Self::from_words(&words, tokenizer.end_of_generation())
    }

    /// The vocabulary of a model without tokenizer: `tokens` ids that stand for no text, of which
    /// `ends` end the output. Grammars can only refer to the ids.
    pub fn without_texts(tokens: u32, ends: &[u32]) -> Result<Self, GrammarVocabularyError> {
        let words: Vec<Vec<u8>> =
            (0..tokens).map(|id| [&[SPECIAL_MARKER], format!("<{id}>").as_bytes()].concat()).collect();
        Self::from_words(&words, ends)
    }

    fn from_words(words: &[Vec<u8>], ends: &[u32]) -> Result<Self, GrammarVocabularyError> {
        let first = ends.first().copied().unwrap_or(INVALID_TOKEN);
        let mut trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, first), words);
        if !ends.is_empty() {
            trie = trie.with_eos_tokens(ends);
        }
        let tokens: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&tokens, InferenceCapabilities::default(), &slices)
            .map_err(|error| GrammarVocabularyError::Unusable { reason: error.to_string() })?;
        factory.quiet();
        *factory.limits_mut() = PARSER_LIMITS;
        Ok(Self { factory })
    }
}

/// The bytes that a token adds to the text. Control tokens add nothing: a grammar can only refer to
/// their names.
fn trie_word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let bytes = tokenizer.token_bytes(id).unwrap_or_default();
    match tokenizer.kind(id) {
        _ if bytes.is_empty() || bytes.len() > TOKEN_BYTES_MAX => Vec::new(),
        Some(TokenKind::Normal | TokenKind::UserDefined | TokenKind::Byte) => bytes.to_vec(),
        Some(TokenKind::Control | TokenKind::Unknown) => [&[SPECIAL_MARKER], bytes].concat(),
        Some(TokenKind::Unused) | None => Vec::new(),
    }
}

const _: fn() = || {
    fn moves_between_threads<T: Send>() {}
    moves_between_threads::<GrammarVocabulary>();
};
