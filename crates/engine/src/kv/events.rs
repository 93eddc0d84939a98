//! What becomes findable in the block pool, and what is not any more, as a numbered list: for whoever keeps an index of the
//! prefixes that this cache has.
//!
//! Invariant: what an update brings, applied in order to what was known before it, gives the names that the pool finds. Twins
//! are one name: stored with the first of them, removed with the last. A name stands for a block with all tokens before it and
//! their scope (`prefix`), so neither is told: whoever has a prompt knows the names to look for. Between steps a stored block
//! is computed: a step that fails has its names removed again.

use crate::kv::block_key::BlockKey;
use std::collections::VecDeque;

/// Of events that are kept: some 280 kB. A step brings two at most for each block that it writes (its name, and that of what
/// it takes the place of): of 2,048 rows, 256. Where a step brings more than are kept, a follower is told everything anew.
pub const KV_EVENTS_MAX: usize = 8192;

/// The number of whoever knows nothing: the first event is 1.
pub const FULL_SNAPSHOT: u64 = 0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvCacheEvent {
    BlockStored(BlockKey),
    BlockRemoved(BlockKey),
    /// Every name.
    AllBlocksCleared,
}

/// What a reader has to apply to what it knows, in order; a snapshot begins with `Cleared`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventBatch {
    pub events: Vec<KvCacheEvent>,
    /// Number of the first event that is not in it.
    pub next: u64,
}

/// The last events. Pushing never allocates.
#[derive(Debug)]
pub struct KvEventLog {
    ring: VecDeque<KvCacheEvent>,
    /// Events that the ring holds at most.
    kept: usize,
    next: u64,
}

impl KvEventLog {
    /// For a pool of `blocks` blocks: whoever has missed more events than those is told all names in fewer.
    pub fn new(blocks: usize) -> Self {
        let kept = blocks.clamp(1, KV_EVENTS_MAX);
        Self { ring: VecDeque::with_capacity(kept), kept, next: FULL_SNAPSHOT + 1 }
    }

    /// The number that the next event gets.
    pub fn next_number(&self) -> u64 {
        self.next
    }

    pub fn push(&mut self, event: KvCacheEvent) {
        if self.ring.len() == self.kept {
            self.ring.pop_front();
        }
        self.ring.push_back(event);
        self.next += 1;
    }

    /// The events from number `from` on. None: some of them are gone, or there were never so many.
    pub fn since(&self, from: u64) -> Option<impl Iterator<Item = KvCacheEvent>> {
        let missing = usize::try_from(self.next.checked_sub(from)?).ok()?;
        let known = self.ring.len().checked_sub(missing)?;
        Some(self.ring.iter().skip(known).copied())
    }
}
