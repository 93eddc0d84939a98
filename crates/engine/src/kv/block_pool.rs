//! The KV blocks of one cache: who holds them, which are free, and which of them still hold a findable prefix.
//!
//! Invariants ([`BlockPool::check_integrity`]): a block is in the free list exactly when nobody holds it; a block is in
//! the index exactly when it has a name. So a block may be free and cached at once: it stays findable until it is blocks_to_allocate
//! for something else, least recently freed first. PoolBlock 0 is the trash block: never given out, never cached; in tables
//! it stands where a group has no block ([`crate::blocks`]).
//! Every operation is O(1) and allocates nothing. The index is a table of list heads, and the lists go through the blocks
//! themselves: a name is kept once, and a block is one line of the processor's cache. Twins (the same content computed
//! twice) stand in one list. What becomes findable, or is not any more, is logged ([`crate::events`]).
//!
//! What this and its callers have in common with vLLM V1, point by point, stands in docs/decisions/0007.

use crate::kv::block_key::{BlockId, BlockKey, NULL_BLOCK};
use crate::kv::events::{KvCacheEvent, KvEventBatch, KvEventLog};

/// Blocks that are still of use may lie among so many times as many, while nobody asks for the others.
const SPREAD_MAX: usize = 2;

#[derive(Clone, Debug, Default)]
#[repr(align(64))]
struct PoolBlock {
    ref_count: u32,
    /// The age in which it was held last.
    epoch: u32,
    key: Option<BlockKey>,
    /// Neighbours in the free list, a ring through `NULL_BLOCK`; meaningless while held.
    free: ListLinks,
    /// Neighbours in the index's list, which ends in `NULL_BLOCK` at both sides; meaningless without a name.
    chain: ListLinks,
}

#[derive(Clone, Copy, Debug, Default)]
struct ListLinks {
    previous: BlockId,
    next: BlockId,
}

#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<PoolBlock>,
    /// By the first bits of a name: the block that was last given a name with these, `NULL_BLOCK` if none has one. A power of
    /// two, at least twice as many as blocks, so that most lists have one block.
    index: Vec<BlockId>,
    free: usize,
    /// Blocks that are free and have a name.
    cached: usize,
    evictions: u64,
    /// Counts the calls of `forget_unused`.
    epoch: u32,
    /// What the index begins and ceases to lead to.
    events: KvEventLog,
}

/// A broken invariant of the pool: a bug, never a consequence of input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolIntegrityError {
    #[error("free list: link to block {block} is not matched by a link back")]
    FreeLinks { block: BlockId },
    #[error("free list has {found} blocks, {counted} are counted free and {unreferenced} have no holder")]
    FreeCount { found: usize, counted: usize, unreferenced: usize },
    #[error("block {block} is in the free list and has {ref_count} ref_count")]
    FreeInUse { block: BlockId, ref_count: u32 },
    #[error("index leads to block {block}, which has no such key or another neighbour")]
    NotIndexed { block: BlockId },
    #[error("index leads to {found} blocks, {keyed} have a key")]
    IndexCount { found: usize, keyed: usize },
    #[error("{found} blocks are free and cached, {counted} are counted")]
    CachedCount { found: usize, counted: usize },
    #[error("block {block} has {ref_count} ref_count, {expected} were expected")]
    RefCount { block: BlockId, ref_count: u32, expected: u32 },
}

impl BlockPool {
    /// `usable` blocks beside the trash block; ids `1..=usable`, at first blocks_to_allocate in this order.
    pub fn new(usable: usize) -> Self {
        let mut pool = Self {
            blocks: vec![PoolBlock::default(); usable + 1],
            index: vec![NULL_BLOCK; (2 * usable).next_power_of_two()],
            free: 0,
            cached: 0,
            evictions: 0,
            epoch: 0,
            events: KvEventLog::new(usable),
        };
        for block in 1..pool.blocks.len() {
            pool.insert_free(pool.block(NULL_BLOCK).free.previous, block as BlockId);
        }
        pool
    }

    pub fn capacity(&self) -> usize {
        self.blocks.len() - 1
    }

    pub fn free_blocks(&self) -> usize {
        self.free
    }

    pub fn used_blocks(&self) -> usize {
        self.capacity() - self.free
    }

    pub fn cached_blocks(&self) -> usize {
        self.cached
    }

    pub fn evictions(&self) -> u64 {
        self.evictions
    }

    /// The number that the next event gets.
    pub fn next_event_number(&self) -> u64 {
        self.events.next_number()
    }

    /// What has changed, from event `from` on, in what can be found; or, where that cannot be told any more, all of it.
    /// O(blocks) then.
    pub fn events_since(&self, from: u64) -> KvEventBatch {
        let events = match self.events.since(from) {
            Some(events) => events.collect(),
            None => std::iter::once(KvCacheEvent::AllBlocksCleared)
                .chain(self.cached_keys().map(KvCacheEvent::BlockStored))
                .collect(),
        };
        KvEventBatch { events, next: self.next_event_number() }
    }

