//! A vocabulary made ready: text to ids, ids to bytes. Immutable and shared: build once, keep in an `Arc`.

mod load;

use std::fmt;

use crate::byte_level::ByteLevel;
use crate::merge::Merger;
use crate::sentencepiece::Sentencepiece;
use crate::special::{Fragment, SpecialTokens};
use crate::token_table::StringArena;
use crate::vocabulary::TokenKind;

pub use load::LoadTokenizerError;

/// Longest text that one `encode` takes: about 900,000 tokens of English. The working memory of the worst text (one
/// piece of single bytes) is about 60 times its length.
pub const MAX_INPUT_BYTES: usize = 4 << 20;

/// How [`Tokenizer::encode`] reads a text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Put BOS before and EOS after, as the file says.
    pub add_special: bool,
    /// Texts of control tokens become those tokens. Only for text whose author may write control tokens.
    pub parse_special: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    #[error("text of {bytes} bytes is longer than {MAX_INPUT_BYTES}")]
    TooLong { bytes: usize },
    #[error("the vocabulary has no token for byte 0x{byte:02x} and no unknown token")]
    NoTokenForByte { byte: u8 },
}

#[derive(Debug)]
enum TokenizerModel {
    ByteLevel(ByteLevel),
    Sentencepiece(Sentencepiece),
}

pub struct Tokenizer {
    /// What each token contributes to text.
    bytes: StringArena,
    kinds: Vec<TokenKind>,
    special: SpecialTokens,
    model: TokenizerModel,
    bos: Option<u32>,
    eos: Option<u32>,
    add_bos: bool,
    add_eos: bool,
    end_of_generation: Vec<u32>,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("tokens", &self.kinds.len()).finish_non_exhaustive()
    }
}

impl Tokenizer {
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Result<Vec<u32>, EncodeError> {
        if text.len() > MAX_INPUT_BYTES {
            return Err(EncodeError::TooLong { bytes: text.len() });
        }
        // About four bytes a token in most languages.
        let mut ids = Vec::with_capacity(text.len() / 4 + 8);
        ids.extend(self.bos.filter(|_| options.add_special && self.add_bos));
        let mut merger = Merger::default();
        for fragment in self.special.split(text, options.parse_special) {
            match (fragment, &self.model) {
                (Fragment::Token(id), _) => ids.push(id),
                (Fragment::Text(text), TokenizerModel::ByteLevel(model)) => {
                    model.encode(text, &self.bytes, &mut merger, &mut ids)?;
                }
                (Fragment::Text(text), TokenizerModel::Sentencepiece(model)) => {
                    model.encode(text, &mut merger, &mut ids)?
                }
            }
        }
        ids.extend(self.eos.filter(|_| options.add_special && self.add_eos));
        Ok(ids)
    }

    /// Ids of a rendered chat template: control tokens are parsed, and BOS is added only if the template did not
    /// write it itself.
    pub fn encode_chat(&self, rendered: &str) -> Result<Vec<u32>, EncodeError> {
        let mut ids = self.encode(rendered, EncodeOptions { add_special: false, parse_special: true })?;
        if let Some(bos) = self.bos.filter(|bos| self.add_bos && ids.first() != Some(bos)) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// Number of tokens; the model's embedding may have more rows.
    pub fn len(&self) -> usize {
        self.kinds.len()
    }

    /// Never true: a vocabulary without tokens is refused.
    pub fn is_empty(&self) -> bool {
        self.kinds.is_empty()
    }

    /// What the token contributes to text, control tokens with their name; `None` for an id outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.bytes.get(id)
    }

    pub fn kind(&self, id: u32) -> Option<TokenKind> {
        self.kinds.get(id as usize).copied()
    }

    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    pub fn is_end_of_generation(&self, id: u32) -> bool {
        self.end_of_generation.binary_search(&id).is_ok()
    }

    /// All tokens that end a generation, sorted.
    pub fn end_of_generation(&self) -> &[u32] {
        &self.end_of_generation
    }

    /// Whether encoding put a space before the text that decoding from its start has to take away again.
    pub(crate) fn adds_space_prefix(&self) -> bool {
        matches!(&self.model, TokenizerModel::Sentencepiece(model) if model.adds_space_prefix())
    }
}

const _: fn() = || {
    fn shared_between_threads<T: Send + Sync>() {}
    shared_between_threads::<Tokenizer>();
};
