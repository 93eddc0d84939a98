//! Byte-level BPE (`tokenizer.ggml.model` "gpt2"): text is cut by a pre-tokenizer, a piece's bytes are merged by rank.

use std::borrow::Cow;

use hashbrown::HashMap;
use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use crate::merge::{MergedPair, Merger, Symbol};
use crate::pretokenizers::PreTokenizer;
use crate::splitter::Splitter;
use crate::token_table::{StringArena, TokenIndex};
use crate::tokenizer::{EncodeError, LoadTokenizerError};
use crate::vocabulary::RawVocabulary;

/// Pairs of token ids that join, with their rank and what they give.
#[derive(Debug)]
pub(crate) struct Merges {
    pairs: HashMap<u64, MergedPair>,
}

impl Merges {
    /// `spell` appends the bytes that a part of a merge is written as in `strings`, or says that it cannot.
    pub(crate) fn new(
        vocabulary: &RawVocabulary<'_>,
        strings: &StringArena,
        index: &TokenIndex,
        spell: impl Fn(&str, &mut Vec<u8>) -> bool,
    ) -> Result<Self, LoadTokenizerError> {
        let mut pairs = HashMap::with_capacity(vocabulary.merges.len());
        let mut bytes = Vec::new();
        for (rank, merge) in vocabulary.merges.iter().enumerate() {
            let mut pair = || {
                // The left part may itself begin with a space.
                let first = merge.chars().next()?.len_utf8();
                let (left, right) = merge.split_at(first + merge[first..].find(' ')?);
                bytes.clear();
                let cut = spell(left, &mut bytes).then_some(bytes.len())?;
                spell(&right[1..], &mut bytes).then_some(())?;
                let id = |bytes: &[u8]| index.find(strings, bytes);
                Some((key(id(&bytes[..cut])?, id(&bytes[cut..])?), id(&bytes)?))
            };
            let (key, id) = pair().ok_or_else(|| LoadTokenizerError::BadMerge {
                rank,
                merge: merge.chars().take(80).collect(),
            })?;
            // A pair that comes twice keeps its first rank, as a scan of the list would.
            pairs.entry(key).or_insert(MergedPair { priority: rank as u32, id });
        }
        Ok(Self { pairs })
    }

    pub(crate) fn join(&self, left: Symbol, right: Symbol) -> Option<MergedPair> {
        self.pairs.get(&key(left.id, right.id)).copied()
    }
}

fn key(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

#[derive(Debug)]
pub(crate) struct ByteLevel {
    splitter: Splitter,
    nfc: bool,
    ignore_merges: bool,
    /// Tokens that text may become, by their bytes.
    index: TokenIndex,
    /// The token of each single byte.
    bytes: [Option<u32>; 256],
    merges: Merges,
}

impl ByteLevel {
    /// `strings` are the tokens' bytes, `index` those of them that merging may produce.
    pub(crate) fn new(
        vocabulary: &RawVocabulary<'_>,
        pre: &PreTokenizer,
        strings: &StringArena,
        index: TokenIndex,
    ) -> Result<Self, LoadTokenizerError> {
        let splitter = Splitter::new(pre).map_err(|source| LoadTokenizerError::Expression { source })?;
        let mut bytes = [None; 256];
        for (byte, id) in (0..=255u8).zip(&mut bytes) {
            *id = index.find(strings, &[byte]);
        }
        let merges = Merges::new(vocabulary, strings, &index, crate::byte_alphabet::decode_into)?;
        Ok(Self { splitter, nfc: pre.nfc, ignore_merges: pre.ignore_merges, index, bytes, merges })
    }

    pub(crate) fn encode(
        &self,
        text: &str,
        strings: &StringArena,
        merger: &mut Merger,
        out: &mut Vec<u32>,
    ) -> Result<(), EncodeError> {
        let text = match self.nfc && is_nfc_quick(text.chars()) != IsNormalized::Yes {
            true => Cow::Owned(text.nfc().collect::<String>()),
            false => Cow::Borrowed(text),
        };
        let mut result = Ok(());
        self.splitter.split(&text, |piece| {
            if result.is_ok() {
                result = self.encode_piece(text[piece].as_bytes(), strings, merger, out);
            }
        });
        result
    }

    fn encode_piece(
        &self,
        piece: &[u8],
        strings: &StringArena,
        merger: &mut Merger,
        out: &mut Vec<u32>,
    ) -> Result<(), EncodeError> {
        if self.ignore_merges
            && let Some(id) = self.index.find(strings, piece)
        {
            out.push(id);
            return Ok(());
        }
        merger.clear();
        for (position, &byte) in piece.iter().enumerate() {
            let id = self.bytes[usize::from(byte)].ok_or(EncodeError::NoTokenForByte { byte })?;
            merger.push(Symbol { id, start: position as u32, end: position as u32 + 1 });
        }
        merger.run(|left, right| self.merges.join(left, right));
        out.extend(merger.symbols().map(|symbol| symbol.id));
        Ok(())
    }
}