    pub fn is_free(&self, block: BlockId) -> bool {
        block != NULL_BLOCK && self.block(block).ref_count == 0
    }

    /// Whether a holder may write: nobody else holds the block, and nobody can find it.
    pub fn is_writable(&self, block: BlockId) -> bool {
        self.block(block).ref_count == 1 && self.block(block).key.is_none()
    }

    /// A block with this content; the caller has to [`retain`](Self::retain) it before the next `take`.
    pub fn lookup(&self, key: &BlockKey) -> Option<BlockId> {
        let mut block = self.index[self.bucket(key)];
        while block != NULL_BLOCK {
            let chain = self.block(block);
            if chain.key.as_ref() == Some(key) {
                return Some(block);
            }
            block = chain.chain.next;
        }
        None
    }

    /// The first in line, its old content forgotten, with one holder: a block without a name if there is one free, else
    /// the least recently freed. Only here are cached blocks evicted.
    pub fn allocate(&mut self) -> Option<BlockId> {
        let block = self.block(NULL_BLOCK).free.next;
        if block == NULL_BLOCK {
            return None;
        }
        self.unlink_free(block);
        if self.block(block).key.is_some() {
            self.remove_from_index(block);
            self.evictions += 1;
        }
        self.block_mut(block).ref_count = 1;
        Some(block)
    }

    /// One more holder of a block that is held or cached.
    pub fn retain(&mut self, block: BlockId) {
        debug_assert_ne!(block, NULL_BLOCK);
        if self.block(block).ref_count == 0 {
            self.unlink_free(block);
        }
        self.block_mut(block).ref_count += 1;
    }

    /// One holder less. The last one frees it: the last in line to be blocks_to_allocate if it can still be found, else the first.
    pub fn release(&mut self, block: BlockId) {
        debug_assert!(self.block(block).ref_count > 0, "block {block} is released without a holder");
        let epoch = self.epoch;
        let released = self.block_mut(block);
        released.ref_count -= 1;
        released.epoch = epoch;
        if self.block(block).ref_count == 0 {
            let behind = if self.block(block).key.is_some() {
                self.block(NULL_BLOCK).free.previous
            } else {
                NULL_BLOCK
            };
            self.insert_free(behind, block);
        }
    }

    /// Makes a held block findable. Its content is complete once the step under way is.
    pub fn cache_insert(&mut self, block: BlockId, key: BlockKey) {
        debug_assert!(self.block(block).ref_count > 0 && self.block(block).key.is_none());
        if self.lookup(&key).is_none() {
            self.events.push(KvCacheEvent::BlockStored(key));
        }
        let bucket = self.bucket(&key);
        let next = std::mem::replace(&mut self.index[bucket], block);
        if next != NULL_BLOCK {
            self.block_mut(next).chain.previous = block;
        }
        let keyed = self.block_mut(block);
        keyed.key = Some(key);
        keyed.chain = ListLinks { previous: NULL_BLOCK, next };
    }

    /// Takes a held block out of the index: its content was never computed.
    pub fn cache_remove(&mut self, block: BlockId) {
        debug_assert!(self.block(block).ref_count > 0);
        self.remove_from_index(block);
    }

    /// Forgets every cached prefix. `false`, and nothing is done, while any block is held.
    pub fn reset_prefix_cache(&mut self) -> bool {
        let idle = self.used_blocks() == 0;
        if idle {
            self.index.fill(NULL_BLOCK);
            self.blocks.iter_mut().for_each(|block| block.key = None);
            self.cached = 0;
            self.events.push(KvCacheEvent::AllBlocksCleared);
        }
        idle
    }

    /// Forgets cached blocks that nobody has held since the last call; and of the others those far behind, at most once for each:
    /// since memory is given back from the end, one of them would keep all that is before it. O(blocks).
    pub fn evict_unused(&mut self) {
        let is_kept =
            |block: &PoolBlock| block.ref_count > 0 || (block.key.is_some() && block.epoch == self.epoch);
        let kept = self.blocks.iter().filter(|&block| is_kept(block)).count();
        // The first ones come to stand before the others in the free list.
        for block in (1..self.blocks.len()).rev() {
            let PoolBlock { ref_count, epoch, ref key, .. } = self.blocks[block];
            let unused = epoch != self.epoch || block > SPREAD_MAX * kept;
            if ref_count == 0 && key.is_some() && unused {
                self.unlink_free(block as BlockId);
                self.remove_from_index(block as BlockId);
                self.insert_free(NULL_BLOCK, block as BlockId);
            }
        }
        self.epoch = self.epoch.wrapping_add(1);
    }

