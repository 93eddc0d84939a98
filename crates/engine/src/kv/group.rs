// SPDX-License-Identifier: Apache-2.0

//! KV cache groups: sets of layers that share a block table because they read the same part of the
//! past.

use ops::AttentionSpan;

/// What part of the past the layers of a group read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvGroupKind {
    /// All keys and values.
    Full,
    /// Keys and values of the last `tokens` positions, including the row's own.
    Window { tokens: usize },
    /// A recurrent state, which every row updates. A block holds one state, that after the block's
    /// last row. A sequence can thus continue from a cached state only at the end of a block.
    State,
}

impl KvGroupKind {
    /// The first table entry that a row at `position`, or any later row, reads.
    pub fn first_entry_read(self, position: usize, block_tokens: usize) -> usize {
        match self {
            KvGroupKind::Full => 0,
            KvGroupKind::Window { tokens } => (position + 1).saturating_sub(tokens) / block_tokens,
            KvGroupKind::State => position.saturating_sub(1) / block_tokens,
        }
    }

    /// Most blocks that a sequence of `entries` table entries holds at once, if it is computed in
    /// chunks of at most `chunk` rows. Admission with a cached prefix needs no more either.
    pub fn blocks_held_max(self, entries: usize, chunk: usize, block_tokens: usize) -> usize {
        match self {
            KvGroupKind::Full => entries,
            KvGroupKind::Window { tokens } => {
                let found = tokens.div_ceil(block_tokens);
                entries.min(found.saturating_add(self.blocks_to_allocate(entries, chunk, block_tokens)))
            }
            KvGroupKind::State => entries.min(3),
        }
    }

    /// Blocks to allocate before `missing` more entries are computed in chunks of at most `chunk`
    /// rows. Blocks behind a window are free again before the next chunk.
    pub(super) fn blocks_to_allocate(self, missing: usize, chunk: usize, block_tokens: usize) -> usize {
        match self {
            KvGroupKind::Full => missing,
            KvGroupKind::Window { tokens } => {
                missing.min(tokens.saturating_add(chunk).div_ceil(block_tokens).saturating_add(1))
            }
            KvGroupKind::State => missing.min(2),
        }
    }
}

impl From<AttentionSpan> for KvGroupKind {
    fn from(span: AttentionSpan) -> Self {
        match span {
            AttentionSpan::Full => Self::Full,
            // A row always reads itself.
            AttentionSpan::Window { tokens } => Self::Window { tokens: tokens.max(1) },
        }
    }
}
