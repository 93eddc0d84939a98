// SPDX-License-Identifier: Apache-2.0

//! The scheduler's state of one sequence: its tokens, how many of them are computed, and its block
//! tables.

use crate::kv::block_key::BlockId;
use crate::kv::block_pool::BlockPool;
use crate::kv::block_tables::{BlockCopy, BlockTables, PrefixHit};
use crate::kv::group::KvGroupKind;
use crate::schedule::sequence_id::SequenceId;
use crate::schedule::waiting_queue::ServiceRank;
use ops::DRAWN_TOKEN;
use prefix::{BlockHash, Scope};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequenceKind {
    /// The sequence needs the logits of its last token, then grows by a sampled token.
    Generate,
    /// The sequence needs the logits of every token, so no row can come from the prefix cache.
    Score,
    /// The sequence needs an output of its last token, and then ends. It uses the prefix cache, and
    /// no other sequence is forked from it.
    EmbedLast,
    /// The sequence needs an output of every token, so no row can come from the prefix cache.
    EmbedAll,
}

impl SequenceKind {
    /// Whether rows may come from the prefix cache.
    pub fn uses_prefix_cache(self) -> bool {
        matches!(self, Self::Generate | Self::EmbedLast)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequenceState {
    Waiting,
    Running,
    /// Admitted, without rows or blocks. The sequence waits for the equal prompt of the leader,
    /// from which the scheduler forks it.
    AwaitingFork(SequenceId),
}

/// A sequence to be added to the waiting queue.
#[derive(Clone, Debug)]
pub struct NewSequence<'a> {
    pub kind: SequenceKind,
    /// Lower runs first.
    pub priority: i32,
    /// The tenant, for fair share among sequences of equal priority.
    pub tenant: u64,
    pub tokens: Vec<u32>,
    /// Most tokens that the sequence will ever have. The block pool must hold that many for a
    /// sequence that runs alone.
    pub tokens_max: usize,
    pub scope: &'a Scope,
}

/// With thousands of sequences, the cost of a step is the memory that it reads of each. A decode
/// that allocates no block, fills none and copies none reads only the first cache line of this
/// struct; the test below checks the offsets. Token counts are `u32`, which covers every token that
/// a cache can address.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Sequence {
    tokens: Vec<u32>,
    /// Tokens whose keys and values are in the cache.
    computed: u32,
    /// Tokens that the allocated blocks can hold.
    allocated_tokens: u32,
    /// When this many tokens are computed, the next block is full and enters the prefix cache.
    /// `NEVER` without prefix cache.
    next_cache_at: u32,
    /// When the sequence has this many tokens, the next block gets its hash. `NEVER` without prefix
    /// cache.
    next_hash_at: u32,
    /// Up to this many tokens, the sequence may later need more blocks than its present tokens do.
    may_outgrow_below: u32,
    /// Sequences in state `AwaitingFork` for this one.
    pub followers: u32,
    pub state: SequenceState,
    pub kind: SequenceKind,
    /// The client is slow to read: the sequence gets no rows.
    pub is_paused: bool,
    /// The next row writes into a block that a fork may share.
    shares_last_block: bool,
    /// One KV cache group keeps states.
    has_state_group: bool,
    /// `prompt_hash` is set.
    is_joinable: bool,
    /// The sequence was admitted at least once.
    pub was_admitted: bool,
    // The first cache line ends here.
    /// Parent of the next hash: the last hash, or the start hash of the scope.
    parent: BlockHash,
    block_tokens: usize,
    /// Most tokens that the sequence will ever have.
    tokens_max: usize,
    blocks: BlockTables,
    /// Hashes of the full blocks of `tokens`. Empty without prefix cache.
    hashes: Vec<BlockHash>,
    pub rank: ServiceRank,
    /// Counts the times that the sequence released all blocks, or exchanged one for a copy.
    table_version: u32,
    /// Hash of all prompt tokens while they are not all computed and other sequences may wait for a
    /// fork.
    prompt_hash: Option<BlockHash>,
}

/// More tokens than any sequence has.
const NEVER: u32 = u32::MAX;

