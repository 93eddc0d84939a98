// SPDX-License-Identifier: Apache-2.0

//! The prompts that this router has placed on one worker, as hashes of their blocks: an estimate of
//! the worker's prefix cache.
//!
//! The estimate holds as many tokens as the worker's KV cache and drops the blocks that were placed
//! longest ago. A wrong estimate, like a collision of two hashes, costs time and nothing else: the
//! worker finds its cached blocks by its own keys.

use std::collections::{BTreeMap, HashMap};

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Tokens of a block. Coarser than the engine's blocks of 16, because the estimate only has to tell
/// long prefixes from short ones.
pub(crate) const PREFIX_BLOCK_TOKENS: usize = 64;
/// Maximum number of blocks of a worker: 4 million tokens, in some 5 MiB.
const BLOCKS_MAX: u64 = 1 << 16;

/// Hash of a block, all blocks before it, and the cache salt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PrefixHash(u64);

/// Hashes of the full blocks of `tokens`, in order.
pub fn prefix_hashes(cache_salt: &str, tokens: &[u32]) -> Vec<PrefixHash> {
    let mut hash = xxh3_64_with_seed(cache_salt.as_bytes(), 0);
    let mut bytes = [0; PREFIX_BLOCK_TOKENS * 4];
    let blocks = tokens.chunks_exact(PREFIX_BLOCK_TOKENS).map(|block| {
        for (bytes, token) in bytes.chunks_exact_mut(4).zip(block) {
            bytes.copy_from_slice(&token.to_le_bytes());
        }
        hash = xxh3_64_with_seed(&bytes, hash);
        PrefixHash(hash)
    });
    blocks.collect()
}

#[derive(Debug)]
pub(crate) struct PlacedPrefixes {
    /// The number of the placement that last had the block.
    placed: HashMap<PrefixHash, (u64, usize)>,
    /// The same blocks by placement and position, the oldest first.
    order: BTreeMap<(u64, usize), PrefixHash>,
    blocks_max: usize,
}

impl PlacedPrefixes {
    pub(crate) fn new(kv_tokens: u64) -> Self {
        let blocks_max = (kv_tokens / PREFIX_BLOCK_TOKENS as u64).min(BLOCKS_MAX) as usize;
        Self { placed: HashMap::new(), order: BTreeMap::new(), blocks_max }
    }

    /// Tokens of the longest known prefix.
    pub(crate) fn cached_tokens(&self, prefix: &[PrefixHash]) -> u64 {
        let known = prefix.iter().take_while(|hash| self.placed.contains_key(hash));
        (known.count() * PREFIX_BLOCK_TOKENS) as u64
    }

    /// Remembers a placed prompt. `placement` increases from call to call.
    pub(crate) fn insert(&mut self, prefix: &[PrefixHash], placement: u64) {
        // The first blocks are the newest in the order: without them, the later ones are useless.
        for (position, &hash) in prefix.iter().take(self.blocks_max).rev().enumerate() {
            if let Some(before) = self.placed.insert(hash, (placement, position)) {
                self.order.remove(&before);
            }
            self.order.insert((placement, position), hash);
        }
        while self.placed.len() > self.blocks_max
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.placed.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(seed: u32, count: usize) -> Vec<u32> {
        (0..count as u32).map(|n| n.wrapping_mul(7).wrapping_add(seed * 1000)).collect()
    }

    #[test]
    fn a_prefix_is_known_up_to_the_first_different_block() {
        let mut placed = PlacedPrefixes::new(1 << 20);
        let prompt = tokens(1, 1000);
        placed.insert(&prefix_hashes("", &prompt), 1);
        assert_eq!(placed.cached_tokens(&prefix_hashes("", &prompt)), 960, "15 full blocks");
        let mut other = prompt.clone();
        other[200] += 1;
        assert_eq!(placed.cached_tokens(&prefix_hashes("", &other)), 192);
        assert_eq!(placed.cached_tokens(&prefix_hashes("salt", &prompt)), 0);
        assert_eq!(placed.cached_tokens(&[]), 0);
    }

    #[test]
    fn the_oldest_placement_is_dropped_first_and_its_end_before_its_beginning() {
        let mut placed = PlacedPrefixes::new(20 * 64);
        let [first, second] = [1, 2].map(|seed| prefix_hashes("", &tokens(seed, 640)));
        placed.insert(&first, 1);
        placed.insert(&second, 2);
        placed.insert(&first, 3);
        placed.insert(&prefix_hashes("", &tokens(3, 256)), 4);
        assert_eq!(placed.cached_tokens(&first), 640);
        assert_eq!(placed.cached_tokens(&second), 384, "4 of 10 blocks were dropped");
        assert_eq!((placed.placed.len(), placed.order.len()), (20, 20));
    }
}
