//! Strings by number and numbers by string, in one arena: a vocabulary of 150,000 tokens is three allocations, so a
//! router starts without a pause.

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

/// Byte strings numbered from zero, back to back in one buffer.
#[derive(Debug, Default)]
pub(crate) struct Strings {
    bytes: Vec<u8>,
    /// End offset of each string; lengths are bounded by `MAX_VOCABULARY_BYTES`, far below 4 GiB.
    ends: Vec<u32>,
}

impl Strings {
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
}

/// String to number over some of the strings of one [`Strings`].
#[derive(Debug, Default)]
pub(crate) struct Index {
    table: HashTable<u32>,
    hasher: DefaultHashBuilder,
    longest: usize,
}

impl Index {
    pub(crate) fn with_capacity(strings: usize) -> Self {
        Self { table: HashTable::with_capacity(strings), ..Self::default() }
    }

    /// Adds string `id`, or says which earlier number has the same text.
    pub(crate) fn insert(&mut self, strings: &Strings, id: u32) -> Result<(), u32> {
        let text = strings.get(id).unwrap_or_default();
        let hash = self.hasher.hash_one(text);
        if let Some(&earlier) = self.table.find(hash, |&other| strings.get(other) == Some(text)) {
            return Err(earlier);
        }
        let rehash = |&other: &u32| self.hasher.hash_one(strings.get(other).unwrap_or_default());
        self.table.insert_unique(hash, id, rehash);
        self.longest = self.longest.max(text.len());
        Ok(())
    }

    pub(crate) fn find(&self, strings: &Strings, text: &[u8]) -> Option<u32> {
        // Merging asks about every pair of neighbours, however long they have grown.
        if text.len() > self.longest {
            return None;
        }
        self.table.find(self.hasher.hash_one(text), |&id| strings.get(id) == Some(text)).copied()
    }
}
