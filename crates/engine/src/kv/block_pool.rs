// SPDX-License-Identifier: Apache-2.0

//! The block pool: reference counts, the free list and the prefix cache index of all KV blocks.
//!
//! ```text
//! free list (ring)   NULL_BLOCK <-> no key <-> ... <-> cached, least recently freed <-> ...
//!                         allocate ─────┘                       evicted last in this order
//!
//! index (buckets)    hash bits ──> block <-> duplicate <-> ...
//! ```
//!
//! Invariants, checked by [`BlockPool::check_integrity`]:
//!
//! 1. A block is in the free list exactly when its reference count is 0.
//! 2. A block is in the index exactly when it has a key.
//! 3. A block that is free and has a key is cached: `lookup` finds it until `allocate` takes it.
//!    Blocks without a key are allocated first, then the least recently freed block.
//! 4. Block 0 is the null block. It is never allocated and never cached. Block tables use it where
//!    a group has no block ([`crate::kv::block_tables`]).
//! 5. Duplicates (blocks with equal content, computed twice) are in the same chain of the index.
//!
//! Every operation is O(1) and allocates no memory, except where noted. The index is a table of
//! chain heads, and the chains run through the blocks themselves. A key is thus stored once, and a
//! block fills one cache line. [`crate::kv::events`] logs what enters and leaves the index.
//!
//! docs/decisions/0007 compares the design with vLLM V1.

use crate::kv::block_key::{BlockId, BlockKey, NULL_BLOCK};
use crate::kv::events::{KvCacheEvent, KvEventBatch, KvEventLog};

/// `evict_unused` keeps cached blocks within this multiple of the number of blocks that are still
/// of use.
const SPREAD_MAX: usize = 2;

#[derive(Clone, Debug, Default)]
#[repr(align(64))]
struct PoolBlock {
    ref_count: u32,
    /// The epoch of the last release.
    epoch: u32,
    key: Option<BlockKey>,
    /// Neighbours in the free list, a ring through `NULL_BLOCK`. Meaningless while the block is in
    /// use.
    free: ListLinks,
    /// Neighbours in the index chain, which ends in `NULL_BLOCK` at both sides. Meaningless without
    /// a key.
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
    /// Chain heads by the first bits of a key, `NULL_BLOCK` for an empty chain. The length is a
    /// power of two and at least twice the number of blocks, so most chains have one block.
    index: Vec<BlockId>,
    free: usize,
    /// Blocks that are free and have a key.
    cached: usize,
    evictions: u64,
    /// Counts the calls of `evict_unused`.
    epoch: u32,
    /// Log of changes to the index.
    events: KvEventLog,
}

/// A broken invariant of the pool: a bug, never a consequence of input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolIntegrityError {
    #[error("free list: block {block} does not link back to its predecessor")]
    FreeLinks { block: BlockId },
    #[error(
        "free list has {found} blocks, {counted} are counted free and {unreferenced} have reference count 0"
    )]
    FreeCount { found: usize, counted: usize, unreferenced: usize },
    #[error("block {block} is in the free list with reference count {ref_count}")]
    FreeInUse { block: BlockId, ref_count: u32 },
    #[error("index chain reaches block {block}, which has another key or another neighbour")]
    NotIndexed { block: BlockId },
    #[error("index chains have {found} blocks, {keyed} blocks have a key")]
    IndexCount { found: usize, keyed: usize },
    #[error("{found} blocks are free and cached, {counted} are counted")]
    CachedCount { found: usize, counted: usize },
    #[error("block {block} has reference count {ref_count}, expected {expected}")]
    RefCount { block: BlockId, ref_count: u32, expected: u32 },
}

impl BlockPool {
    /// A pool of `usable` blocks and the null block. Block ids are `1..=usable`; a new pool
    /// allocates them in this order.
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

    /// The changes of the index from event `from` on. If the log no longer has them, a snapshot of
    /// the whole index, in O(blocks).
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

    /// Whether the only user of the block may write to it: no other sequence uses it, and no lookup
    /// finds it.
    pub fn is_writable(&self, block: BlockId) -> bool {
        self.block(block).ref_count == 1 && self.block(block).key.is_none()
    }

    /// Finds a block with this content. The caller must [`retain`](Self::retain) it before the next
    /// `allocate`.
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

    /// Allocates the first block of the free list with a reference count of 1. A block without a
    /// key comes before the least recently freed cached block. This is the only place that evicts a
    /// cached block.
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

    /// Adds a user to a block that is in use or cached.
    pub fn retain(&mut self, block: BlockId) {
        assert_ne!(block, NULL_BLOCK, "the null block has no users");
        if self.block(block).ref_count == 0 {
            self.unlink_free(block);
        }
        self.block_mut(block).ref_count += 1;
    }

    /// Removes a user. A block without users goes to the end of the free list if it is cached, else
    /// to the front.
    pub fn release(&mut self, block: BlockId) {
        assert!(self.block(block).ref_count > 0, "block {block} is released but has no user");
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

    /// Inserts a block that is in use into the index. Its content is complete when the current step
    /// is.
    pub fn cache_insert(&mut self, block: BlockId, key: BlockKey) {
        assert!(
            self.block(block).ref_count > 0 && self.block(block).key.is_none(),
            "block {block} enters the prefix cache while in use, and once"
        );
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

    /// Removes a block that is in use from the index, because its content was never computed.
    pub fn cache_remove(&mut self, block: BlockId) {
        assert!(
            self.block(block).ref_count > 0,
            "only a step that failed removes a key, and it uses block {block}"
        );
        self.remove_from_index(block);
    }

    /// Removes every block from the prefix cache. Returns `false` and does nothing while any block
    /// is in use.
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

    /// Evicts cached blocks that were not used since the last call. It also evicts cached blocks
    /// far from the start of the pool, at most once each: memory is released from the end, so one
    /// such block would keep all memory before it. O(blocks).
    pub fn evict_unused(&mut self) {
        let is_kept =
            |block: &PoolBlock| block.ref_count > 0 || (block.key.is_some() && block.epoch == self.epoch);
        let kept = self.blocks.iter().filter(|&block| is_kept(block)).count();
        // In reverse, so that lower blocks come first in the free list.
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

    /// The first block from which on no block is in use or cached. O(blocks).
    pub fn in_use_end(&self) -> BlockId {
        let is_in_use = |block: &PoolBlock| block.ref_count > 0 || block.key.is_some();
        self.blocks.iter().rposition(is_in_use).map_or(1, |last| last as BlockId + 1)
    }

    /// Checks all links and counts, and compares the reference counts with `tables`, null blocks
    /// excluded. O(blocks); for tests and for an idle process.
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

    /// Inserts into the free list behind `previous`.
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

    /// Removes the key. The block is not in the free list.
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

    /// Every key once, also where duplicates share it.
    fn cached_keys(&self) -> impl Iterator<Item = BlockKey> {
        let is_first = |block: usize, key: &BlockKey| self.lookup(key) == Some(block as BlockId);
        let keyed = self.blocks.iter().enumerate().filter_map(|(block, state)| Some((block, state.key?)));
        keyed.filter(move |(block, key)| is_first(*block, key)).map(|(_, key)| key)
    }

    /// Index bucket of a key. The hash is already uniformly distributed.
    fn bucket(&self, key: &BlockKey) -> usize {
        let [first, ..] = key.hash.as_bytes().as_chunks::<8>().0 else { return 0 };
        (u64::from_le_bytes(*first) ^ u64::from(key.group)) as usize & (self.index.len() - 1)
    }
}
