//! One sequence as the scheduler sees it: its tokens, how many of them are computed, and the blocks that hold them.

use crate::blocks::{BlockCopy, Blocks, GroupKind, Hits};
use crate::pool::{BlockId, BlockPool};
use crate::queue::Rank;
use crate::scheduler::Slot;
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

#[derive(Debug)]
pub struct Sequence {
    // What every step looks at stands first, in one line of the cache.
    /// Keys and values of so many tokens are in the cache.
    computed: usize,
    tokens: Vec<u32>,
    /// Tokens that its blocks have room for.
    room: usize,
    pub kind: Kind,
    pub state: State,
    /// No rows while its reader is behind.
    pub held: bool,
    /// Has left the queue at least once.
    pub admitted: bool,
    /// Its next row writes into a block that a fork may share.
    forked: bool,
    /// A group keeps states.
    states: bool,
    /// How many have joined it.
    pub followers: u32,
    block_tokens: usize,
    /// It never gets longer than that.
    tokens_max: usize,
    pub rank: Rank,
    blocks: Blocks,
    /// How often it has given all blocks of its table back, or one of them for a copy.
    tables_before: u32,
    /// Hashes of the full blocks of `tokens`; empty when prefixes are not shared.
    hashes: Vec<BlockHash>,
    /// Parent of the first hash, `None` when prefixes are not shared.
    start: Option<BlockHash>,
    /// Names all tokens that it came with, while they are not all computed and others may join it.
    prompt: Option<BlockHash>,
}

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
        let start = share.then(|| scope.start());
        let hashes: Vec<BlockHash> = match share {
            true => prefix::block_hashes(scope, &tokens, block_tokens).collect(),
            false => Vec::new(),
        };
        let tail = &tokens[hashes.len() * block_tokens..];
        let prompt = start.map(|start| hashes.last().unwrap_or(&start).next(tail));
        Self {
            computed: 0,
            tokens,
            room: 0,
            kind,
            state: State::Waiting,
            held: false,
            admitted: false,
            forked: false,
            states: groups.contains(&GroupKind::State),
            followers: 0,
            block_tokens,
            tokens_max,
            rank,
            blocks: Blocks::new(groups, block_tokens),
            tables_before: 0,
            hashes,
            start,
            prompt,
        }
    }

    pub fn tokens(&self) -> &[u32] {
        &self.tokens
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
        self.computed
    }

    pub fn remaining(&self) -> usize {
        self.tokens.len() - self.computed
    }

    pub fn is_decode(&self) -> bool {
        self.kind == Kind::Generate && self.remaining() == 1
    }

    /// Rows that it would take in this step.
    pub fn wanted(&self) -> usize {
        if self.held || self.state != State::Running { 0 } else { self.remaining() }
    }

    /// What names its prompt until that is computed.
    pub fn prompt(&self) -> Option<BlockHash> {
        self.prompt
    }

    /// Nobody can join it any more.
    pub fn take_prompt(&mut self) -> Option<BlockHash> {
        self.prompt.take()
    }

    /// Appends a sampled token, to be computed by a later step.
    pub fn push(&mut self, token: u32) {
        debug_assert!(self.tokens.len() < self.tokens_max);
        self.tokens.push(token);
        if let Some(start) = self.start
            && self.tokens.len().is_multiple_of(self.block_tokens)
        {
            let block = &self.tokens[self.tokens.len() - self.block_tokens..];
            self.hashes.push(self.hashes.last().unwrap_or(&start).next(block));
        }
    }

    /// Blocks to take before every token it has now is computed, and one more if it may outgrow these: what admission
    /// of others leaves for it.
    pub fn reserve(&self, chunk: usize) -> usize {
        match self.state {
            // All but the block that its next row is written into, a copy or a new one, are its leader's.
            State::Joined(_) => self.blocks.groups(),
            State::Waiting | State::Running => {
                let known = self.tokens.len().div_ceil(self.block_tokens);
                // The last token is drawn but never computed.
                let most = (self.tokens_max - 1).div_ceil(self.block_tokens);
                let grows = most > known || self.forked;
                let missing = match known * self.block_tokens > self.room {
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
        self.computed = blocks * self.block_tokens;
        self.room = self.computed;
    }

    /// No allocation happens from here to its end.
    fn reserve_memory(&mut self) {
        self.blocks.reserve(self.tokens_max);
        self.tokens.reserve_exact(self.tokens_max - self.tokens.len());
        if self.start.is_some() {
            self.hashes
                .reserve_exact((self.tokens_max / self.block_tokens).saturating_sub(self.hashes.len()));
        }
    }

    /// Takes the blocks for `rows` more tokens, or none when there are too few.
    #[inline]
    pub fn grow(&mut self, pool: &mut BlockPool, rows: usize, copies: &mut Vec<BlockCopy>) -> bool {
        if self.computed + rows <= self.room && !self.forked {
            return true;
        }
        if !self.blocks.grow(pool, self.computed, rows, copies) {
            return false;
        }
        self.room = self.blocks.len() * self.block_tokens;
        self.tables_before += u32::from(self.forked);
        self.forked = false;
        true
    }

    /// Makes the blocks that `rows` more tokens fill findable, and returns how many.
    #[inline]
    pub fn name_full_blocks(&mut self, pool: &mut BlockPool, rows: usize) -> usize {
        let end = self.computed + rows;
        if self.start.is_none() || (rows == 1 && !end.is_multiple_of(self.block_tokens)) {
            return 0;
        }
        self.blocks.name_full(pool, &self.hashes, end)
    }

    /// Takes the last `blocks` names back: their step will not run, or has failed.
    pub fn unname(&mut self, pool: &mut BlockPool, blocks: usize) {
        self.blocks.unname(pool, blocks);
    }

    #[inline]
    pub fn commit(&mut self, pool: &mut BlockPool, rows: usize) {
        self.computed += rows;
        if self.states {
            self.blocks.name_states(pool, &self.hashes, self.computed);
        }
    }

    /// Takes over all that an equal prompt, computed to its end, has.
    pub fn fork(&mut self, pool: &mut BlockPool, leader: &mut Self) {
        debug_assert!(leader.remaining() == 0 && leader.tokens.len() == self.tokens.len());
        self.reserve_memory();
        self.blocks.fork(pool, &mut leader.blocks, leader.computed);
        (self.computed, self.state) = (leader.computed, State::Running);
        self.room = self.blocks.len() * self.block_tokens;
        (self.forked, leader.forked) = (true, true);
    }

    /// Gives back the blocks behind those of its tokens: only drafts were written there.
    pub fn trim(&mut self, pool: &mut BlockPool) {
        self.blocks.trim(pool, self.tokens.len());
        self.room = self.blocks.len() * self.block_tokens;
    }

    /// Gives all blocks back; what it has computed so far has to be computed or found again.
    pub fn free(&mut self, pool: &mut BlockPool) {
        self.blocks.free(pool);
        self.tables_before += 1;
        (self.computed, self.room, self.forked) = (0, 0, false);
    }
}