impl Sequence {
    /// `use_prefix_cache`: the sequence finds and inserts cached blocks.
    pub fn new(
        new: NewSequence<'_>,
        rank: ServiceRank,
        groups: &[KvGroupKind],
        block_tokens: usize,
        use_prefix_cache: bool,
    ) -> Self {
        let NewSequence { kind, tokens, tokens_max, scope, .. } = new;
        let hashes: Vec<BlockHash> = match use_prefix_cache {
            true => prefix::block_hashes(scope, &tokens, block_tokens).collect(),
            false => Vec::new(),
        };
        let parent = hashes.last().copied().unwrap_or_else(|| scope.start());
        let can_fork = use_prefix_cache && kind == SequenceKind::Generate;
        let prompt_hash = can_fork.then(|| parent.next(&tokens[hashes.len() * block_tokens..]));
        // The last token is sampled but never computed.
        let most = (tokens_max - 1).next_multiple_of(block_tokens);
        let mut sequence = Self {
            tokens,
            computed: 0,
            allocated_tokens: 0,
            next_cache_at: NEVER,
            next_hash_at: NEVER,
            may_outgrow_below: most.saturating_sub(block_tokens) as u32,
            followers: 0,
            state: SequenceState::Waiting,
            kind,
            is_paused: false,
            shares_last_block: false,
            has_state_group: groups.contains(&KvGroupKind::State),
            is_joinable: prompt_hash.is_some(),
            was_admitted: false,
            parent,
            block_tokens,
            tokens_max,
            blocks: BlockTables::new(groups, block_tokens),
            hashes,
            rank,
            table_version: 0,
            prompt_hash,
        };
        if use_prefix_cache {
            sequence.next_hash_at = sequence.end_of(sequence.hashes.len());
            sequence.update_next_cache_at();
        }
        sequence
    }

    /// A sequence with the same tokens and no blocks. It was admitted with this one.
    pub fn branch(&self, rank: ServiceRank, groups: &[KvGroupKind]) -> Self {
        let mut branch = Self {
            tokens: self.tokens.clone(),
            computed: 0,
            allocated_tokens: 0,
            followers: 0,
            state: SequenceState::Waiting,
            is_paused: false,
            shares_last_block: false,
            is_joinable: false,
            blocks: BlockTables::new(groups, self.block_tokens),
            hashes: self.hashes.clone(),
            rank,
            table_version: 0,
            prompt_hash: None,
            ..*self
        };
        branch.update_next_cache_at();
        branch
    }

    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Most tokens that the sequence will ever have.
    pub fn tokens_max(&self) -> usize {
        self.tokens_max
    }

    /// The block table of KV cache group 0.
    pub fn table(&self) -> &[BlockId] {
        self.blocks.table()
    }

    pub fn blocks(&self) -> &BlockTables {
        &self.blocks
    }

    /// Identifies the block tables: while the version is the same, the blocks of the tokens stay
    /// the same.
    pub fn table_version(&self) -> u32 {
        self.table_version
    }

    pub fn computed(&self) -> usize {
        self.computed as usize
    }

    #[inline]
    pub fn remaining(&self) -> usize {
        self.tokens.len() - self.computed as usize
    }

    pub fn is_decode(&self) -> bool {
        self.kind == SequenceKind::Generate && self.remaining() == 1
    }

    /// Rows that the sequence could use in this step.
    #[inline]
    pub fn rows_wanted(&self) -> usize {
        if self.is_paused || self.state != SequenceState::Running { 0 } else { self.remaining() }
    }

    /// The prompt is computed, and other sequences may wait to be forked from it.
    #[inline]
    pub fn completes_shared_prompt(&self) -> bool {
        self.is_joinable && self.remaining() == 0
    }

    /// Hash of all prompt tokens until they are computed.
    pub fn prompt_hash(&self) -> Option<BlockHash> {
        self.prompt_hash
    }

    /// Hash of a full block and all tokens before it. None without prefix cache.
    pub fn hash(&self, block: usize) -> Option<&BlockHash> {
        self.hashes.get(block)
    }

    /// From now on no sequence can wait for a fork from this one.
    pub fn take_prompt_hash(&mut self) -> Option<BlockHash> {
        self.is_joinable = false;
        self.prompt_hash.take()
    }

