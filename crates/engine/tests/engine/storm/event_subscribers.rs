// SPDX-License-Identifier: Apache-2.0

//! Two subscribers to the pool's events. One reads often. The other reads so seldom that the log no
//! longer reaches back to its last event. After each read, a subscriber knows exactly the cached
//! keys.
//!
//! The subscribers have their own random numbers, so a seed does the same with and without them.

use super::{StormCounts, StormRng, mix};
use crate::kv::block_key::BlockKey;
use crate::kv::block_pool::BlockPool;
use crate::kv::events::{FULL_SNAPSHOT, KvCacheEvent};
use std::collections::HashSet;

/// Average number of steps between two reads of each subscriber.
const EVERY: [usize; 2] = [3, 100];

pub(super) struct EventSubscribers {
    random: StormRng,
    readers: [EventSubscriber; EVERY.len()],
}

#[derive(Default)]
struct EventSubscriber {
    next: u64,
    known: HashSet<BlockKey>,
}

impl EventSubscribers {
    pub(super) fn new(seed: u64) -> Self {
        Self { random: StormRng(mix(seed)), readers: Default::default() }
    }

    /// Starts over, since the pool was replaced.
    pub(super) fn forget(&mut self) {
        self.readers = Default::default();
    }

    /// Between steps: each subscriber that is due reads the events, or all subscribers do.
    pub(super) fn read_events(&mut self, pool: &BlockPool, all: bool, summary: &mut StormCounts) {
        for (reader, every) in self.readers.iter_mut().zip(EVERY) {
            if all || self.random.one_in(every) {
                reader.read_events(pool, summary);
            }
        }
    }
}

impl EventSubscriber {
    fn read_events(&mut self, pool: &BlockPool, summary: &mut StormCounts) {
        let update = pool.events_since(self.next);
        let is_snapshot = update.events.first() == Some(&KvCacheEvent::AllBlocksCleared);
        summary.told += update.events.len();
        summary.behind += usize::from(is_snapshot && self.next != FULL_SNAPSHOT);
        self.apply(&update.events);
        self.next = update.next;
        let mut anew = EventSubscriber::default();
        anew.apply(&pool.events_since(FULL_SNAPSHOT).events);
        assert!(self.known == anew.known, "events do not follow the index");
        assert!(
            self.known.iter().all(|key| pool.lookup(key).is_some()),
            "events name keys that are not cached"
        );
    }

    fn apply(&mut self, events: &[KvCacheEvent]) {
        for &event in events {
            match event {
                KvCacheEvent::BlockStored(key) => assert!(self.known.insert(key), "stored twice"),
                KvCacheEvent::BlockRemoved(key) => {
                    assert!(self.known.remove(&key), "removed, but never stored")
                }
                KvCacheEvent::AllBlocksCleared => self.known.clear(),
            }
        }
    }
}
