// SPDX-License-Identifier: Apache-2.0

//! The block hashes of a prompt, as the workers' prefix caches compute them.

use std::sync::Arc;

use prefix::{BlockHash, Scope};

/// Tokens of a block: that of every worker's KV cache. The events of a worker with other blocks
/// match nothing, so such a worker is judged by what was placed there.
pub(crate) const PREFIX_BLOCK_TOKENS: usize = 16;

/// The first bytes of the hash of a block, all blocks before it, and the cache scope. A collision
/// costs time and nothing else: a worker finds its cached blocks by the whole hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PrefixHash(u64);

impl From<&[u8; 32]> for PrefixHash {
    fn from(hash: &[u8; 32]) -> Self {
        let [a, b, c, d, e, f, g, h, ..] = *hash;
        Self(u64::from_le_bytes([a, b, c, d, e, f, g, h]))
    }
}

impl From<BlockHash> for PrefixHash {
    fn from(hash: BlockHash) -> Self {
        hash.as_bytes().into()
    }
}

/// Hashes of the full blocks of a prompt, in order. It is computed once for a prompt, and shared by
/// its choices and their placements.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptPrefix(Arc<[PrefixHash]>);

impl PromptPrefix {
    /// Prompts with different salts have no hash in common: no tenant learns from routing what
    /// another one has sent.
    pub fn new(cache_salt: &str, tokens: &[u32]) -> Self {
        let scope = Scope { salt: cache_salt.into(), extra: Vec::new() };
        Self(prefix::block_hashes(&scope, tokens, PREFIX_BLOCK_TOKENS).map(PrefixHash::from).collect())
    }

    pub fn hashes(&self) -> &[PrefixHash] {
        &self.0
    }

    /// Tokens of the longest prefix whose last block is known. If a block is known, so are those
    /// before it: caches drop the end of a prompt first. The search looks at few blocks of a long
    /// prompt.
    pub(super) fn known_tokens(&self, is_known: impl Fn(&PrefixHash) -> bool) -> u64 {
        (self.0.partition_point(is_known) * PREFIX_BLOCK_TOKENS) as u64
    }

    /// Tokens of the blocks that both prompts begin with.
    pub(super) fn common_tokens(&self, other: &Self) -> u64 {
        if self.0.first() != other.0.first() {
            return 0;
        }
        // A hash covers all blocks before it, so equal hashes are followed by no later difference.
        let pairs = self.0.len().min(other.0.len());
        let (mut equal, mut different) = (0, pairs);
        while equal < different {
            let middle = usize::midpoint(equal, different);
            match self.0[middle] == other.0[middle] {
                true => equal = middle + 1,
                false => different = middle,
            }
        }
        (equal * PREFIX_BLOCK_TOKENS) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hashes_are_those_of_the_workers() {
        let tokens: Vec<u32> = (0..40).collect();
        let prompt = PromptPrefix::new("salt", &tokens);
        let scope = Scope { salt: b"salt".to_vec(), extra: Vec::new() };
        let expected: Vec<PrefixHash> =
            prefix::block_hashes(&scope, &tokens, 16).map(|hash| hash.as_bytes().into()).collect();
        assert_eq!(prompt.hashes(), expected);
        assert_eq!(prompt.hashes().len(), 2, "only full blocks have a hash");
    }

    #[test]
    fn prompts_share_the_blocks_before_the_first_difference_and_salts_share_none() {
        let tokens: Vec<u32> = (0..1000).collect();
        let prompt = PromptPrefix::new("", &tokens);
        assert_eq!(prompt.common_tokens(&prompt), 992);
        for changed in [0, 15, 16, 300, 991, 999] {
            let mut other = tokens.clone();
            other[changed] += 1;
            let other = PromptPrefix::new("", &other);
            let expected = (changed / 16 * 16).min(992) as u64;
            assert_eq!(prompt.common_tokens(&other), expected, "token {changed}");
            assert_eq!(prompt.known_tokens(|hash| other.hashes().contains(hash)), expected);
        }
        assert_eq!(prompt.common_tokens(&PromptPrefix::new("salt", &tokens)), 0);
        assert_eq!(prompt.common_tokens(&PromptPrefix::new("", &tokens[..100])), 96);
        assert_eq!(prompt.common_tokens(&PromptPrefix::default()), 0);
    }
}
