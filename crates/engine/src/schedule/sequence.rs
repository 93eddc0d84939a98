//! One sequence as the scheduler sees it: its tokens, how many of them are computed, and the blocks that hold them.

use crate::kv::block_key::BlockId;
use crate::kv::block_pool::BlockPool;
use crate::kv::block_tables::{BlockCopy, BlockTables, PrefixHit};
use crate::kv::group::KvGroupKind;
use crate::schedule::sequence_id::SequenceId;
use crate::schedule::waiting_queue::ServiceRank;
use prefix::{BlockHash, Scope};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequenceKind {
    /// Logits of the last token are wanted, then it grows.
    Generate,
    /// Logits of every token are wanted: no row can be saved.
    Score,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequenceState {
    Waiting,
    Running,
    /// Admitted, without rows or blocks: waits for an equal prompt that is being computed, to be forked from it.
    AwaitingFork(SequenceId),
}

/// A sequence to be queued.
#[derive(Clone, Debug)]
pub struct NewSequence<'a> {
    pub kind: SequenceKind,
    /// Lower runs first.
    pub priority: i32,
    /// Whose it is, for fairness among equal priorities.
    pub tenant: u64,
    pub tokens: Vec<u32>,
    /// It never gets longer than that; and with that length it must fit in the pool when it is alone there.
    pub tokens_max: usize,
    pub scope: &'a Scope,
}

/// In thousands of sequences, what a step costs is how much of each it looks at. All that a decode does which needs no
/// block, fills none and copies none stands in the first line of the processor's cache, as numbers to compare with; the
/// test below holds that. Counts of tokens are `u32`: so many can be addressed in a cache.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Sequence {
    tokens: Vec<u32>,
    /// Keys and values of so many tokens are in the cache.
    computed: u32,
    /// Tokens that its blocks have room for.
    allocated_tokens: u32,
    /// Computed tokens with which the next block is full and gets its name; `NEVER` when prefixes are not shared.
    next_cache_at: u32,
    /// Tokens with which the next block has a hash; `NEVER` when prefixes are not shared.
    next_hash_at: u32,
    /// With so many tokens or fewer it may still outgrow the blocks that these need.
    may_outgrow_below: u32,
    /// How many have joined it.
    pub followers: u32,
    pub state: SequenceState,
    pub kind: SequenceKind,
    /// No rows while its reader is behind.
    pub is_paused: bool,
    /// Its next row writes into a block that a fork may share.
    shares_last_block: bool,
    /// A group keeps states.
    has_state_group: bool,
    /// `prompt` is there.
    is_joinable: bool,
    /// Has left the queue at least once.
    pub was_admitted: bool,
    // Here the first line ends.
    /// Parent of the next hash: the last one, or the scope's start.
    parent: BlockHash,
    block_tokens: usize,
    /// It never gets longer than that.
    tokens_max: usize,
    blocks: BlockTables,
    /// Hashes of the full blocks of `tokens`; empty when prefixes are not shared.
    hashes: Vec<BlockHash>,
    pub rank: ServiceRank,
    /// How often it has given all blocks of its table back, or one of them for a copy.
    table_version: u32,
    /// Names all tokens that it came with, while they are not all computed and others may join it.
    prompt_hash: Option<BlockHash>,
}

/// More tokens than any sequence has.
const NEVER: u32 = u32::MAX;

impl Sequence {
    /// Blocks are shared and found only if `share`.
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
        let prompt_hash = use_prefix_cache.then(|| parent.next(&tokens[hashes.len() * block_tokens..]));
        // The last token is drawn but never computed.
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

    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// It never gets longer than that.
    pub fn tokens_max(&self) -> usize {
        self.tokens_max
    }

    /// The blocks of group 0.
    pub fn table(&self) -> &[BlockId] {
        self.blocks.table()
    }

    pub fn blocks(&self) -> &BlockTables {
        &self.blocks
    }

    /// Tells its tables apart: while this is the same, blocks of its tokens stay where they are.
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

    /// Rows that it would take in this step.
    #[inline]
    pub fn rows_wanted(&self) -> usize {
        if self.is_paused || self.state != SequenceState::Running { 0 } else { self.remaining() }
    }

    /// Its prompt is complete and still has the name by which others join it.
    #[inline]
    pub fn completes_shared_prompt(&self) -> bool {
        self.is_joinable && self.remaining() == 0
    }

    /// What names its prompt until that is computed.
    pub fn prompt_hash(&self) -> Option<BlockHash> {
        self.prompt_hash
    }

    /// Names a full block and all before it; none where prefixes are not shared.
    pub fn hash(&self, block: usize) -> Option<&BlockHash> {
        self.hashes.get(block)
    }

