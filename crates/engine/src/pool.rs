//! The KV blocks of one cache: who holds them, which are free, and which of them still hold a findable prefix.
//!
//! Invariants ([`BlockPool::check_integrity`]): a block is in the free list exactly when nobody holds it; a block is in
//! the index exactly when it has a hash. So a block may be free and cached at once: it stays findable until it is taken
//! for something else, least recently freed first. Block 0 is the trash block: never given out, never cached.
//! Every operation is O(1) and allocates nothing; the twins of one hash (the same content computed twice) form a list.

use prefix::BlockHash;
use std::collections::HashMap;

pub type BlockId = u32;

/// Takes writes that nobody reads, and is the sentinel of the free list.
pub const TRASH: BlockId = 0;

#[derive(Clone, Debug, Default)]
struct Block {
    holders: u32,
    hash: Option<BlockHash>,
    /// Neighbours in the free list, a ring through `TRASH`; meaningless while held.
    free: Links,
    /// Neighbours among blocks of the same hash, a ring; meaningless without a hash.
    twins: Links,
}

#[derive(Clone, Copy, Debug, Default)]
struct Links {
    previous: BlockId,
    next: BlockId,
}

#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    /// Any one block of each hash.
    index: HashMap<BlockHash, BlockId>,
    free: usize,
    /// Blocks that are free and have a hash.
    cached: usize,
    evictions: u64,
}

/// A broken invariant of the pool: a bug, never a consequence of input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IntegrityError {
    #[error("free list: link to block {block} is not matched by a link back")]
    FreeLinks { block: BlockId },
    #[error("free list has {found} blocks, {counted} are counted free and {unheld} have no holder")]
    FreeCount { found: usize, counted: usize, unheld: usize },
    #[error("block {block} is in the free list and has {holders} holders")]
    FreeHeld { block: BlockId, holders: u32 },
    #[error("block {block} has a hash that the index does not lead to")]
    NotIndexed { block: BlockId },
    #[error("index leads to {found} blocks, {hashed} have a hash")]
    IndexCount { found: usize, hashed: usize },
    #[error("{found} blocks are free and cached, {counted} are counted")]
    CachedCount { found: usize, counted: usize },
    #[error("block {block} has {holders} holders, {expected} were expected")]
    Holders { block: BlockId, holders: u32, expected: u32 },
}

impl BlockPool {
    /// `usable` blocks beside the trash block; ids `1..=usable`, at first taken in this order.
    pub fn new(usable: usize) -> Self {
        let mut pool = Self {
            blocks: vec![Block::default(); usable + 1],
            index: HashMap::with_capacity(usable),
            free: 0,
            cached: 0,
            evictions: 0,
        };
        for block in 1..pool.blocks.len() {
            pool.append_free(block as BlockId);
        }
        pool
    }

    pub fn usable(&self) -> usize {
        self.blocks.len() - 1
    }

    pub fn free(&self) -> usize {
        self.free
    }

    pub fn used(&self) -> usize {
        self.usable() - self.free
    }

    pub fn cached(&self) -> usize {
        self.cached
    }

    pub fn evictions(&self) -> u64 {
        self.evictions
    }

    pub fn is_free(&self, block: BlockId) -> bool {
        block != TRASH && self.block(block).holders == 0
    }

    /// A block with this content; the caller has to [`hold`](Self::hold) it before the next `take`.
    pub fn find(&self, hash: &BlockHash) -> Option<BlockId> {
        self.index.get(hash).copied()
    }

    /// The least recently freed block, its old content forgotten, with one holder.
    pub fn take(&mut self) -> Option<BlockId> {
        let block = self.block(TRASH).free.next;
        if block == TRASH {
            return None;
        }
        self.unlink_free(block);
        if self.block(block).hash.is_some() {
            self.forget(block);
            self.evictions += 1;
        }
        self.block_mut(block).holders = 1;
        Some(block)
    }

    /// One more holder of a block that is held or cached.
    pub fn hold(&mut self, block: BlockId) {
        debug_assert_ne!(block, TRASH);
        if self.block(block).holders == 0 {
            self.unlink_free(block);
        }
        self.block_mut(block).holders += 1;
    }

    /// One holder less; the last one frees it, and it becomes the last in line to be taken.
    pub fn release(&mut self, block: BlockId) {
        debug_assert!(self.block(block).holders > 0, "block {block} is released without a holder");
        self.block_mut(block).holders -= 1;
        if self.block(block).holders == 0 {
            self.append_free(block);
        }
    }

    /// As if it had not been taken: a held block without a name and with one holder is the first in line to be taken.
    pub fn untake(&mut self, block: BlockId) {
        debug_assert!(self.block(block).holders == 1 && self.block(block).hash.is_none());
        self.block_mut(block).holders = 0;
        self.insert_free(TRASH, block);
    }

