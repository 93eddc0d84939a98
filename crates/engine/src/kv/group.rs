//! KV cache groups.

use ops::AttentionSpan;

/// Which part of the past the layers of a group read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvGroupKind {
    /// All keys and values.
    Full,
    /// Keys and values of the last `tokens` positions, the row's own among them.
    Window { tokens: usize },
    /// A state that every row moves on: the one after the row before. A block holds one state, after its last row; so a
    /// state can be found and gone on from where a step ended at the end of a block.
    State,
}

impl KvGroupKind {
    /// The first table entry that a row at `position`, or any after it, reads.
    pub fn first_entry_read(self, position: usize, block_tokens: usize) -> usize {
        match self {
            KvGroupKind::Full => 0,
            KvGroupKind::Window { tokens } => (position + 1).saturating_sub(tokens) / block_tokens,
            KvGroupKind::State => position.saturating_sub(1) / block_tokens,
        }
    }

    /// Blocks that a sequence of `entries` table entries, computed in chunks of at most `chunk` rows, ever holds at once: no
    /// more than these are asked for before it is admitted either, when it finds a cached prefix.
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

    /// Blocks to take before `missing` entries more are computed in chunks of at most `chunk` rows. What a group leaves
    /// behind is free again before its next chunk.
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
            // A row sees itself at least.
            AttentionSpan::Window { tokens } => Self::Window { tokens: tokens.max(1) },
        }
    }
}
