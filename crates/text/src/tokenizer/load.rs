// SPDX-License-Identifier: Apache-2.0

//! Builds a [`Tokenizer`] from a [`RawVocabulary`], with all checks.

use crate::byte_alphabet::decode_into;
use crate::byte_level::ByteLevel;
use crate::fill_in_middle::MiddleTokens;
use crate::sentencepiece::{SPACE_MARK, Sentencepiece, byte_of};
use crate::special::SpecialTokens;
use crate::token_table::{StringArena, TokenIndex};
use crate::tokenizer_error::{LoadTokenizerError, MAX_TOKENS, MAX_VOCABULARY_BYTES};
use crate::vocabulary::{RawVocabulary, TokenKind};
use crate::{end_of_generation, pretokenizers};

use super::encode::{Tokenizer, TokenizerModel};

impl Tokenizer {
    pub fn new(vocabulary: &RawVocabulary<'_>) -> Result<Self, LoadTokenizerError> {
        let tokens = vocabulary.tokens.len();
        let text_bytes = vocabulary.tokens.iter().map(|text| text.len()).sum();
        if tokens == 0 {
            return Err(LoadTokenizerError::MissingKey { key: "tokenizer.ggml.tokens" });
        }
        if tokens > MAX_TOKENS {
            return Err(LoadTokenizerError::TooManyTokens { tokens });
        }
        if text_bytes > MAX_VOCABULARY_BYTES {
            return Err(LoadTokenizerError::TooManyBytes { bytes: text_bytes });
        }
        let kinds = match vocabulary.kinds.len() {
            0 => vec![TokenKind::Normal; tokens],
            // The list of types may be longer than the vocabulary, as an embedding may be padded.
            found if found >= tokens => vocabulary.kinds[..tokens].to_vec(),
            found => {
                return Err(LoadTokenizerError::LengthMismatch {
                    key: "tokenizer.ggml.token_type",
                    found,
                    tokens,
                });
            }
        };
        check_ids(vocabulary)?;

        let special = SpecialTokens::new(&vocabulary.tokens, &kinds)?;
        let (bytes, model, default_add_bos) = match vocabulary.model {
            "gpt2" => {
                let pre =
                    vocabulary.pre.ok_or(LoadTokenizerError::MissingKey { key: "tokenizer.ggml.pre" })?;
                let pre = pretokenizers::find(pre)
                    .ok_or_else(|| LoadTokenizerError::UnknownPre { pre: pre.to_owned() })?;
                let (bytes, index) = byte_level_strings(vocabulary, &kinds, text_bytes)?;
                let model = ByteLevel::new(vocabulary, pre, &bytes, index)?;
                (bytes, TokenizerModel::ByteLevel(model), pre.add_bos)
            }
            "llama" => {
                let model = Sentencepiece::by_score(vocabulary, &kinds)?;
                (marked_strings(vocabulary, &kinds, text_bytes), TokenizerModel::Sentencepiece(model), true)
            }
            "gemma4" => {
                let model = Sentencepiece::by_pairs(vocabulary, &kinds)?;
                (marked_strings(vocabulary, &kinds, text_bytes), TokenizerModel::Sentencepiece(model), true)
            }
            other => return Err(LoadTokenizerError::UnknownModel { model: other.to_owned() }),
        };

        // Gemma files say false by mistake; the models do not work without BOS.
        let add_bos = vocabulary.model == "gemma4" || vocabulary.add_bos.unwrap_or(default_add_bos);
        let add_eos = vocabulary.add_eos.unwrap_or(false);
        for (asked, adds, missing, id) in [
            ("tokenizer.ggml.add_bos_token", add_bos, "tokenizer.ggml.bos_token_id", vocabulary.bos),
            ("tokenizer.ggml.add_eos_token", add_eos, "tokenizer.ggml.eos_token_id", vocabulary.eos),
        ] {
            if adds && id.is_none() {
                return Err(LoadTokenizerError::SpecialMissing { asked, missing });
            }
        }
        Ok(Self {
            middle_tokens: MiddleTokens::find(vocabulary, &kinds),
            end_of_generation: end_of_generation::tokens(vocabulary, &kinds),
            bytes,
            kinds,
            special,
            model,
            bos: vocabulary.bos,
            eos: vocabulary.eos,
            add_bos,
            add_eos,
        })
    }
}

fn check_ids(vocabulary: &RawVocabulary<'_>) -> Result<(), LoadTokenizerError> {
    let tokens = vocabulary.tokens.len();
    for (key, id) in [
        ("tokenizer.ggml.bos_token_id", vocabulary.bos),
        ("tokenizer.ggml.eos_token_id", vocabulary.eos),
        ("tokenizer.ggml.eot_token_id", vocabulary.eot),
        ("tokenizer.ggml.eom_token_id", vocabulary.eom),
        ("tokenizer.ggml.unknown_token_id", vocabulary.unknown),
        ("tokenizer.ggml.fim_pre_token_id", vocabulary.fim_pre),
        ("tokenizer.ggml.fim_suf_token_id", vocabulary.fim_suf),
        ("tokenizer.ggml.fim_mid_token_id", vocabulary.fim_mid),
        ("tokenizer.ggml.fim_pad_token_id", vocabulary.fim_pad),
        ("tokenizer.ggml.fim_rep_token_id", vocabulary.fim_rep),
        ("tokenizer.ggml.fim_sep_token_id", vocabulary.fim_sep),
    ] {
        if let Some(id) = id.filter(|&id| id as usize >= tokens) {
            return Err(LoadTokenizerError::SpecialOutOfRange { key, id, tokens });
        }
    }
    Ok(())
}

/// Returns the bytes of all tokens of a byte-level vocabulary, and an index of those that merging
/// may produce.
fn byte_level_strings(
    vocabulary: &RawVocabulary<'_>,
    kinds: &[TokenKind],
    text_bytes: usize,
) -> Result<(StringArena, TokenIndex), LoadTokenizerError> {
    let mut strings = StringArena::with_capacity(kinds.len(), text_bytes);
    let mut index = TokenIndex::with_capacity(kinds.len());
    for ((id, text), kind) in (0..).zip(&vocabulary.tokens).zip(kinds) {
        let mut in_alphabet = false;
        strings.push_with(|out| match kind {
            TokenKind::Normal | TokenKind::Unused | TokenKind::Byte => {
                in_alphabet = !text.is_empty() && decode_into(text, out);
                if !in_alphabet {
                    out.extend_from_slice(text.as_bytes());
                }
            }
            // The file stores these as plain text.
            TokenKind::Unknown | TokenKind::Control | TokenKind::UserDefined => {
                out.extend_from_slice(text.as_bytes());
            }
        });
        if in_alphabet {
            index
                .insert_last(&strings)
                .map_err(|first| LoadTokenizerError::DuplicateToken { first, second: id })?;
        }
    }
    Ok((strings, index))
}

/// Returns the bytes of all tokens of a vocabulary that writes spaces as U+2581.
fn marked_strings(vocabulary: &RawVocabulary<'_>, kinds: &[TokenKind], text_bytes: usize) -> StringArena {
    let mut strings = StringArena::with_capacity(kinds.len(), text_bytes);
    for (text, kind) in vocabulary.tokens.iter().zip(kinds) {
        strings.push_with(|out| match (kind, byte_of(text)) {
            (TokenKind::Byte, Some(byte)) => out.push(byte),
            (TokenKind::Normal | TokenKind::Unused, _) => {
                out.extend_from_slice(text.replace(SPACE_MARK, " ").as_bytes())
            }
            _ => out.extend_from_slice(text.as_bytes()),
        });
    }
    strings
}
