// SPDX-License-Identifier: Apache-2.0

//! SentencePiece BPE: BPE over characters, with U+2581 in place of the space.
//!
//! Models of type "llama" rank a pair by the score of the merged token. Models of type "gemma4"
//! rank pairs by a list of merges.
//!
//! By definition a whole prompt is one piece (gemma4 splits at newlines). If no token contains a
//! space after another character, no merge can cross the start of a word. Splitting there gives the
//! same ids several times faster. Characters without a token become byte tokens `<0xXX>`.

use crate::byte_level::Merges;
use crate::merge::{MergedPair, Merger, NO_TOKEN, Symbol};
use crate::token_table::{StringArena, TokenIndex};
use crate::tokenizer_error::{EncodeError, LoadTokenizerError};
use crate::vocabulary::{RawVocabulary, TokenKind};

/// U+2581, which represents a space in these vocabularies.
pub(crate) const SPACE_MARK: &str = "\u{2581}";

#[derive(Debug)]
enum MergeRanking {
    /// Priority of each token, by id; the lowest merges first.
    Scores(Vec<u32>),
    Pairs(Merges),
}

/// A SentencePiece BPE model.
#[derive(Debug)]
pub(crate) struct Sentencepiece {
    /// The tokens as the file stores them, with U+2581.
    texts: StringArena,
    index: TokenIndex,
    ranking: MergeRanking,
    bytes: [Option<u32>; 256],
    unknown: Option<u32>,
    add_space_prefix: bool,
    split_newlines: bool,
    /// Text can be split at words, because no token contains a space after another character.
    split_words: bool,
}

