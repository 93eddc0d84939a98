//! StringArena by number and numbers by string, in one arena: a vocabulary of 150,000 tokens is three allocations, so a
//! router starts without a pause.

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

/// Byte strings numbered from zero, back to back in one buffer.
#[derive(Debug, Default)]
pub(crate) struct StringArena {
    bytes: Vec<u8>,
    /// End offset of each string; lengths are bounded by `MAX_VOCABULARY_BYTES`, far below 4 GiB.
    ends: Vec<u32>,
}

impl StringArena {
    pub(crate) fn with_capacity(strings: usize, bytes: usize) -> Self {
        Self { bytes: Vec::with_capacity(bytes), ends: Vec::with_capacity(strings) }
    }

    /// Appends one string, written by `write` to the end of the buffer.
    pub(crate) fn push_with(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        write(&mut self.bytes);
        self.ends.push(self.bytes.len() as u32);
    }

    pub(crate) fn get(&self, id: u32) -> Option<&[u8]> {
        let index = id as usize;
        let end = *self.ends.get(index)? as usize;
        let start = if index == 0 { 0 } else { self.ends[index - 1] as usize };
        Some(&self.bytes[start..end])
    }

    fn at(&self, slot: &TokenSpan) -> &[u8] {
        &self.bytes[slot.start as usize..][..slot.bytes as usize]
    }
}

/// Where a string stands, beside its number: a look-up then touches no table of offsets, and loading a vocabulary is
/// a million look-ups that miss the caches.
#[derive(Debug)]
struct TokenSpan {
    id: u32,
    start: u32,
    bytes: u32,
}

/// String to number over some of the strings of one [`StringArena`].
#[derive(Debug, Default)]
pub(crate) struct TokenIndex {
    table: HashTable<TokenSpan>,
    hasher: DefaultHashBuilder,
    longest: usize,
}

impl TokenIndex {
    pub(crate) fn with_capacity(strings: usize) -> Self {
        Self { table: HashTable::with_capacity(strings), ..Self::default() }
    }

    /// Adds the last string of `strings`, or says which earlier number has the same text.
    pub(crate) fn insert_last(&mut self, strings: &StringArena) -> Result<(), u32> {
        let Some(id) = strings.ends.len().checked_sub(1).map(|last| last as u32) else { return Ok(()) };
        let text = strings.get(id).unwrap_or_default();
        if let Some(earlier) = self.find(strings, text) {
            return Err(earlier);
        }
        let hash = self.hasher.hash_one(text);
        let slot =
            TokenSpan { id, start: (strings.bytes.len() - text.len()) as u32, bytes: text.len() as u32 };
        self.table.insert_unique(hash, slot, |other| self.hasher.hash_one(strings.at(other)));
        self.longest = self.longest.max(text.len());
        Ok(())
    }

    pub(crate) fn find(&self, strings: &StringArena, text: &[u8]) -> Option<u32> {
        // Merging asks about every pair of neighbours, however long they have grown.
        if text.len() > self.longest {
            return None;
        }
        self.table.find(self.hasher.hash_one(text), |slot| strings.at(slot) == text).map(|slot| slot.id)
    }
}
