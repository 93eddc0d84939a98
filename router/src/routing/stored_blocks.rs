// SPDX-License-Identifier: Apache-2.0

//! The blocks that a worker's prefix cache holds, as its KV cache events say.

use std::collections::HashMap;

use super::{PrefixHash, PromptPrefix};

/// Maximum number of blocks of a worker: 4 million tokens, in at most 9 MiB. Of a larger cache the
/// router knows this part.
const BLOCKS_MAX: usize = 1 << 18;
/// Bits of a mask. Models have at most this many KV cache groups.
const GROUPS_MAX: u32 = u32::BITS;

/// A change of a worker's prefix cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvCacheChange {
    Stored { block: PrefixHash, group: u32 },
    Removed { block: PrefixHash, group: u32 },
    Cleared,
}

/// A block counts as cached if any KV cache group holds it. Groups with a window hold the end of a
/// prefix only, so this may be too many blocks, never too few.
#[derive(Debug, Default)]
pub(super) struct StoredBlocks {
    /// The groups that hold the block, as bits.
    groups: HashMap<PrefixHash, u32>,
}

impl StoredBlocks {
    pub(super) fn apply(&mut self, change: KvCacheChange) {
        match change {
            KvCacheChange::Stored { block, group } if group < GROUPS_MAX => {
                if self.groups.len() < BLOCKS_MAX || self.groups.contains_key(&block) {
                    *self.groups.entry(block).or_default() |= 1 << group;
                }
            }
            KvCacheChange::Removed { block, group } if group < GROUPS_MAX => {
                if let Some(groups) = self.groups.get_mut(&block) {
                    *groups &= !(1 << group);
                    if *groups == 0 {
                        self.groups.remove(&block);
                    }
                }
            }
            KvCacheChange::Stored { .. } | KvCacheChange::Removed { .. } => {}
            KvCacheChange::Cleared => self.groups.clear(),
        }
    }

    pub(super) fn cached_tokens(&self, prompt: &PromptPrefix) -> u64 {
        prompt.known_tokens(|hash| self.groups.contains_key(hash))
    }

    pub(super) fn bytes(&self) -> u64 {
        (self.groups.capacity() * (size_of::<(PrefixHash, u32)>() + 1)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(number: u64) -> PrefixHash {
        let mut hash = [0; 32];
        hash[..8].copy_from_slice(&number.to_le_bytes());
        PrefixHash::from(&hash)
    }

    #[test]
    fn a_block_is_known_until_the_last_group_has_removed_it() {
        let (prompt, mut stored) = (PromptPrefix::new("", &[7; 40]), StoredBlocks::default());
        let [first, second] = [0, 1].map(|index| prompt.hashes()[index]);
        stored.apply(KvCacheChange::Stored { block: first, group: 0 });
        assert_eq!(stored.cached_tokens(&prompt), 16);
        stored.apply(KvCacheChange::Stored { block: second, group: 0 });
        stored.apply(KvCacheChange::Stored { block: second, group: 1 });
        stored.apply(KvCacheChange::Removed { block: second, group: 0 });
        assert_eq!(stored.cached_tokens(&prompt), 32);
        stored.apply(KvCacheChange::Removed { block: second, group: 1 });
        stored.apply(KvCacheChange::Removed { block: second, group: 1 });
        assert_eq!(stored.cached_tokens(&prompt), 16);
        stored.apply(KvCacheChange::Cleared);
        assert_eq!(stored.cached_tokens(&prompt), 0);
    }

    #[test]
    fn a_worker_that_floods_takes_at_most_9_mib() {
        let mut stored = StoredBlocks::default();
        for number in 0..2 * BLOCKS_MAX as u64 {
            stored.apply(KvCacheChange::Stored { block: block(number), group: number as u32 % 64 });
        }
        assert!(stored.groups.len() <= BLOCKS_MAX);
        assert!(stored.bytes() <= 9 << 20, "{}", stored.bytes());
    }
}
