// SPDX-License-Identifier: Apache-2.0

//! Maps between token ids and strings with few allocations. A vocabulary of 150,000 tokens takes
//! three allocations, so that a router starts without delay.

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

/// Byte strings in one buffer, with ids from zero.
#[derive(Debug, Default)]
pub(crate) struct StringArena {
    bytes: Vec<u8>,
    /// End offset of each string. `MAX_VOCABULARY_BYTES` bounds them far below 4 GiB.
    ends: Vec<u32>,
}

impl StringArena {
    pub(crate) fn with_capacity(strings: usize, bytes: usize) -> Self {
        Self { bytes: Vec::with_capacity(bytes), ends: Vec::with_capacity(strings) }
    }

    /// Appends one string. `write` appends its bytes to the buffer.
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

/// Position of a string, stored beside its id: a lookup then needs no table of offsets. Loading a
/// vocabulary makes a million lookups that miss the CPU caches.
#[derive(Debug)]
struct TokenSpan {
    id: u32,
    start: u32,
    bytes: u32,
}

/// Maps strings to ids, for some of the strings of one [`StringArena`].
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

    /// Adds the last string of `strings`. If an earlier string is equal, returns its id as the
    /// error.
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
        // Merging looks up every pair of neighbours, however long they have become.
        if text.len() > self.longest {
            return None;
        }
        self.table.find(self.hasher.hash_one(text), |slot| strings.at(slot) == text).map(|slot| slot.id)
    }
}