    /// Nobody can join it any more.
    pub fn take_prompt_hash(&mut self) -> Option<BlockHash> {
        self.is_joinable = false;
        self.prompt_hash.take()
    }

    /// Appends a sampled token, to be computed by a later step.
    #[inline]
    pub fn push(&mut self, token: u32) {
        debug_assert!(self.tokens.len() < self.tokens_max);
        self.tokens.push(token);
        if self.tokens.len() >= self.next_hash_at as usize {
            self.hash_last_block();
        }
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

    /// Blocks to take before every token it has now is computed, and one more if it may outgrow these: what admission
    /// of others leaves for it.
    #[inline]
    pub fn blocks_to_reserve(&self, chunk: usize) -> usize {
        match self.state {
            // All but the block that its next row is written into, a copy or a new one, are its leader's.
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

    /// Drafted tokens that may be computed behind the last one with `spare` more blocks at most. The sequence's own last
    /// token is drawn and never computed. None where a wrong draft would change a state.
    pub fn draft_tokens_max(&self, spare: usize) -> usize {
        if self.has_state_group {
            return 0;
        }
        let allocated_tokens =
            (self.blocks.len() + spare / self.blocks.group_count().max(1)) * self.block_tokens;
        (self.tokens_max - 1).min(allocated_tokens).saturating_sub(self.tokens.len())
    }

    /// The longest cached prefix. At least one token stays to be computed.
    pub fn find_prefix(&self, pool: &BlockPool) -> PrefixHit {
        self.blocks.find_prefix(pool, &self.hashes, (self.tokens.len() - 1) / self.block_tokens)
    }

    /// Blocks to take for all its tokens once it has its hits.
    pub fn blocks_needed(&self, hits: PrefixHit, chunk: usize) -> usize {
        // As if it began behind the hits, with an empty table.
        self.blocks.blocks_needed(self.tokens.len() - hits.blocks * self.block_tokens, chunk)
    }

    /// Holds the first `blocks` blocks of the cached prefix.
    pub fn reuse_prefix(&mut self, pool: &mut BlockPool, blocks: usize) {
        debug_assert!(self.blocks.is_empty() && self.computed == 0);
        self.reserve_memory();
        self.blocks.reuse_prefix(pool, &self.hashes, blocks);
        self.update_allocated_tokens();
        self.update_next_cache_at();
        self.computed = self.allocated_tokens;
    }

    /// No allocation happens from here to its end.
    fn reserve_memory(&mut self) {
        self.blocks.reserve(self.tokens_max);
        self.tokens.reserve_exact(self.tokens_max - self.tokens.len());
        if self.uses_prefix_cache() {
            self.hashes
                .reserve_exact((self.tokens_max / self.block_tokens).saturating_sub(self.hashes.len()));
        }
    }

    /// Takes the blocks for `rows` more tokens, or none when there are too few.
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

    /// Whether `rows` more tokens fill a block that is to get a name.
    #[inline]
    pub fn fills_block(&self, rows: usize) -> bool {
        self.computed() + rows >= self.next_cache_at as usize
    }

    /// Makes the blocks that `rows` more tokens fill findable, and returns how many.
    #[inline]
    pub fn cache_full_blocks(&mut self, pool: &mut BlockPool, rows: usize) -> usize {
        if !self.fills_block(rows) {
            return 0;
        }
        let cached = self.blocks.cache_full(pool, &self.hashes, self.computed() + rows);
        self.update_next_cache_at();
        cached
    }

    /// Takes the last `blocks` names back: their step will not run, or has failed.
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

    /// Takes over all that an equal prompt, computed to its end, has.
    pub fn fork(&mut self, pool: &mut BlockPool, leader: &mut Self) {
        debug_assert!(leader.remaining() == 0 && leader.tokens.len() == self.tokens.len());
        self.reserve_memory();
        let computed = leader.computed();
        self.blocks.fork(pool, &mut leader.blocks, computed);
        (self.computed, self.state) = (leader.computed, SequenceState::Running);
        self.update_allocated_tokens();
        self.update_next_cache_at();
        (self.shares_last_block, leader.shares_last_block) = (true, true);
    }

    /// Gives back the blocks behind those of its tokens: only drafts were written there.
    pub fn truncate(&mut self, pool: &mut BlockPool) {
        self.blocks.truncate(pool, self.tokens.len());
        self.update_allocated_tokens();
    }

    /// Gives all blocks back; what it has computed so far has to be computed or found again.
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
    fn a_decode_looks_at_one_line_of_the_cache() {
        assert!(offset_of!(Sequence, was_admitted) < 64);
        assert!(offset_of!(Sequence, block_tokens) >= 64);
        // Whether a slot is taken needs no word of its own.
        assert_eq!(size_of::<Option<Sequence>>(), size_of::<Sequence>());
    }
}