    /// Makes a held block findable. Its content is complete once the step under way is.
    pub fn name(&mut self, block: BlockId, hash: BlockHash) {
        debug_assert!(self.block(block).holders > 0 && self.block(block).hash.is_none());
        let twins = match self.index.get(&hash) {
            None => {
                self.index.insert(hash, block);
                Links { previous: block, next: block }
            }
            Some(&twin) => {
                let next = self.block(twin).twins.next;
                self.block_mut(twin).twins.next = block;
                self.block_mut(next).twins.previous = block;
                Links { previous: twin, next }
            }
        };
        let named = self.block_mut(block);
        named.hash = Some(hash);
        named.twins = twins;
    }

    /// Takes a held block out of the index: its content was never computed.
    pub fn unname(&mut self, block: BlockId) {
        debug_assert!(self.block(block).holders > 0);
        self.forget(block);
    }

    /// Compares all links and counts, and the number of holders with those that `tables` show. O(blocks); for tests and
    /// for a process that is idle.
    pub fn check_integrity<'a>(
        &self,
        tables: impl Iterator<Item = &'a [BlockId]>,
    ) -> Result<(), IntegrityError> {
        let mut expected = vec![0; self.blocks.len()];
        tables.flatten().for_each(|&block| expected[block as usize] += 1);
        for (block, (state, &expected)) in self.blocks.iter().zip(&expected).enumerate() {
            if state.holders != expected {
                return Err(IntegrityError::Holders {
                    block: block as BlockId,
                    holders: state.holders,
                    expected,
                });
            }
        }
        self.check_free_list()?;
        self.check_index()
    }

    fn check_free_list(&self) -> Result<(), IntegrityError> {
        let (mut at, mut found) = (TRASH, 0);
        loop {
            let next = self.block(at).free.next;
            if self.block(next).free.previous != at || found > self.usable() {
                return Err(IntegrityError::FreeLinks { block: next });
            }
            if next == TRASH {
                break;
            }
            let holders = self.block(next).holders;
            if holders != 0 {
                return Err(IntegrityError::FreeHeld { block: next, holders });
            }
            (at, found) = (next, found + 1);
        }
        let unheld = self.blocks[1..].iter().filter(|block| block.holders == 0).count();
        if found != self.free || found != unheld {
            return Err(IntegrityError::FreeCount { found, counted: self.free, unheld });
        }
        Ok(())
    }

    fn check_index(&self) -> Result<(), IntegrityError> {
        let mut found = 0;
        for (hash, &first) in &self.index {
            let mut block = first;
            loop {
                let next = self.block(block).twins.next;
                let linked = self.block(next).twins.previous == block;
                if !linked || self.block(block).hash != Some(*hash) || found > self.usable() {
                    return Err(IntegrityError::NotIndexed { block });
                }
                found += 1;
                block = next;
                if block == first {
                    break;
                }
            }
        }
        let hashed = self.blocks.iter().filter(|block| block.hash.is_some()).count();
        if found != hashed {
            return Err(IntegrityError::IndexCount { found, hashed });
        }
        let found =
            self.blocks[1..].iter().filter(|block| block.holders == 0 && block.hash.is_some()).count();
        if found != self.cached {
            return Err(IntegrityError::CachedCount { found, counted: self.cached });
        }
        Ok(())
    }

    fn block(&self, block: BlockId) -> &Block {
        &self.blocks[block as usize]
    }

    fn block_mut(&mut self, block: BlockId) -> &mut Block {
        &mut self.blocks[block as usize]
    }

    fn append_free(&mut self, block: BlockId) {
        self.insert_free(self.block(TRASH).free.previous, block);
    }

    /// Into the free list behind `previous`.
    fn insert_free(&mut self, previous: BlockId, block: BlockId) {
        let next = self.block(previous).free.next;
        self.block_mut(block).free = Links { previous, next };
        self.block_mut(previous).free.next = block;
        self.block_mut(next).free.previous = block;
        self.free += 1;
        self.cached += usize::from(self.block(block).hash.is_some());
    }

    fn unlink_free(&mut self, block: BlockId) {
        let Links { previous, next } = self.block(block).free;
        self.block_mut(previous).free.next = next;
        self.block_mut(next).free.previous = previous;
        self.free -= 1;
        self.cached -= usize::from(self.block(block).hash.is_some());
    }

    /// Out of the index; the block is not in the free list.
    fn forget(&mut self, block: BlockId) {
        let Some(hash) = self.block_mut(block).hash.take() else { return };
        let Links { previous, next } = self.block(block).twins;
        if next == block {
            self.index.remove(&hash);
            return;
        }
        self.block_mut(previous).twins.next = next;
        self.block_mut(next).twins.previous = previous;
        if self.index.get(&hash) == Some(&block) {
            self.index.insert(hash, next);
        }
    }
}