    /// The first block from which on none holds anything that can be asked for. O(blocks).
    pub fn in_use_end(&self) -> BlockId {
        let is_in_use = |block: &PoolBlock| block.ref_count > 0 || block.key.is_some();
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
        expected[NULL_BLOCK as usize] = 0;
        for (block, (state, &expected)) in self.blocks.iter().zip(&expected).enumerate() {
            if state.ref_count != expected {
                return Err(PoolIntegrityError::RefCount {
                    block: block as BlockId,
                    ref_count: state.ref_count,
                    expected,
                });
            }
        }
        self.check_free_list()?;
        self.check_index()
    }

    fn check_free_list(&self) -> Result<(), PoolIntegrityError> {
        let (mut at, mut found) = (NULL_BLOCK, 0);
        loop {
            let next = self.block(at).free.next;
            if self.block(next).free.previous != at || found > self.capacity() {
                return Err(PoolIntegrityError::FreeLinks { block: next });
            }
            if next == NULL_BLOCK {
                break;
            }
            let ref_count = self.block(next).ref_count;
            if ref_count != 0 {
                return Err(PoolIntegrityError::FreeInUse { block: next, ref_count });
            }
            (at, found) = (next, found + 1);
        }
        let unreferenced = self.blocks[1..].iter().filter(|block| block.ref_count == 0).count();
        if found != self.free || found != unreferenced {
            return Err(PoolIntegrityError::FreeCount { found, counted: self.free, unreferenced });
        }
        Ok(())
    }

    fn check_index(&self) -> Result<(), PoolIntegrityError> {
        let mut found = 0;
        for (bucket, &first) in self.index.iter().enumerate() {
            let (mut previous, mut block) = (NULL_BLOCK, first);
            while block != NULL_BLOCK {
                let PoolBlock { key, chain, .. } = self.block(block);
                let is_here = key.as_ref().is_some_and(|key| self.bucket(key) == bucket);
                if !is_here || chain.previous != previous || found > self.capacity() {
                    return Err(PoolIntegrityError::NotIndexed { block });
                }
                found += 1;
                (previous, block) = (block, chain.next);
            }
        }
        let keyed = self.blocks.iter().filter(|block| block.key.is_some()).count();
        if found != keyed {
            return Err(PoolIntegrityError::IndexCount { found, keyed });
        }
        let found =
            self.blocks[1..].iter().filter(|block| block.ref_count == 0 && block.key.is_some()).count();
        if found != self.cached {
            return Err(PoolIntegrityError::CachedCount { found, counted: self.cached });
        }
        Ok(())
    }

    fn block(&self, block: BlockId) -> &PoolBlock {
        &self.blocks[block as usize]
    }

    fn block_mut(&mut self, block: BlockId) -> &mut PoolBlock {
        &mut self.blocks[block as usize]
    }

    /// Into the free list behind `previous`.
    fn insert_free(&mut self, previous: BlockId, block: BlockId) {
        let next = self.block(previous).free.next;
        self.block_mut(block).free = ListLinks { previous, next };
        self.block_mut(previous).free.next = block;
        self.block_mut(next).free.previous = block;
        self.free += 1;
        self.cached += usize::from(self.block(block).key.is_some());
    }

    fn unlink_free(&mut self, block: BlockId) {
        let ListLinks { previous, next } = self.block(block).free;
        self.block_mut(previous).free.next = next;
        self.block_mut(next).free.previous = previous;
        self.free -= 1;
        self.cached -= usize::from(self.block(block).key.is_some());
    }

    /// Out of the index; the block is not in the free list.
    fn remove_from_index(&mut self, block: BlockId) {
        let Some(key) = self.block_mut(block).key.take() else { return };
        let ListLinks { previous, next } = self.block(block).chain;
        if previous == NULL_BLOCK {
            let bucket = self.bucket(&key);
            self.index[bucket] = next;
        } else {
            self.block_mut(previous).chain.next = next;
        }
        if next != NULL_BLOCK {
            self.block_mut(next).chain.previous = previous;
        }
        if self.lookup(&key).is_none() {
            self.events.push(KvCacheEvent::BlockRemoved(key));
        }
    }

    /// Every name once: of twins that of the first in the list.
    fn cached_keys(&self) -> impl Iterator<Item = BlockKey> {
        let is_first = |block: usize, key: &BlockKey| self.lookup(key) == Some(block as BlockId);
        let keyed = self.blocks.iter().enumerate().filter_map(|(block, state)| Some((block, state.key?)));
        keyed.filter(move |(block, key)| is_first(*block, key)).map(|(_, key)| key)
    }

    /// Where in the index. The hash is a uniformly distributed one already.
    fn bucket(&self, key: &BlockKey) -> usize {
        let [first, ..] = key.hash.as_bytes().as_chunks::<8>().0 else { return 0 };
        (u64::from_le_bytes(*first) ^ u64::from(key.group)) as usize & (self.index.len() - 1)
    }
}
