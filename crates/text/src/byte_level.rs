// SPDX-License-Identifier: Apache-2.0

//! Byte-level BPE (`tokenizer.ggml.model` "gpt2"): a pre-tokenizer splits the text, then the bytes
//! of each piece are merged by rank.

use std::borrow::Cow;

use hashbrown::HashMap;
use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use crate::merge::{MergedPair, Merger, Symbol};
use crate::pretokenizers::PreTokenizer;
use crate::splitter::Splitter;
use crate::token_table::{StringArena, TokenIndex};
use crate::tokenizer_error::{EncodeError, LoadTokenizerError};
use crate::vocabulary::RawVocabulary;

/// The merge rules: for a pair of token ids, its rank and the id of the merged token.
#[derive(Debug)]
pub(crate) struct Merges {
    pairs: HashMap<u64, MergedPair>,
}

impl Merges {
    /// Builds the rules from the vocabulary's list of merges. `spell` appends the bytes of one part
    /// of a merge as `strings` stores them; it returns false if it cannot.
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
                // The left part may begin with a space, so the search for the separator starts
                // behind its first character.
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
            // A duplicate pair keeps its first rank, as a scan of the list would find it.
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

/// A byte-level BPE model.
#[derive(Debug)]
pub(crate) struct ByteLevel {
    splitter: Splitter,
    nfc: bool,
    ignore_merges: bool,
    /// The tokens that encoding can produce, indexed by their bytes.
    index: TokenIndex,
    /// The token of each single byte, if the vocabulary has one.
    bytes: [Option<u32>; 256],
    merges: Merges,
}

impl ByteLevel {
    /// `strings` holds the bytes of all tokens; `index` contains those tokens that merging may
    /// produce.
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
