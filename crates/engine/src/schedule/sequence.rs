//! One sequence as the scheduler sees it: its tokens, how many of them are computed, and the blocks that hold them.

use crate::kv::block_key::BlockId;
use crate::kv::block_pool::BlockPool;
use crate::kv::block_tables::{BlockCopy, Blocks, Hits};
use crate::kv::group::GroupKind;
use crate::schedule::sequence_id::Slot;
use crate::schedule::waiting_queue::Rank;
use prefix::{BlockHash, Scope};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Logits of the last token are wanted, then it grows.
    Generate,
    /// Logits of every token are wanted: no row can be saved.
    Score,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Waiting,
    Running,
    /// Admitted, without rows or blocks: waits for an equal prompt that is being computed, to be forked from it.
    Joined(Slot),
}

/// A sequence to be queued.
#[derive(Clone, Debug)]
pub struct NewSequence<'a> {
    pub kind: Kind,
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
    room: u32,
    /// Computed tokens with which the next block is full and gets its name; `NEVER` when prefixes are not shared.
    full_at: u32,
    /// Tokens with which the next block has a hash; `NEVER` when prefixes are not shared.
    hash_at: u32,
    /// With so many tokens or fewer it may still outgrow the blocks that these need.
    grows_to: u32,
    /// How many have joined it.
    pub followers: u32,
    pub state: State,
    pub kind: Kind,
    /// No rows while its reader is behind.
    pub held: bool,
    /// Its next row writes into a block that a fork may share.
    forked: bool,
    /// A group keeps states.
    states: bool,
    /// `prompt` is there.
    joinable: bool,
    /// Has left the queue at least once.
    pub admitted: bool,
    // Here the first line ends.
    /// Parent of the next hash: the last one, or the scope's start.
    parent: BlockHash,
    block_tokens: usize,
    /// It never gets longer than that.
    tokens_max: usize,
    blocks: Blocks,
    /// Hashes of the full blocks of `tokens`; empty when prefixes are not shared.
    hashes: Vec<BlockHash>,
    pub rank: Rank,
    /// How often it has given all blocks of its table back, or one of them for a copy.
    tables_before: u32,
    /// Names all tokens that it came with, while they are not all computed and others may join it.
    prompt: Option<BlockHash>,
}

/// More tokens than any sequence has.
const NEVER: u32 = u32::MAX;

