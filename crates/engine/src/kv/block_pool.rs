//! The KV blocks of one cache: who holds them, which are free, and which of them still hold a findable prefix.
//!
//! Invariants ([`BlockPool::check_integrity`]): a block is in the free list exactly when nobody holds it; a block is in
//! the index exactly when it has a name. So a block may be free and cached at once: it stays findable until it is taken
//! for something else, least recently freed first. Block 0 is the trash block: never given out, never cached; in tables
//! it stands where a group has no block ([`crate::blocks`]).
//! Every operation is O(1) and allocates nothing. The index is a table of list heads, and the lists go through the blocks
//! themselves: a name is kept once, and a block is one line of the processor's cache. Twins (the same content computed
//! twice) stand in one list. What becomes findable, or is not any more, is logged ([`crate::events`]).
//!
//! What this and its callers have in common with vLLM V1, point by point, stands in docs/decisions/0007.

use crate::kv::block_key::{BlockId, Name, TRASH};
use crate::kv::events::{Event, EventLog, Update};

/// Blocks that are still of use may lie among so many times as many, while nobody asks for the others.
const SPREAD_MAX: usize = 2;

#[derive(Clone, Debug, Default)]
#[repr(align(64))]
struct Block {
    holders: u32,
    /// The age in which it was held last.
    age: u32,
    name: Option<Name>,
    /// Neighbours in the free list, a ring through `TRASH`; meaningless while held.
    free: Links,
    /// Neighbours in the index's list, which ends in `TRASH` at both sides; meaningless without a name.
    listed: Links,
}

#[derive(Clone, Copy, Debug, Default)]
struct Links {
    previous: BlockId,
    next: BlockId,
}

#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    /// By the first bits of a name: the block that was last given a name with these, `TRASH` if none has one. A power of
    /// two, at least twice as many as blocks, so that most lists have one block.
    index: Vec<BlockId>,
    free: usize,
    /// Blocks that are free and have a name.
    cached: usize,
    evictions: u64,
    /// Counts the calls of `forget_unused`.
    age: u32,
    /// What the index begins and ceases to lead to.
    events: EventLog,
}

