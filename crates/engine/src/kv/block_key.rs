//! Numbers and keys of KV blocks.

use prefix::BlockHash;

pub type BlockId = u32;

/// Takes writes that nobody reads, fills tables where a group keeps nothing, and is the sentinel of the free list.
pub const NULL_BLOCK: BlockId = 0;

/// What a block is found by: its content, and the layers that made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockKey {
    pub hash: BlockHash,
    /// Index of the group of layers.
    pub group: u8,
}
