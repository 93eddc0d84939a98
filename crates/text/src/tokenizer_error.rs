// SPDX-License-Identifier: Apache-2.0

//! Errors of loading and using a tokenizer, and the limits that they name.

use crate::pretokenizers;

/// Most bytes of text that `encode` accepts: about 900,000 tokens of English. The working memory of
/// the worst case (one piece of single bytes) is about 60 times the text.
pub const MAX_INPUT_BYTES: usize = 4 << 20;

/// Most tokens in a vocabulary; the largest known have 262,144.
pub(crate) const MAX_TOKENS: usize = 1 << 22;
/// Most bytes of all token texts together. Offsets into them have 32 bits.
pub(crate) const MAX_VOCABULARY_BYTES: usize = 1 << 30;

/// Why a vocabulary cannot be used. Error texts name keys of the model file.
#[derive(Debug, thiserror::Error)]
pub enum LoadTokenizerError {
    #[error("the file has no {key}: it contains no tokenizer; convert the model again with its tokenizer")]
    MissingKey { key: &'static str },
    /// The file is complete, but its model works with token ids only.
    #[error("the model has no tokenizer (tokenizer.ggml.model is \"none\"): use token ids instead of text")]
    NoTokenizer,
    #[error("cannot read the tokenizer keys of the file")]
    Metadata {
        #[from]
        source: gguf::KeyError,
    },
    #[error("{key}: entry {index} is not UTF-8")]
    NotUtf8 { key: &'static str, index: usize },
    #[error(
        "tokenizer.ggml.model is {model:?}, which is not supported (supported: gpt2, llama, gemma4, none)"
    )]
    UnknownModel { model: String },
    #[error("tokenizer.ggml.pre is {pre:?}, which is not supported (supported: {})", supported_pre())]
    UnknownPre { pre: String },
    #[error("{key} has {found} entries for {tokens} tokens")]
    LengthMismatch { key: &'static str, found: usize, tokens: usize },
    #[error("tokenizer.ggml.tokens has {tokens} entries, more than {MAX_TOKENS}")]
    TooManyTokens { tokens: usize },
    #[error("the texts of tokenizer.ggml.tokens have {bytes} bytes, more than {MAX_VOCABULARY_BYTES}")]
    TooManyBytes { bytes: usize },
    #[error("tokenizer.ggml.tokens: tokens {first} and {second} have the same text")]
    DuplicateToken { first: u32, second: u32 },
    #[error("tokenizer.ggml.token_type: token {id} has the unknown type {number} (known: 1 to 6)")]
    BadTokenType { id: usize, number: i32 },
    #[error("tokenizer.ggml.tokens: byte token {id} is not written as <0xXX>")]
    BadByteToken { id: u32 },
    #[error("tokenizer.ggml.scores: the score of token {id} is not a number")]
    BadScore { id: usize },
    #[error(
        "tokenizer.ggml.merges: rank {rank}, {merge:?}, does not consist of two tokens that merge into a third"
    )]
    BadMerge { rank: usize, merge: String },
    #[error("{key} is {id}, but there are {tokens} tokens")]
    SpecialOutOfRange { key: &'static str, id: u32, tokens: usize },
    #[error("{asked} is true, but {missing} is absent")]
    SpecialMissing { asked: &'static str, missing: &'static str },
    #[error("cannot compile the expressions of the pre-tokenizer")]
    Expression { source: Box<regex_automata::meta::BuildError> },
    #[error("cannot build a matcher for the texts of the special tokens")]
    SpecialTokens { source: aho_corasick::BuildError },
}

fn supported_pre() -> String {
    let names: Vec<&str> = pretokenizers::PRE_TOKENIZERS.iter().flat_map(|row| row.names).copied().collect();
    names.join(", ")
}

/// Why a text could not be encoded.
#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    #[error("the text has {bytes} bytes; the limit is {MAX_INPUT_BYTES}")]
    TooLong { bytes: usize },
    #[error("the vocabulary has no token for byte 0x{byte:02x} and no unknown token")]
    NoTokenForByte { byte: u8 },
}
