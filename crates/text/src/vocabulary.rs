//! What a model file says about its tokenizer, as plain borrowed data: the one input of [`crate::Tokenizer`].
//!
//! Nothing is checked here; `Tokenizer::new` checks all of it, so that a vocabulary built by hand (tests, other
//! sources) meets the same rules as one from a file.

/// What a token is, numbered as `tokenizer.ggml.token_type` numbers it.
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

/// The `tokenizer.ggml.*` keys of a file; a field is named after its key.
#[derive(Debug, Clone, Default)]
pub struct RawVocabulary<'a> {
    /// `tokenizer.ggml.model`: the algorithm.
    pub model: &'a str,
    /// `tokenizer.ggml.pre`: how text is cut before merging; byte-level models only.
    pub pre: Option<&'a str>,
    pub tokens: Vec<&'a str>,
    /// As long as `tokens`, or empty: all normal.
    pub kinds: Vec<TokenKind>,
    /// As long as `tokens` for SentencePiece models, else ignored.
    pub scores: Vec<f32>,
    /// "left right" in order of rank; byte-level and raw-text models.
    pub merges: Vec<&'a str>,
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub eot: Option<u32>,
    pub eom: Option<u32>,
    pub unknown: Option<u32>,
    /// Fill-in-the-middle tokens that end a generation: padding, repository name, file separator.
    pub fim_pad: Option<u32>,
    pub fim_rep: Option<u32>,
    pub fim_sep: Option<u32>,
    pub add_bos: Option<bool>,
    pub add_eos: Option<bool>,
    pub add_space_prefix: Option<bool>,
}
