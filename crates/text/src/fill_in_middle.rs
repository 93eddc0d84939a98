// SPDX-License-Identifier: Apache-2.0

//! Fill in the middle: prompts from which a model writes the text between a prefix and a suffix.
//!
//! ```text
//! [BOS] <prefix> text before the gap <suffix> text after the gap <middle>
//! ```
//!
//! This is the order prefix, suffix, middle of llama.cpp's `/infill`, of Code Llama, StarCoder,
//! Qwen and DeepSeek. A file names the three tokens by key. For files without keys, this module
//! knows the texts of those families that llama.cpp knows.

use crate::tokenizer::Tokenizer;
use crate::tokenizer_error::EncodeError;
use crate::vocabulary::{RawVocabulary, TokenKind};

/// The tokens before the prefix, before the suffix, and before the middle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MiddleTokens {
    prefix: u32,
    suffix: u32,
    middle: u32,
}

/// Texts of the three tokens in families of models. Codestral's `[SUFFIX]` and `[PREFIX]` are
/// absent: its prompts have another order and no third token.
const FAMILIES: &[[&str; 3]] = &[
    // Qwen, CodeGemma, Granite 3.
    ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
    // StarCoder, Granite.
    ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
    ["<fim-prefix>", "<fim-suffix>", "<fim-middle>"],
    // DeepSeek: the second token stands in the place of the gap.
    ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
    // GLM.
    ["<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"],
    // Falcon-H1-Tiny-Coder.
    ["<|prefix|>", "<|suffix|>", "<|middle|>"],
    // Code Llama.
    ["▁<PRE>", "▁<SUF>", "▁<MID>"],
    ["<PRE>", "<SUF>", "<MID>"],
];

impl MiddleTokens {
    /// Finds the tokens. A key of the file wins. A text counts only if the file does not mark its
    /// token as ordinary, and if the vocabulary has all three of the family.
    pub(crate) fn find(vocabulary: &RawVocabulary<'_>, kinds: &[TokenKind]) -> Option<Self> {
        let by_key = [vocabulary.fim_pre, vocabulary.fim_suf, vocabulary.fim_mid];
        let by_text = FAMILIES.iter().find_map(|family| tokens_of(family, vocabulary, kinds));
        let token = |role: usize| by_key[role].or(by_text.map(|ids| ids[role]));
        Some(Self { prefix: token(0)?, suffix: token(1)?, middle: token(2)? })
    }
}

fn tokens_of(family: &[&str; 3], vocabulary: &RawVocabulary<'_>, kinds: &[TokenKind]) -> Option<[u32; 3]> {
    let mut ids = [None; 3];
    for ((id, text), kind) in (0..).zip(&vocabulary.tokens).zip(kinds) {
        if matches!(kind, TokenKind::Control | TokenKind::UserDefined)
            && let Some(role) = family.iter().position(|name| name == text)
        {
            ids[role] = Some(id);
        }
    }
    let [prefix, suffix, middle] = ids;
    Some([prefix?, suffix?, middle?])
}

/// The text before the gap.
#[derive(Debug, Clone, Copy)]
pub enum MiddlePrefix<'a> {
    Text(&'a str),
    /// Without BOS.
    Tokens(&'a [u32]),
}

/// Why there is no prompt for the middle.
#[derive(Debug, thiserror::Error)]
pub enum EncodeMiddleError {
    #[error(
        "the model cannot fill in the middle: its file names no tokens for that \
         (tokenizer.ggml.fim_pre_token_id, fim_suf_token_id and fim_mid_token_id), and its \
         vocabulary has none with a known text, such as <|fim_prefix|>"
    )]
    NoTokens,
    #[error("the text before the gap: {0}")]
    Prefix(EncodeError),
    #[error("the text after the gap: {0}")]
    Suffix(EncodeError),
}

impl Tokenizer {
    /// Encodes the prompt for the text between `prefix` and `suffix`. Names of control tokens in
    /// both are plain text. `add_special` adds BOS, as the file says, and never EOS.
    pub fn encode_middle(
        &self,
        prefix: MiddlePrefix<'_>,
        suffix: &str,
        add_special: bool,
    ) -> Result<Vec<u32>, EncodeMiddleError> {
        let tokens = self.middle_tokens.ok_or(EncodeMiddleError::NoTokens)?;
        let mut ids: Vec<u32> = self.bos.filter(|_| add_special && self.add_bos).into_iter().collect();
        ids.push(tokens.prefix);
        match prefix {
            MiddlePrefix::Text(text) => {
                self.encode_part(text, false, true, &mut ids).map_err(EncodeMiddleError::Prefix)?;
            }
            MiddlePrefix::Tokens(given) => ids.extend(given),
        }
        ids.push(tokens.suffix);
        // Code Llama's own encoder puts a space before the prefix and none before the suffix.
        self.encode_part(suffix, false, false, &mut ids).map_err(EncodeMiddleError::Suffix)?;
        ids.push(tokens.middle);
        Ok(ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(tokens: &[(&'static str, TokenKind)], fim_suf: Option<u32>) -> Option<[u32; 3]> {
        let kinds: Vec<_> = tokens.iter().map(|(_, kind)| *kind).collect();
        let tokens = tokens.iter().map(|(text, _)| *text).collect();
        let found =
            MiddleTokens::find(&RawVocabulary { tokens, fim_suf, ..RawVocabulary::default() }, &kinds)?;
        Some([found.prefix, found.suffix, found.middle])
    }

    #[test]
    fn a_family_counts_whole_and_with_special_tokens_only() {
        let control = |text| (text, TokenKind::Control);
        let deepseek = [control("<｜fim▁end｜>"), control("<｜fim▁begin｜>"), control("<｜fim▁hole｜>")];
        assert_eq!(find(&deepseek, None), Some([1, 2, 0]));
        assert_eq!(find(&deepseek[..2], None), None);
        assert_eq!(find(&[control("<PRE>"), control("<fim_suffix>"), control("<MID>")], None), None);
        let html = ["<PRE>", "<SUF>", "<MID>"].map(|text| (text, TokenKind::Normal));
        assert_eq!(find(&html, None), None);
        assert_eq!(find(&deepseek, Some(0)), Some([1, 0, 0]), "the file's key wins");
    }
}