    /// Appends a sampled token, which a later step computes, or sets the token that
    /// [`Self::push_drawn`] has announced.
    #[inline]
    pub fn push(&mut self, token: u32) {
        match self.tokens.last_mut() {
            Some(last) if *last & DRAWN_TOKEN != 0 => *last = token,
            _ => self.append(token),
        }
        if self.tokens.len() >= self.next_hash_at as usize {
            self.hash_last_block();
        }
    }

    /// Appends a token that only the device knows: that of an output of the last step. Until
    /// [`Self::push`] sets it, the sequence must not be preempted. A block that it fills has no
    /// hash until then, and so does not enter the prefix cache.
    pub fn push_drawn(&mut self, output: usize) {
        self.append(DRAWN_TOKEN | output as u32);
    }

    #[inline]
    fn append(&mut self, token: u32) {
        assert!(
            self.tokens.len() < self.tokens_max,
            "a sequence never outgrows the length it was admitted for"
        );
        self.tokens.push(token);
    }

    /// Whether the last token is known to the device alone.
    pub fn is_last_token_drawn(&self) -> bool {
        self.tokens.last().is_some_and(|last| last & DRAWN_TOKEN != 0)
    }

    /// Whether a further token would not be the last one.
    pub fn outlasts_next_token(&self) -> bool {
        self.tokens.len() + 1 < self.tokens_max
    }

    fn hash_last_block(&mut self) {
        self.parent = self.parent.next(&self.tokens[self.tokens.len() - self.block_tokens..]);
        self.hashes.push(self.parent);
        self.next_hash_at = self.end_of(self.hashes.len());
    }

    /// Tokens up to the end of a block.
    fn end_of(&self, block: usize) -> u32 {
        ((block + 1) * self.block_tokens) as u32
    }

    fn uses_prefix_cache(&self) -> bool {
        self.next_hash_at != NEVER
    }

    fn update_next_cache_at(&mut self) {
        if self.uses_prefix_cache() {
            self.next_cache_at = self.end_of(self.blocks.cached_entries());
        }
    }

    fn update_allocated_tokens(&mut self) {
        self.allocated_tokens = (self.blocks.len() * self.block_tokens) as u32;
    }

    /// Blocks that the sequence still needs: for every token it has now, and for the next token if
    /// that may need a block. Admission of other sequences leaves these blocks free.
    #[inline]
    pub fn blocks_to_reserve(&self, chunk: usize) -> usize {
        match self.state {
            // The fork shares its leader's blocks, except the block into which its next row writes.
            SequenceState::AwaitingFork(_) => self.blocks.group_count(),
            SequenceState::Waiting | SequenceState::Running => {
                let grows = self.tokens.len() <= self.may_outgrow_below as usize || self.shares_last_block;
                let missing = match self.tokens.len() > self.allocated_tokens as usize {
                    true => self.blocks.blocks_needed(self.tokens.len(), chunk),
                    false => 0,
                };
                missing + if grows { self.blocks.group_count() } else { 0 }
            }
        }
    }

    /// Most draft tokens after the last token with at most `spare` more blocks. The last token of
    /// the sequence is never computed. With a state group the result is 0: a rejected draft would
    /// have changed the state.
    pub fn draft_tokens_max(&self, spare: usize) -> usize {
        if self.has_state_group {
            return 0;
        }
        let allocated_tokens =
            (self.blocks.len() + spare / self.blocks.group_count().max(1)) * self.block_tokens;
        (self.tokens_max - 1).min(allocated_tokens).saturating_sub(self.tokens.len())
    }

    /// The longest cached prefix. At least one token remains to be computed.
    pub fn find_prefix(&self, pool: &BlockPool) -> PrefixHit {
        self.blocks.find_prefix(pool, &self.hashes, (self.tokens.len() - 1) / self.block_tokens)
    }

    /// Blocks to allocate for all tokens behind a prefix hit.
    pub fn blocks_needed(&self, hits: PrefixHit, chunk: usize) -> usize {
        // The same as for a sequence that starts behind the hit with empty tables.
        self.blocks.blocks_needed(self.tokens.len() - hits.blocks * self.block_tokens, chunk)
    }

