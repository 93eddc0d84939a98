// SPDX-License-Identifier: Apache-2.0

//! KV cache events: a numbered log of keys that enter and leave the prefix cache, for a subscriber
//! that keeps its own index.
//!
//! Invariants:
//!
//! 1. Events applied in order to an earlier state of the index give the keys that the pool finds
//!    now.
//! 2. Duplicates are one key: it is stored with the first block and removed with the last.
//! 3. Between two steps every stored block is computed. If a step fails, the log removes its keys
//!    again.
//!
//! A key covers the block, all tokens before it and the cache scope (`prefix`). Events carry no
//! tokens: a subscriber that has a prompt computes the keys to look for.

use crate::kv::block_key::BlockKey;
use std::collections::VecDeque;

/// Events that the log keeps, about 280 kB. A step logs at most two events for each block that it
/// writes (the new key and the evicted one): 256 for 2,048 rows. If a step logs more events than
/// the log keeps, subscribers get a snapshot.
pub const KV_EVENTS_MAX: usize = 8192;

/// Asks for a snapshot: the event number of a subscriber that has seen nothing. The first event has
/// number 1.
pub const FULL_SNAPSHOT: u64 = 0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvCacheEvent {
    BlockStored(BlockKey),
    BlockRemoved(BlockKey),
    /// The whole index was cleared.
    AllBlocksCleared,
}

/// Events that a subscriber applies in order. A snapshot begins with `AllBlocksCleared`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventBatch {
    pub events: Vec<KvCacheEvent>,
    /// Number of the first event after this batch.
    pub next: u64,
}

/// The most recent events. `push` allocates no memory.
#[derive(Debug)]
pub struct KvEventLog {
    ring: VecDeque<KvCacheEvent>,
    /// Most events that the ring holds.
    kept: usize,
    next: u64,
}

impl KvEventLog {
    /// A log for a pool of `blocks` blocks. It keeps at most that many events, since a snapshot is
    /// shorter than a longer list.
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

    /// The events from number `from` on. None if the log no longer has them or never had them.
    pub fn since(&self, from: u64) -> Option<impl Iterator<Item = KvCacheEvent>> {
        let missing = usize::try_from(self.next.checked_sub(from)?).ok()?;
        let known = self.ring.len().checked_sub(missing)?;
        Some(self.ring.iter().skip(known).copied())
    }
}
