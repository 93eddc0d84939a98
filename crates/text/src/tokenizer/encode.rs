// SPDX-License-Identifier: Apache-2.0

//! [`Tokenizer`]: encodes text to token ids, and returns the bytes of ids. It is immutable: build
//! it once and share it in an `Arc`.

use std::fmt;

use crate::byte_level::ByteLevel;
use crate::fill_in_middle::MiddleTokens;
use crate::merge::Merger;
use crate::sentencepiece::Sentencepiece;
use crate::special::{Fragment, SpecialTokens};
use crate::token_table::StringArena;
use crate::tokenizer_error::{EncodeError, MAX_INPUT_BYTES};
use crate::vocabulary::TokenKind;

/// Options of [`Tokenizer::encode`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Adds BOS before and EOS after the text, as the file says.
    pub add_special: bool,
    /// Texts of control tokens become those tokens. Only for text whose author may write control
    /// tokens.
    pub parse_special: bool,
}

#[derive(Debug)]
pub(super) enum TokenizerModel {
    ByteLevel(ByteLevel),
    Sentencepiece(Sentencepiece),
}

/// A tokenizer that was loaded from a model file's vocabulary.
pub struct Tokenizer {
    /// The bytes that each token contributes to the text.
    pub(super) bytes: StringArena,
    pub(super) kinds: Vec<TokenKind>,
    pub(crate) special: SpecialTokens,
    pub(super) model: TokenizerModel,
    pub(crate) bos: Option<u32>,
    pub(crate) eos: Option<u32>,
    pub(crate) add_bos: bool,
    pub(crate) add_eos: bool,
    pub(super) end_of_generation: Vec<u32>,
    /// `None` if the model cannot fill in the middle.
    pub(crate) middle_tokens: Option<MiddleTokens>,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("tokens", &self.kinds.len()).finish_non_exhaustive()
    }
}

impl Tokenizer {
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Result<Vec<u32>, EncodeError> {
        // Most languages have about four bytes per token.
        let mut ids = Vec::with_capacity(text.len() / 4 + 8);
        ids.extend(self.bos.filter(|_| options.add_special && self.add_bos));
        self.encode_part(text, options.parse_special, true, &mut ids)?;
        ids.extend(self.eos.filter(|_| options.add_special && self.add_eos));
        Ok(ids)
    }

    /// Appends the ids of a text, without BOS and EOS. `space_prefix` puts the space before the
    /// text that the file may ask for.
    pub(crate) fn encode_part(
        &self,
        text: &str,
        parse_special: bool,
        space_prefix: bool,
        ids: &mut Vec<u32>,
    ) -> Result<(), EncodeError> {
        if text.len() > MAX_INPUT_BYTES {
            return Err(EncodeError::TooLong { bytes: text.len() });
        }
        let mut merger = Merger::default();
        // After a special token, the file's rule holds again.
        let mut space_prefix = space_prefix;
        for fragment in self.special.split(text, parse_special) {
            match (fragment, &self.model) {
                (Fragment::Token(id), _) => ids.push(id),
                (Fragment::Text(text), TokenizerModel::ByteLevel(model)) => {
                    model.encode(text, &self.bytes, &mut merger, ids)?;
                }
                (Fragment::Text(text), TokenizerModel::Sentencepiece(model)) => {
                    model.encode(text, space_prefix, &mut merger, ids)?;
                }
            }
            space_prefix = true;
        }
        Ok(())
    }

    /// Encodes a rendered chat template. Parses control tokens, and adds BOS only if the template
    /// has not written it.
    pub fn encode_chat(&self, rendered: &str) -> Result<Vec<u32>, EncodeError> {
        let mut ids = self.encode(rendered, EncodeOptions { add_special: false, parse_special: true })?;
        if let Some(bos) = self.bos.filter(|bos| self.add_bos && ids.first() != Some(bos)) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// Number of tokens. The model's embedding may have more rows.
    pub fn len(&self) -> usize {
        self.kinds.len()
    }

    /// Always false: `Tokenizer::new` refuses a vocabulary without tokens.
    pub fn is_empty(&self) -> bool {
        self.kinds.is_empty()
    }

    /// Bytes that a token contributes to the text; for control tokens, their name. `None` for an id
    /// outside the vocabulary.
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

    /// Ids of all tokens that end a generation, sorted.
    pub fn end_of_generation(&self) -> &[u32] {
        &self.end_of_generation
    }

    /// Whether encoding puts a space before the text, which detokenization has to remove.
    pub(crate) fn adds_space_prefix(&self) -> bool {
        matches!(&self.model, TokenizerModel::Sentencepiece(model) if model.adds_space_prefix())
    }
}

const _: fn() = || {
    fn shared_between_threads<T: Send + Sync>() {}
    shared_between_threads::<Tokenizer>();
};
