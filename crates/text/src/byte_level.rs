//! Byte-level BPE (`tokenizer.ggml.model` "gpt2"): text is cut by a pre-tokenizer, a piece's bytes are merged by rank.

use std::borrow::Cow;

use hashbrown::HashMap;
use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use crate::merge::{Joined, Merger, Symbol};
use crate::pretokenizers::PreTokenizer;
use crate::splitter::Splitter;
use crate::token_table::{Index, Strings};
use crate::tokenizer::{EncodeError, LoadTokenizerError};
use crate::vocabulary::Vocabulary;

/// Pairs of token ids that join, with their rank and what they give.
#[derive(Debug)]
pub(crate) struct Merges {
    pairs: HashMap<u64, Joined>,
}

impl Merges {
    /// `id_of` finds the token that a part of a merge is written as.
    pub(crate) fn new(
        vocabulary: &Vocabulary<'_>,
        mut id_of: impl FnMut(&[&str]) -> Option<u32>,
    ) -> Result<Self, LoadTokenizerError> {
        let mut pairs = HashMap::with_capacity(vocabulary.merges.len());
        for (rank, merge) in vocabulary.merges.iter().enumerate() {
            let refused = || LoadTokenizerError::BadMerge { rank, merge: merge.chars().take(80).collect() };
            // The left part may itself begin with a space.
            let first = merge.chars().next().map_or(0, char::len_utf8);
            let (left, right) = merge[first..].split_once(' ').ok_or_else(refused)?;
            let left = &merge[..first + left.len()];
            let joined = Joined { priority: rank as u32, id: id_of(&[left, right]).ok_or_else(refused)? };
            let key = key(id_of(&[left]).ok_or_else(refused)?, id_of(&[right]).ok_or_else(refused)?);
            // A pair that comes twice keeps its first rank, as a scan of the list would.
            pairs.entry(key).or_insert(joined);
        }
        Ok(Self { pairs })
    }

    pub(crate) fn join(&self, left: Symbol, right: Symbol) -> Option<Joined> {
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
    index: Index,
    /// The token of each single byte.
    bytes: [Option<u32>; 256],
    merges: Merges,
}

impl ByteLevel {
    /// `strings` are the tokens' bytes, `index` those of them that merging may produce.
    pub(crate) fn new(
        vocabulary: &Vocabulary<'_>,
        pre: &PreTokenizer,
        strings: &Strings,
        index: Index,
    ) -> Result<Self, LoadTokenizerError> {
        let splitter = Splitter::new(pre).map_err(|source| LoadTokenizerError::Expression { source })?;
        let mut bytes = [None; 256];
        for (byte, id) in (0..=255u8).zip(&mut bytes) {
            *id = index.find(strings, &[byte]);
        }
        let mut spelled = Vec::new();
        let merges = Merges::new(vocabulary, |parts| {
            spelled.clear();
            parts.iter().all(|part| crate::byte_alphabet::decode_into(part, &mut spelled)).then_some(())?;
            index.find(strings, &spelled)
        })?;
        Ok(Self { splitter, nfc: pre.nfc, ignore_merges: pre.ignore_merges, index, bytes, merges })
    }

    pub(crate) fn encode(
        &self,
        text: &str,
        strings: &Strings,
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
        strings: &Strings,
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