/// A broken invariant of the pool: a bug, never a consequence of input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolIntegrityError {
    #[error("free list: link to block {block} is not matched by a link back")]
    FreeLinks { block: BlockId },
    #[error("free list has {found} blocks, {counted} are counted free and {unheld} have no holder")]
    FreeCount { found: usize, counted: usize, unheld: usize },
    #[error("block {block} is in the free list and has {holders} holders")]
    FreeHeld { block: BlockId, holders: u32 },
    #[error("index leads to block {block}, which has no such name or another neighbour")]
    NotIndexed { block: BlockId },
    #[error("index leads to {found} blocks, {named} have a name")]
    IndexCount { found: usize, named: usize },
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
            index: vec![TRASH; (2 * usable).next_power_of_two()],
            free: 0,
            cached: 0,
            evictions: 0,
            age: 0,
            events: EventLog::new(usable),
        };
        for block in 1..pool.blocks.len() {
            pool.insert_free(pool.block(TRASH).free.previous, block as BlockId);
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

    /// The number that the next event gets.
    pub fn next_event(&self) -> u64 {
        self.events.next_number()
    }

    /// What has changed, from event `from` on, in what can be found; or, where that cannot be told any more, all of it.
    /// O(blocks) then.
    pub fn events_since(&self, from: u64) -> Update {
        let events = match self.events.since(from) {
            Some(events) => events.collect(),
            None => std::iter::once(Event::Cleared).chain(self.findable().map(Event::Stored)).collect(),
        };
        Update { events, next: self.next_event() }
    }

    pub fn is_free(&self, block: BlockId) -> bool {
        block != TRASH && self.block(block).holders == 0
    }

    /// Whether a holder may write: nobody else holds the block, and nobody can find it.
    pub fn is_writable(&self, block: BlockId) -> bool {
        self.block(block).holders == 1 && self.block(block).name.is_none()
    }

    /// A block with this content; the caller has to [`hold`](Self::hold) it before the next `take`.
    pub fn find(&self, name: &Name) -> Option<BlockId> {
        let mut block = self.index[self.place(name)];
        while block != TRASH {
            let listed = self.block(block);
            if listed.name.as_ref() == Some(name) {
                return Some(block);
            }
            block = listed.listed.next;
        }
        None
    }

    /// The first in line, its old content forgotten, with one holder: a block without a name if there is one free, else
    /// the least recently freed. Only here are cached blocks evicted.
    pub fn take(&mut self) -> Option<BlockId> {
        let block = self.block(TRASH).free.next;
        if block == TRASH {
            return None;
        }
        self.unlink_free(block);
        if self.block(block).name.is_some() {
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

    /// One holder less. The last one frees it: the last in line to be taken if it can still be found, else the first.
    pub fn release(&mut self, block: BlockId) {
        debug_assert!(self.block(block).holders > 0, "block {block} is released without a holder");
        let age = self.age;
        let released = self.block_mut(block);
        released.holders -= 1;
        released.age = age;
        if self.block(block).holders == 0 {
            let behind =
                if self.block(block).name.is_some() { self.block(TRASH).free.previous } else { TRASH };
            self.insert_free(behind, block);
        }
    }

    /// Makes a held block findable. Its content is complete once the step under way is.
    pub fn name(&mut self, block: BlockId, name: Name) {
        debug_assert!(self.block(block).holders > 0 && self.block(block).name.is_none());
        if self.find(&name).is_none() {
            self.events.push(Event::Stored(name));
        }
        let place = self.place(&name);
        let next = std::mem::replace(&mut self.index[place], block);
        if next != TRASH {
            self.block_mut(next).listed.previous = block;
        }
        let named = self.block_mut(block);
        named.name = Some(name);
        named.listed = Links { previous: TRASH, next };
    }

    /// Takes a held block out of the index: its content was never computed.
    pub fn unname(&mut self, block: BlockId) {
        debug_assert!(self.block(block).holders > 0);
        self.forget(block);
    }

    /// Forgets every cached prefix. `false`, and nothing is done, while any block is held.
    pub fn reset(&mut self) -> bool {
        let idle = self.used() == 0;
        if idle {
            self.index.fill(TRASH);
            self.blocks.iter_mut().for_each(|block| block.name = None);
            self.cached = 0;
            self.events.push(Event::Cleared);
        }
        idle
    }

    /// Forgets cached blocks that nobody has held since the last call; and of the others those far behind, at most once for each:
    /// since memory is given back from the end, one of them would keep all that is before it. O(blocks).
    pub fn forget_unused(&mut self) {
        let is_kept = |block: &Block| block.holders > 0 || (block.name.is_some() && block.age == self.age);
        let kept = self.blocks.iter().filter(|&block| is_kept(block)).count();
        // The first ones come to stand before the others in the free list.
        for block in (1..self.blocks.len()).rev() {
            let Block { holders, age, ref name, .. } = self.blocks[block];
            let unused = age != self.age || block > SPREAD_MAX * kept;
            if holders == 0 && name.is_some() && unused {
                self.unlink_free(block as BlockId);
                self.forget(block as BlockId);
                self.insert_free(TRASH, block as BlockId);
            }
        }
        self.age = self.age.wrapping_add(1);
    }

    /// The first block from which on none holds anything that can be asked for. O(blocks).
    pub fn tail(&self) -> BlockId {
        let is_in_use = |block: &Block| block.holders > 0 || block.name.is_some();
        self.blocks.iter().rposition(is_in_use).map_or(1, |last| last as BlockId + 1)
    }

    /// Compares all links and counts, and the number of holders with those that `tables` show (trash blocks in them aside).
    /// O(blocks); for tests and for a process that is idle.
    pub fn check_integrity<'a>(
        &self,
        tables: impl Iterator<Item = &'a [BlockId]>,
    ) -> Result<(), PoolIntegrityError> {
        let mut expected = vec![0; self.blocks.len()];
        tables.flatten().for_each(|&block| expected[block as usize] += 1);
        expected[TRASH as usize] = 0;
        for (block, (state, &expected)) in self.blocks.iter().zip(&expected).enumerate() {
            if state.holders != expected {
                return Err(PoolIntegrityError::Holders {
                    block: block as BlockId,
                    holders: state.holders,
                    expected,
                });
            }
        }
        self.check_free_list()?;
        self.check_index()
    }

    fn check_free_list(&self) -> Result<(), PoolIntegrityError> {
        let (mut at, mut found) = (TRASH, 0);
        loop {
            let next = self.block(at).free.next;
            if self.block(next).free.previous != at || found > self.usable() {
                return Err(PoolIntegrityError::FreeLinks { block: next });
            }
            if next == TRASH {
                break;
            }
            let holders = self.block(next).holders;
            if holders != 0 {
                return Err(PoolIntegrityError::FreeHeld { block: next, holders });
            }
            (at, found) = (next, found + 1);
        }
        let unheld = self.blocks[1..].iter().filter(|block| block.holders == 0).count();
        if found != self.free || found != unheld {
            return Err(PoolIntegrityError::FreeCount { found, counted: self.free, unheld });
        }
        Ok(())
    }

    fn check_index(&self) -> Result<(), PoolIntegrityError> {
        let mut found = 0;
        for (place, &first) in self.index.iter().enumerate() {
            let (mut previous, mut block) = (TRASH, first);
            while block != TRASH {
                let Block { name, listed, .. } = self.block(block);
                let is_here = name.as_ref().is_some_and(|name| self.place(name) == place);
                if !is_here || listed.previous != previous || found > self.usable() {
                    return Err(PoolIntegrityError::NotIndexed { block });
                }
                found += 1;
                (previous, block) = (block, listed.next);
            }
        }
        let named = self.blocks.iter().filter(|block| block.name.is_some()).count();
        if found != named {
            return Err(PoolIntegrityError::IndexCount { found, named });
        }
        let found =
            self.blocks[1..].iter().filter(|block| block.holders == 0 && block.name.is_some()).count();
        if found != self.cached {
            return Err(PoolIntegrityError::CachedCount { found, counted: self.cached });
        }
        Ok(())
    }

    fn block(&self, block: BlockId) -> &Block {
        &self.blocks[block as usize]
    }

    fn block_mut(&mut self, block: BlockId) -> &mut Block {
        &mut self.blocks[block as usize]
    }

    /// Into the free list behind `previous`.
    fn insert_free(&mut self, previous: BlockId, block: BlockId) {
        let next = self.block(previous).free.next;
        self.block_mut(block).free = Links { previous, next };
        self.block_mut(previous).free.next = block;
        self.block_mut(next).free.previous = block;
        self.free += 1;
        self.cached += usize::from(self.block(block).name.is_some());
    }

    fn unlink_free(&mut self, block: BlockId) {
        let Links { previous, next } = self.block(block).free;
        self.block_mut(previous).free.next = next;
        self.block_mut(next).free.previous = previous;
        self.free -= 1;
        self.cached -= usize::from(self.block(block).name.is_some());
    }

    /// Out of the index; the block is not in the free list.
    fn forget(&mut self, block: BlockId) {
        let Some(name) = self.block_mut(block).name.take() else { return };
        let Links { previous, next } = self.block(block).listed;
        if previous == TRASH {
            let place = self.place(&name);
            self.index[place] = next;
        } else {
            self.block_mut(previous).listed.next = next;
        }
        if next != TRASH {
            self.block_mut(next).listed.previous = previous;
        }
        if self.find(&name).is_none() {
            self.events.push(Event::Removed(name));
        }
    }

    /// Every name once: of twins that of the first in the list.
    fn findable(&self) -> impl Iterator<Item = Name> {
        let is_first = |block: usize, name: &Name| self.find(name) == Some(block as BlockId);
        let named = self.blocks.iter().enumerate().filter_map(|(block, state)| Some((block, state.name?)));
        named.filter(move |(block, name)| is_first(*block, name)).map(|(_, name)| name)
    }

    /// Where in the index. The hash is a uniformly distributed one already.
    fn place(&self, name: &Name) -> usize {
        let [first, ..] = name.hash.as_bytes().as_chunks::<8>().0 else { return 0 };
        (u64::from_le_bytes(*first) ^ u64::from(name.group)) as usize & (self.index.len() - 1)
    }
}