impl Sequence {
    /// Blocks are shared and found only if `share`.
    pub fn new(
        new: NewSequence<'_>,
        rank: Rank,
        groups: &[GroupKind],
        block_tokens: usize,
        share: bool,
    ) -> Self {
        let NewSequence { kind, tokens, tokens_max, scope, .. } = new;
        let hashes: Vec<BlockHash> = match share {
            true => prefix::block_hashes(scope, &tokens, block_tokens).collect(),
            false => Vec::new(),
        };
        let parent = hashes.last().copied().unwrap_or_else(|| scope.start());
        let prompt = share.then(|| parent.next(&tokens[hashes.len() * block_tokens..]));
        // The last token is drawn but never computed.
        let most = (tokens_max - 1).next_multiple_of(block_tokens);
        let mut sequence = Self {
            tokens,
            computed: 0,
            room: 0,
            full_at: NEVER,
            hash_at: NEVER,
            grows_to: most.saturating_sub(block_tokens) as u32,
            followers: 0,
            state: State::Waiting,
            kind,
            held: false,
            forked: false,
            states: groups.contains(&GroupKind::State),
            joinable: prompt.is_some(),
            admitted: false,
            parent,
            block_tokens,
            tokens_max,
            blocks: Blocks::new(groups, block_tokens),
            hashes,
            rank,
            tables_before: 0,
            prompt,
        };
        if share {
            sequence.hash_at = sequence.end_of(sequence.hashes.len());
            sequence.note_named();
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

    pub fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// Tells its tables apart: while this is the same, blocks of its tokens stay where they are.
    pub fn tables_before(&self) -> u32 {
        self.tables_before
    }

    pub fn computed(&self) -> usize {
        self.computed as usize
    }

    #[inline]
    pub fn remaining(&self) -> usize {
        self.tokens.len() - self.computed as usize
    }

    pub fn is_decode(&self) -> bool {
        self.kind == Kind::Generate && self.remaining() == 1
    }

    /// Rows that it would take in this step.
    #[inline]
    pub fn wanted(&self) -> usize {
        if self.held || self.state != State::Running { 0 } else { self.remaining() }
    }

    /// Its prompt is complete and still has the name by which others join it.
    #[inline]
    pub fn ends_lead(&self) -> bool {
        self.joinable && self.remaining() == 0
    }

    /// What names its prompt until that is computed.
    pub fn prompt(&self) -> Option<BlockHash> {
        self.prompt
    }

    /// Names a full block and all before it; none where prefixes are not shared.
    pub fn hash(&self, block: usize) -> Option<&BlockHash> {
        self.hashes.get(block)
    }

    /// Nobody can join it any more.
    pub fn take_prompt(&mut self) -> Option<BlockHash> {
        self.joinable = false;
        self.prompt.take()
    }

    /// Appends a sampled token, to be computed by a later step.
    #[inline]
    pub fn push(&mut self, token: u32) {
        debug_assert!(self.tokens.len() < self.tokens_max);
        self.tokens.push(token);
        if self.tokens.len() >= self.hash_at as usize {
            self.hash_last_block();
        }
    }

    fn hash_last_block(&mut self) {
        self.parent = self.parent.next(&self.tokens[self.tokens.len() - self.block_tokens..]);
        self.hashes.push(self.parent);
        self.hash_at = self.end_of(self.hashes.len());
    }

    /// Tokens up to the end of a block.
    fn end_of(&self, block: usize) -> u32 {
        ((block + 1) * self.block_tokens) as u32
    }

    fn shares(&self) -> bool {
        self.hash_at != NEVER
    }

    fn note_named(&mut self) {
        if self.shares() {
            self.full_at = self.end_of(self.blocks.named());
        }
    }

    fn note_room(&mut self) {
        self.room = (self.blocks.len() * self.block_tokens) as u32;
    }

    /// Blocks to take before every token it has now is computed, and one more if it may outgrow these: what admission
    /// of others leaves for it.
    #[inline]
    pub fn reserve(&self, chunk: usize) -> usize {
        match self.state {
            // All but the block that its next row is written into, a copy or a new one, are its leader's.
            State::Joined(_) => self.blocks.groups(),
            State::Waiting | State::Running => {
                let grows = self.tokens.len() <= self.grows_to as usize || self.forked;
                let missing = match self.tokens.len() > self.room as usize {
                    true => self.blocks.needed(self.tokens.len(), chunk),
                    false => 0,
                };
                missing + if grows { self.blocks.groups() } else { 0 }
            }
        }
    }

    /// Drafted tokens that may be computed behind the last one with `spare` more blocks at most. The sequence's own last
    /// token is drawn and never computed. None where a wrong draft would change a state.
    pub fn draft_tokens_max(&self, spare: usize) -> usize {
        if self.states {
            return 0;
        }
        let room = (self.blocks.len() + spare / self.blocks.groups().max(1)) * self.block_tokens;
        (self.tokens_max - 1).min(room).saturating_sub(self.tokens.len())
    }

    /// The longest cached prefix. At least one token stays to be computed.
    pub fn hits(&self, pool: &BlockPool) -> Hits {
        self.blocks.hits(pool, &self.hashes, (self.tokens.len() - 1) / self.block_tokens)
    }

    /// Blocks to take for all its tokens once it has its hits.
    pub fn needed(&self, hits: Hits, chunk: usize) -> usize {
        // As if it began behind the hits, with an empty table.
        self.blocks.needed(self.tokens.len() - hits.blocks * self.block_tokens, chunk)
    }

    /// Holds the first `blocks` blocks of the cached prefix.
    pub fn adopt(&mut self, pool: &mut BlockPool, blocks: usize) {
        debug_assert!(self.blocks.is_empty() && self.computed == 0);
        self.reserve_memory();
        self.blocks.adopt(pool, &self.hashes, blocks);
        self.note_room();
        self.note_named();
        self.computed = self.room;
    }

    /// No allocation happens from here to its end.
    fn reserve_memory(&mut self) {
        self.blocks.reserve(self.tokens_max);
        self.tokens.reserve_exact(self.tokens_max - self.tokens.len());
        if self.shares() {
            self.hashes
                .reserve_exact((self.tokens_max / self.block_tokens).saturating_sub(self.hashes.len()));
        }
    }

    /// Takes the blocks for `rows` more tokens, or none when there are too few.
    #[inline]
    pub fn grow(&mut self, pool: &mut BlockPool, rows: usize, copies: &mut Vec<BlockCopy>) -> bool {
        if self.computed() + rows <= self.room as usize && !self.forked {
            return true;
        }
        self.take_blocks(pool, rows, copies)
    }

    fn take_blocks(&mut self, pool: &mut BlockPool, rows: usize, copies: &mut Vec<BlockCopy>) -> bool {
        if !self.blocks.grow(pool, self.computed(), rows, copies) {
            return false;
        }
        self.note_room();
        self.tables_before += u32::from(self.forked);
        self.forked = false;
        true
    }

    /// Whether `rows` more tokens fill a block that is to get a name.
    #[inline]
    pub fn fills_a_block(&self, rows: usize) -> bool {
        self.computed() + rows >= self.full_at as usize
    }

    /// Makes the blocks that `rows` more tokens fill findable, and returns how many.
    #[inline]
    pub fn name_full_blocks(&mut self, pool: &mut BlockPool, rows: usize) -> usize {
        if !self.fills_a_block(rows) {
            return 0;
        }
        let named = self.blocks.name_full(pool, &self.hashes, self.computed() + rows);
        self.note_named();
        named
    }

    /// Takes the last `blocks` names back: their step will not run, or has failed.
    pub fn unname(&mut self, pool: &mut BlockPool, blocks: usize) {
        self.blocks.unname(pool, blocks);
        self.note_named();
    }

    #[inline]
    pub fn commit(&mut self, pool: &mut BlockPool, rows: usize) {
        self.computed += rows as u32;
        if self.states {
            self.blocks.name_states(pool, &self.hashes, self.computed as usize);
        }
    }

    /// Takes over all that an equal prompt, computed to its end, has.
    pub fn fork(&mut self, pool: &mut BlockPool, leader: &mut Self) {
        debug_assert!(leader.remaining() == 0 && leader.tokens.len() == self.tokens.len());
        self.reserve_memory();
        let computed = leader.computed();
        self.blocks.fork(pool, &mut leader.blocks, computed);
        (self.computed, self.state) = (leader.computed, State::Running);
        self.note_room();
        self.note_named();
        (self.forked, leader.forked) = (true, true);
    }

    /// Gives back the blocks behind those of its tokens: only drafts were written there.
    pub fn trim(&mut self, pool: &mut BlockPool) {
        self.blocks.trim(pool, self.tokens.len());
        self.note_room();
    }

    /// Gives all blocks back; what it has computed so far has to be computed or found again.
    pub fn free(&mut self, pool: &mut BlockPool) {
        self.blocks.free(pool);
        self.tables_before += 1;
        (self.computed, self.room, self.forked) = (0, 0, false);
        self.note_named();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    #[test]
    fn a_decode_looks_at_one_line_of_the_cache() {
        assert!(offset_of!(Sequence, admitted) < 64);
        assert!(offset_of!(Sequence, block_tokens) >= 64);
        // Whether a slot is taken needs no word of its own.
        assert_eq!(size_of::<Option<Sequence>>(), size_of::<Sequence>());
    }
}
