// SPDX-License-Identifier: Apache-2.0

//! Finds the tokens that end a generation: those that the file names by key, and control tokens
//! with a known end marker as text.
//!
//! A file often names only one of several. Llama 3's file names `<|end_of_text|>`, but chats end
//! with `<|eot_id|>`. Unlike llama.cpp, this module considers a marker only if the file marks its
//! token as control: Qwen3 has an ordinary token `</s>`, and a model that writes HTML must not stop
//! there.

use crate::vocabulary::{RawVocabulary, TokenKind};

const END_MARKERS: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    // Code Llama.
    "▁<EOT>",
    "[EOT]",
    "[EOS]",
    "</s>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<|eom_id|>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
    // Fill in the middle: padding, then the names of a repository and of the next file.
    "<|fim_pad|>",
    "<fim_pad>",
    "<fim-pad>",
    "<PAD>",
    "[PAD]",
    "<|repo_name|>",
    "<|fim_repo|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
];

/// A marker that only separates messages if the vocabulary has both other tokens (harmony and
/// related formats).
const NOT_AN_END_BESIDE: &[(&str, &[&str])] = &[
    ("<|end|>", &["<|return|>", "<|call|>"]),
    ("<|end|>", &["<|calls|>", "<|flush|>"]),
    ("</s>", &["<|tool_response>"]),
    ("</s>", &["<|plamo:eos|>"]),
];

/// Returns the ids of all tokens that end a generation, sorted.
pub(crate) fn tokens(vocabulary: &RawVocabulary<'_>, kinds: &[TokenKind]) -> Vec<u32> {
    let specials: Vec<(u32, &str)> = (0..)
        .zip(vocabulary.tokens.iter().copied())
        .zip(kinds)
        .filter(|(_, kind)| matches!(kind, TokenKind::Control | TokenKind::UserDefined))
        .map(|(token, _)| token)
        .collect();
    let exists = |text: &&str| specials.iter().any(|(_, other)| other == text);
    let mut ends = END_MARKERS.to_vec();
    for (marker, beside) in NOT_AN_END_BESIDE {
        if beside.iter().all(exists) {
            ends.retain(|end| end != marker);
        }
    }
    let by_text =
        specials.iter().filter(|(id, text)| kinds[*id as usize] == TokenKind::Control && ends.contains(text));
    let by_key = [
        vocabulary.eos,
        vocabulary.eot,
        vocabulary.eom,
        vocabulary.fim_pad,
        vocabulary.fim_rep,
        vocabulary.fim_sep,
    ];
    let mut ids: Vec<u32> = by_text.map(|(id, _)| *id).chain(by_key.into_iter().flatten()).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(tokens: &[(&'static str, TokenKind)], eos: Option<u32>) -> Vec<u32> {
        let kinds: Vec<_> = tokens.iter().map(|(_, kind)| *kind).collect();
        let tokens = tokens.iter().map(|(text, _)| *text).collect();
        super::tokens(&RawVocabulary { tokens, eos, ..RawVocabulary::default() }, &kinds)
    }

    #[test]
    fn ordinary_token_that_looks_like_an_end_is_not_one() {
        let tokens =
            [("</s>", TokenKind::Normal), ("<|im_end|>", TokenKind::Control), ("x", TokenKind::Normal)];
        assert_eq!(ends(&tokens, None), [1]);
        assert_eq!(
            ends(&tokens, Some(2)),
            [1, 2],
            "a token that the file names by key counts, whatever its text"
        );
    }

    /// StarCoder and Granite name a padding and a repository, Code Llama an end of the middle.
    #[test]
    fn what_follows_a_filled_gap_ends_the_generation() {
        let texts = ["<fim_pad>", "<reponame>", "\u{2581}<EOT>", "<fim_prefix>", "<fim_middle>"];
        let tokens = texts.map(|text| (text, TokenKind::Control));
        assert_eq!(ends(&tokens, None), [0, 1, 2]);
    }

    #[test]
    fn harmony_end_only_separates_messages() {
        let control = |text| (text, TokenKind::Control);
        assert_eq!(ends(&[control("<|end|>")], None), [0]);
        assert_eq!(ends(&[control("<|end|>"), control("<|return|>"), control("<|call|>")], None), [1, 2]);
    }
}
