// SPDX-License-Identifier: Apache-2.0

//! [`RawVocabulary`]: the tokenizer data of a model file, borrowed and unchecked. It is the only
//! input of [`crate::Tokenizer`].
//!
//! `Tokenizer::new` makes all checks, so a vocabulary built by hand obeys the same rules as one
//! from a file.

/// Type of a token, with the numbers of `tokenizer.ggml.token_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenKind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl TokenKind {
    pub fn from_number(number: i32) -> Option<Self> {
        match number {
            1 => Some(Self::Normal),
            2 => Some(Self::Unknown),
            3 => Some(Self::Control),
            4 => Some(Self::UserDefined),
            5 => Some(Self::Unused),
            6 => Some(Self::Byte),
            _ => None,
        }
    }
}

/// The `tokenizer.ggml.*` keys of a file; each field has the name of its key.
#[derive(Debug, Clone, Default)]
pub struct RawVocabulary<'a> {
    /// `tokenizer.ggml.model`: the tokenization algorithm.
    pub model: &'a str,
    /// `tokenizer.ggml.pre`: the pre-tokenizer; byte-level models only.
    pub pre: Option<&'a str>,
    pub tokens: Vec<&'a str>,
    /// One entry per token, or empty if all tokens are normal.
    pub kinds: Vec<TokenKind>,
    /// One entry per token for SentencePiece models; ignored for others.
    pub scores: Vec<f32>,
    /// Merges as "left right", in rank order; byte-level and gemma4 models.
    pub merges: Vec<&'a str>,
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub eot: Option<u32>,
    pub eom: Option<u32>,
    pub unknown: Option<u32>,
    /// Fill-in-the-middle tokens of prompts: before the prefix, the suffix and the middle.
    pub fim_pre: Option<u32>,
    pub fim_suf: Option<u32>,
    pub fim_mid: Option<u32>,
    /// Fill-in-the-middle tokens that end a generation: padding, repository name, file separator.
    pub fim_pad: Option<u32>,
    pub fim_rep: Option<u32>,
    pub fim_sep: Option<u32>,
    pub add_bos: Option<bool>,
    pub add_eos: Option<bool>,
    pub add_space_prefix: Option<bool>,
}