    /// Retains the first `blocks` blocks of the cached prefix.
    pub fn reuse_prefix(&mut self, pool: &mut BlockPool, blocks: usize) {
        assert!(self.blocks.is_empty() && self.computed == 0, "a waiting sequence has no blocks");
        self.reserve_memory();
        self.blocks.reuse_prefix(pool, &self.hashes, blocks);
        self.update_allocated_tokens();
        self.update_next_cache_at();
        self.computed = self.allocated_tokens;
    }

    /// Reserves host memory so that the sequence allocates none until its end.
    fn reserve_memory(&mut self) {
        self.blocks.reserve(self.tokens_max);
        self.tokens.reserve_exact(self.tokens_max - self.tokens.len());
        if self.uses_prefix_cache() {
            self.hashes
                .reserve_exact((self.tokens_max / self.block_tokens).saturating_sub(self.hashes.len()));
        }
    }

    /// Allocates the blocks for `rows` more tokens, or nothing if the pool has too few.
    #[inline]
    pub fn allocate(&mut self, pool: &mut BlockPool, rows: usize, copies: &mut Vec<BlockCopy>) -> bool {
        if self.computed() + rows <= self.allocated_tokens as usize && !self.shares_last_block {
            return true;
        }
        self.take_blocks(pool, rows, copies)
    }

    fn take_blocks(&mut self, pool: &mut BlockPool, rows: usize, copies: &mut Vec<BlockCopy>) -> bool {
        if !self.blocks.allocate(pool, self.computed(), rows, copies) {
            return false;
        }
        self.update_allocated_tokens();
        self.table_version += u32::from(self.shares_last_block);
        self.shares_last_block = false;
        true
    }

    /// Whether `rows` more tokens fill a block that enters the prefix cache.
    #[inline]
    pub fn fills_block(&self, rows: usize) -> bool {
        self.computed() + rows >= self.next_cache_at as usize
    }

    /// Inserts the blocks that `rows` more tokens fill into the prefix cache, and returns how many.
    #[inline]
    pub fn cache_full_blocks(&mut self, pool: &mut BlockPool, rows: usize) -> usize {
        if !self.fills_block(rows) {
            return 0;
        }
        let cached = self.blocks.cache_full(pool, &self.hashes, self.computed() + rows);
        self.update_next_cache_at();
        cached
    }

    /// Removes the last `blocks` entries from the prefix cache, because their step failed or will
    /// not run.
    pub fn uncache_last(&mut self, pool: &mut BlockPool, blocks: usize) {
        self.blocks.uncache_last(pool, blocks);
        self.update_next_cache_at();
    }

    #[inline]
    pub fn commit(&mut self, pool: &mut BlockPool, rows: usize) {
        self.computed += rows as u32;
        if self.has_state_group {
            self.blocks.cache_states(pool, &self.hashes, self.computed as usize);
        }
    }

    /// Takes over the computed tokens and shares the blocks of a leader with an equal prompt.
    pub fn fork(&mut self, pool: &mut BlockPool, leader: &mut Self) {
        assert!(
            leader.remaining() == 0 && leader.tokens.len() == self.tokens.len(),
            "a fork follows the computed, equal prompt of its leader"
        );
        self.reserve_memory();
        let computed = leader.computed();
        self.blocks.fork(pool, &mut leader.blocks, computed);
        (self.computed, self.state) = (leader.computed, SequenceState::Running);
        self.update_allocated_tokens();
        self.update_next_cache_at();
        (self.shares_last_block, leader.shares_last_block) = (true, true);
    }

    /// Releases the blocks behind the last token. Only rejected drafts were written there.
    pub fn truncate(&mut self, pool: &mut BlockPool) {
        self.blocks.truncate(pool, self.tokens.len());
        self.update_allocated_tokens();
    }

    /// Releases all blocks. A later step recomputes the tokens or finds them in the prefix cache.
    pub fn release_all(&mut self, pool: &mut BlockPool) {
        self.blocks.release_all(pool);
        self.table_version += 1;
        (self.computed, self.allocated_tokens, self.shares_last_block) = (0, 0, false);
        self.update_next_cache_at();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    #[test]
    fn a_decode_reads_one_cache_line() {
        assert!(offset_of!(Sequence, was_admitted) < 64);
        assert!(offset_of!(Sequence, block_tokens) >= 64);
        // The `Option` needs no word of its own.
        assert_eq!(size_of::<Option<Sequence>>(), size_of::<Sequence>());
    }
}