/// Parses the text of a byte token, `<0xXX>`.
pub(crate) fn byte_of(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    // `from_str_radix` alone would accept a sign.
    let two_digits = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    two_digits.then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

/// Positions at which a run of U+2581 follows another character.
fn word_starts(text: &str) -> impl Iterator<Item = usize> {
    text.match_indices(SPACE_MARK).map(|(at, _)| at).filter(|&at| at > 0 && !text[..at].ends_with(SPACE_MARK))
}

/// Converts a score to a priority: a higher score gives a lower number.
fn priority_of(score: f32) -> u32 {
    // Adding zero turns -0.0 into 0.0, because the two are equal scores.
    let bits = (score + 0.0).to_bits();
    let ascending = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
    !ascending
}

impl Sentencepiece {
    pub(crate) fn by_score(
        vocabulary: &RawVocabulary<'_>,
        kinds: &[TokenKind],
    ) -> Result<Self, LoadTokenizerError> {
        let (tokens, scores) = (vocabulary.tokens.len(), vocabulary.scores.len());
        if scores != tokens {
            return Err(LoadTokenizerError::LengthMismatch {
                key: "tokenizer.ggml.scores",
                found: scores,
                tokens,
            });
        }
        if let Some(id) = vocabulary.scores.iter().position(|score| score.is_nan()) {
            return Err(LoadTokenizerError::BadScore { id });
        }
        let ranking =
            MergeRanking::Scores(vocabulary.scores.iter().map(|&score| priority_of(score)).collect());
        Self::new(vocabulary, kinds, ranking, vocabulary.add_space_prefix.unwrap_or(true), false)
    }

    pub(crate) fn by_pairs(
        vocabulary: &RawVocabulary<'_>,
        kinds: &[TokenKind],
    ) -> Result<Self, LoadTokenizerError> {
        let no_pairs = MergeRanking::Scores(Vec::new());
        let mut model = Self::new(vocabulary, kinds, no_pairs, false, true)?;
        let merges = Merges::new(vocabulary, &model.texts, &model.index, |part, out| {
            out.extend_from_slice(part.as_bytes());
            true
        })?;
        model.ranking = MergeRanking::Pairs(merges);
        Ok(model)
    }

    fn new(
        vocabulary: &RawVocabulary<'_>,
        kinds: &[TokenKind],
        ranking: MergeRanking,
        add_space_prefix: bool,
        split_newlines: bool,
    ) -> Result<Self, LoadTokenizerError> {
        let total = vocabulary.tokens.iter().map(|text| text.len()).sum();
        let mut texts = StringArena::with_capacity(vocabulary.tokens.len(), total);
        let mut index = TokenIndex::with_capacity(vocabulary.tokens.len());
        let mut bytes = [None; 256];
        let mut split_words = true;
        for ((id, text), kind) in (0..).zip(&vocabulary.tokens).zip(kinds) {
            texts.push_with(|out| out.extend_from_slice(text.as_bytes()));
            match kind {
                TokenKind::Byte => {
                    let byte = byte_of(text).ok_or(LoadTokenizerError::BadByteToken { id })?;
                    bytes[usize::from(byte)] = Some(id);
                }
                // Ordinary text must never merge into a control token.
                TokenKind::Control | TokenKind::Unknown => {}
                TokenKind::Normal | TokenKind::UserDefined | TokenKind::Unused if text.is_empty() => {}
                TokenKind::Normal | TokenKind::UserDefined | TokenKind::Unused => {
                    split_words &= word_starts(text).next().is_none();
                    index
                        .insert_last(&texts)
                        .map_err(|first| LoadTokenizerError::DuplicateToken { first, second: id })?;
                }
            }
        }
        let unknown = vocabulary.unknown;
        Ok(Self { texts, index, ranking, bytes, unknown, add_space_prefix, split_newlines, split_words })
    }

    pub(crate) fn adds_space_prefix(&self) -> bool {
        self.add_space_prefix
    }

    /// Encodes the text between two special tokens, which is never empty. `space_prefix` puts the
    /// space before it that the file may ask for.
    pub(crate) fn encode(
        &self,
        text: &str,
        space_prefix: bool,
        merger: &mut Merger,
        out: &mut Vec<u32>,
    ) -> Result<(), EncodeError> {
        let prefix = if space_prefix && self.add_space_prefix { SPACE_MARK } else { "" };
        let text = format!("{prefix}{}", text.replace(' ', SPACE_MARK));
        if !self.split_newlines {
            return self.encode_words(&text, merger, out);
        }
        let mut rest = text.as_str();
        while let Some(first) = rest.chars().next() {
            let end = rest.find(|c| (c == '\n') != (first == '\n')).unwrap_or(rest.len());
            let (piece, after) = rest.split_at(end);
            match self.index.find(&self.texts, piece.as_bytes()).filter(|_| first == '\n') {
                Some(id) => out.push(id),
                None => self.encode_words(piece, merger, out)?,
            }
            rest = after;
        }
        Ok(())
    }

    fn encode_words(&self, text: &str, merger: &mut Merger, out: &mut Vec<u32>) -> Result<(), EncodeError> {
        let mut at = 0;
        for start in word_starts(text).filter(|_| self.split_words) {
            self.encode_piece(&text[at..start], merger, out)?;
            at = start;
        }
        self.encode_piece(&text[at..], merger, out)
    }

    fn encode_piece(&self, text: &str, merger: &mut Merger, out: &mut Vec<u32>) -> Result<(), EncodeError> {
        let find = |start: u32, end: u32| {
            self.index.find(&self.texts, &text.as_bytes()[start as usize..end as usize])
        };
        merger.clear();
        for (start, c) in text.char_indices() {
            let (start, end) = (start as u32, (start + c.len_utf8()) as u32);
            merger.push(Symbol { id: find(start, end).unwrap_or(NO_TOKEN), start, end });
        }
        match &self.ranking {
            MergeRanking::Scores(priorities) => merger.run(|left, right| {
                let id = find(left.start, right.end)?;
                Some(MergedPair { priority: priorities[id as usize], id })
            }),
            MergeRanking::Pairs(merges) => merger.run(|left, right| merges.join(left, right)),
        }
        for symbol in merger.symbols() {
            match symbol.id {
                NO_TOKEN => self.spell(&text[symbol.start as usize..symbol.end as usize], out)?,
                id => out.push(id),
            }
        }
        Ok(())
    }

    /// Writes one character as byte tokens, or as the unknown token if the vocabulary lacks one of
    /// them.
    fn spell(&self, character: &str, out: &mut Vec<u32>) -> Result<(), EncodeError> {
        let before = out.len();
        for byte in character.bytes() {
            match (self.bytes[usize::from(byte)], self.unknown) {
                (Some(id), _) => out.push(id),
                (None, Some(unknown)) => {
                    out.truncate(before);
                    out.push(unknown);
                    return Ok(());
                }
                (None, None) => return Err(EncodeError::NoTokenForByte { byte }),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn priorities_order_as_scores_do() {
        let scores = [f32::INFINITY, 2.5, 1e-40, 0.0, -1e-40, -1.0, -31_740.0, f32::NEG_INFINITY];
        let priorities: Vec<u32> = scores.iter().map(|&s| priority_of(s)).collect();
        assert!(priorities.windows(2).all(|pair| pair[0] < pair[1]), "{priorities:?}");
        assert_eq!(priority_of(0.0), priority_of(-0.0));
    }

    #[test]
    fn words_start_with_their_blanks() {
        assert_eq!(word_starts("▁▁a▁b▁▁").collect::<Vec<_>>(), [7, 11]);
        assert_eq!(word_starts("▁▁a").count(), 0);
    }

    /// Splitting at words must not change ids: in this vocabulary "a b" is one token.
    #[test]
    fn token_across_words_is_found() {
        let tokens = vec!["a", "▁", "b", "▁b", "a▁b"];
        let kinds = vec![TokenKind::Normal; 5];
        let scores = vec![0.0, 0.0, 0.0, -1.0, -2.0];
        let add_space_prefix = Some(false);
        let vocabulary =
            RawVocabulary { model: "llama", tokens, scores, add_space_prefix, ..RawVocabulary::default() };
        let mut ids = vec![];
        let model = Sentencepiece::by_score(&vocabulary, &kinds).unwrap();
        model.encode("a b b", true, &mut Merger::default(), &mut ids).unwrap();
        assert_eq!(ids, [4, 3]);
    }

    #[test]
    fn only_two_hex_digits_are_a_byte_token() {
        assert_eq!(byte_of("<0x0A>"), Some(10));
        assert_eq!(byte_of("<0xfF>"), Some(255));
        for text in ["<0x>", "<0x+1>", "<0x1>", "<0x001>", "0x0A", "<0xG0>", ""] {
            assert_eq!(byte_of(text), None, "{text}");
        }
    }
}
