// SPDX-License-Identifier: Apache-2.0

//! Block ids and prefix cache keys.

use prefix::BlockHash;

pub type BlockId = u32;

/// The null block: takes writes that no row reads, fills table entries that a group does not need,
/// and is the sentinel of the free list.
pub const NULL_BLOCK: BlockId = 0;

/// Key of a cached block: its content and the layers that computed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockKey {
    pub hash: BlockHash,
    /// Index of the KV cache group.
    pub group: u8,
}
