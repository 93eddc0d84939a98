//! One sequence as the scheduler sees it: its tokens, how many of them are computed, and the blocks that hold them.

use crate::pool::{BlockId, BlockPool};
use prefix::{BlockHash, Scope};

/// Place in the order of service: lower first. Kept through preemption, so the oldest always moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    pub priority: i32,
    pub arrival: u64,
}

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
}

#[derive(Debug)]
pub struct Sequence {
    pub kind: Kind,
    pub rank: Rank,
    pub state: State,
    /// No rows while its reader is behind.
    pub held: bool,
    /// Has left the queue at least once.
    pub admitted: bool,
    tokens: Vec<u32>,
    /// It never gets longer than that.
    tokens_max: usize,
    block_tokens: usize,
    /// Keys and values of so many tokens are in the cache.
    computed: usize,
    table: Vec<BlockId>,
    /// How often it has given all blocks of its table back.
    tables_before: u32,
    /// Hashes of the full blocks of `tokens`; empty when prefixes are not shared.
    hashes: Vec<BlockHash>,
    /// Parent of the first hash, `None` when prefixes are not shared.
    start: Option<BlockHash>,
    /// Blocks of `table` that have been named or were found by name.
    named: usize,
}

impl Sequence {
    /// `scope` is `None` when its blocks are not to be shared.
    pub fn new(
        kind: Kind,
        rank: Rank,
        tokens: Vec<u32>,
        tokens_max: usize,
        block_tokens: usize,
        scope: Option<&Scope>,
    ) -> Self {
        let hashes = scope.map(|scope| prefix::block_hashes(scope, &tokens, block_tokens).collect());
        Self {
            kind,
            rank,
            state: State::Waiting,
            held: false,
            admitted: false,
            tokens,
            tokens_max,
            block_tokens,
            computed: 0,
            table: Vec::new(),
            tables_before: 0,
            hashes: hashes.unwrap_or_default(),
            start: scope.map(Scope::start),
            named: 0,
        }
    }

    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    pub fn table(&self) -> &[BlockId] {
        &self.table
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
    pub fn reserve(&self) -> usize {
        let known = self.tokens.len().div_ceil(self.block_tokens);
        // The last token is drawn but never computed.
        let most = (self.tokens_max - 1).div_ceil(self.block_tokens);
        known.saturating_sub(self.table.len()) + usize::from(most > known)
    }

    /// Drafted tokens that may be computed behind the last one with `spare` more blocks at most. The sequence's own last
    /// token is drawn and never computed.
    pub fn draft_tokens_max(&self, spare: usize) -> usize {
        let room = (self.table.len() + spare) * self.block_tokens;
        (self.tokens_max - 1).min(room).saturating_sub(self.tokens.len())
    }

    /// The longest cached prefix: blocks, and how many of them nobody holds. At least one token stays to be computed.
    pub fn hits(&self, pool: &BlockPool) -> Hits {
        let mut hits = Hits::default();
        let most = (self.tokens.len() - 1) / self.block_tokens;
        for block in self.hashes.iter().take(most).map_while(|hash| pool.find(hash)) {
            hits.blocks += 1;
            hits.free += usize::from(pool.is_free(block));
        }
        hits
    }

    /// Holds the first `blocks` blocks of the cached prefix.
    pub fn adopt(&mut self, pool: &mut BlockPool, blocks: usize) {
        debug_assert!(self.table.is_empty() && self.computed == 0);
        self.table.reserve_exact(self.tokens_max.div_ceil(self.block_tokens));
        self.tokens.reserve_exact(self.tokens_max - self.tokens.len());
        for hash in &self.hashes[..blocks] {
            if let Some(block) = pool.find(hash) {
                pool.hold(block);
                self.table.push(block);
            }
        }
        self.named = self.table.len();
        self.computed = self.named * self.block_tokens;
    }

    /// Takes the blocks for `rows` more tokens, or none when there are too few.
    pub fn grow(&mut self, pool: &mut BlockPool, rows: usize) -> bool {
        let wanted = (self.computed + rows).div_ceil(self.block_tokens);
        if wanted.saturating_sub(self.table.len()) > pool.free() {
            return false;
        }
        while self.table.len() < wanted
            && let Some(block) = pool.take()
        {
            self.table.push(block);
        }
        true
    }

    /// Makes the blocks that `rows` more tokens fill findable, and returns how many.
    pub fn name_full_blocks(&mut self, pool: &mut BlockPool, rows: usize) -> usize {
        let full = ((self.computed + rows) / self.block_tokens).min(self.hashes.len());
        let before = self.named;
        for block in before..full {
            pool.name(self.table[block], self.hashes[block]);
        }
        self.named = full.max(before);
        self.named - before
    }

    /// Takes the last `blocks` names back: their step will not run, or has failed.
    pub fn unname(&mut self, pool: &mut BlockPool, blocks: usize) {
        self.named -= blocks;
        self.table[self.named..][..blocks].iter().for_each(|&block| pool.unname(block));
    }

    pub fn commit(&mut self, rows: usize) {
        self.computed += rows;
    }

    /// Gives back the blocks behind those of its tokens: only drafts were written there.
    pub fn trim(&mut self, pool: &mut BlockPool) {
        let needed = self.tokens.len().div_ceil(self.block_tokens);
        while self.table.len() > needed
            && let Some(block) = self.table.pop()
        {
            pool.untake(block);
        }
    }

    /// Gives all blocks back, the last one first: what many share stays in the cache longest.
    pub fn free(&mut self, pool: &mut BlockPool) {
        self.table.drain(..).rev().for_each(|block| pool.release(block));
        self.tables_before += 1;
        self.computed = 0;
        self.named = 0;
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hits {
    pub blocks: usize,
    /// Those of them that holding takes from the free blocks.
    pub free: usize,
}
