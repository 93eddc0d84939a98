// SPDX-License-Identifier: Apache-2.0

//! Chained block hashes.
//!
//! `H(-1) = blake3_keyed(ROOT, scope)` and `H(i) = blake3_keyed(H(i-1), tokens of block i)`, with
//! tokens as little-endian u32. A hash thus covers a block's tokens, all tokens before them, and
//! the scope. 16 tokens are one compression. Only full blocks have a hash.

use std::fmt;
use std::sync::LazyLock;

/// The same in all processes and on all machines.
const ROOT_CONTEXT: &str = "ballast 2026-11 prefix block hash root";

static ROOT: LazyLock<[u8; 32]> = LazyLock::new(|| blake3::derive_key(ROOT_CONTEXT, b""));

// Tokens are hashed as they lie in memory.
const _: () = assert!(cfg!(target_endian = "little"));

/// 256 bits: equal hashes count as equal content, even against tenants that try to collide.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash([u8; 32]);

impl BlockHash {
    /// The hash of the next block, which has `tokens`.
    pub fn next(&self, tokens: &[u32]) -> Self {
        Self(blake3::keyed_hash(&self.0, bytemuck::cast_slice(tokens)).into())
    }

    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl From<[u8; 32]> for BlockHash {
    fn from(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..6].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// What decides, besides the tokens, whether two requests may share blocks. All requests with the
/// default scope share.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Scope {
    /// Secret of a tenant. Without the salt, neither cache hits nor timing reveal other prompts.
    pub salt: Vec<u8>,
    /// Anything that changes keys and values of the same tokens, such as the name of an adapter.
    pub extra: Vec<Vec<u8>>,
}

impl Scope {
    /// The parent of the first block.
    pub fn start(&self) -> BlockHash {
        let mut hasher = blake3::Hasher::new_keyed(&ROOT);
        // Each part has its length in front, so no two scopes give the same bytes.
        for part in std::iter::once(&self.salt).chain(&self.extra) {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        BlockHash(hasher.finalize().into())
    }
}

/// Hashes of the full blocks of `tokens` in order.
pub fn block_hashes(scope: &Scope, tokens: &[u32], block_tokens: usize) -> impl Iterator<Item = BlockHash> {
    let blocks = tokens.chunks_exact(block_tokens);
    blocks.scan(scope.start(), |parent, block| {
        *parent = parent.next(block);
        Some(*parent)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hashes(scope: &Scope, tokens: &[u32]) -> Vec<BlockHash> {
        block_hashes(scope, tokens, 16).collect()
    }

    fn hex(hash: &BlockHash) -> String {
        hash.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Computed with the Python package `blake3` by the formula in the module documentation.
    #[test]
    fn hashes_are_the_same_on_every_machine() {
        let tokens: Vec<u32> = (0..32).collect();
        let plain = hashes(&Scope::default(), &tokens);
        assert_eq!(hex(&plain[0]), "13eb0db7e3b3ba9c44bb33e815389ae26564a3dddd7031b2d8b427747216ee5e");
        assert_eq!(hex(&plain[1]), "37c997c0187665c4708d95593dc16f40b2b563db72121c4bc37eb9c581498633");
        let tenant = Scope { salt: b"tenant".to_vec(), extra: vec![b"lora".to_vec()] };
        assert_eq!(
            hex(&hashes(&tenant, &tokens)[1]),
            "29ff2b2a296ba5a41cb8360accd03b50cc4527a7e91217109c40ec1eed17bfec"
        );
    }

    #[test]
    fn every_earlier_token_changes_the_hash() {
        let tokens: Vec<u32> = (0..48).collect();
        let before = hashes(&Scope::default(), &tokens);
        for changed in 0..tokens.len() {
            let mut other = tokens.clone();
            other[changed] += 1000;
            let after = hashes(&Scope::default(), &other);
            for block in 0..3 {
                assert_eq!(
                    before[block] == after[block],
                    block < changed / 16,
                    "token {changed}, block {block}"
                );
            }
        }
    }

    #[test]
    fn only_full_blocks_have_a_hash() {
        let tokens: Vec<u32> = (0..47).collect();
        assert_eq!(hashes(&Scope::default(), &tokens).len(), 2);
        assert_eq!(hashes(&Scope::default(), &tokens[..15]).len(), 0);
    }

    #[test]
    fn scopes_never_share() {
        let scope = |salt: &str, extra: &[&str]| Scope {
            salt: salt.into(),
            extra: extra.iter().map(|part| part.as_bytes().to_vec()).collect(),
        };
        let scopes = [
            scope("", &[]),
            scope("", &[""]),
            scope("a", &[]),
            scope("", &["a"]),
            scope("ab", &["c"]),
            scope("a", &["bc"]),
            scope("a", &["b", "c"]),
        ];
        let tokens: Vec<u32> = (0..16).collect();
        let mut seen: Vec<BlockHash> = scopes.iter().map(|scope| hashes(scope, &tokens)[0]).collect();
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), scopes.len());
    }
}
