//! Two who follow the pool's events: one often, one so seldom that the log does not reach back to what it knows. Whatever
//! happened between two looks, they know then what the pool finds.
//!
//! They have random numbers of their own: what a seed does is the same without them.

use super::{Random, Summary, mix};
use crate::kv::block_key::Name;
use crate::kv::block_pool::BlockPool;
use crate::kv::events::{Event, NOTHING_KNOWN};
use std::collections::HashSet;

/// Steps between two looks of each, on average.
const EVERY: [usize; 2] = [3, 100];

pub(super) struct Readers {
    random: Random,
    readers: [Reader; EVERY.len()],
}

#[derive(Default)]
struct Reader {
    next: u64,
    known: HashSet<Name>,
}

impl Readers {
    pub(super) fn new(seed: u64) -> Self {
        Self { random: Random(mix(seed)), readers: Default::default() }
    }

    /// The pool is another one.
    pub(super) fn forget(&mut self) {
        self.readers = Default::default();
    }

    /// Those whose time it is, or all. Between steps.
    pub(super) fn look(&mut self, pool: &BlockPool, all: bool, summary: &mut Summary) {
        for (reader, every) in self.readers.iter_mut().zip(EVERY) {
            if all || self.random.one_in(every) {
                reader.look(pool, summary);
            }
        }
    }
}

impl Reader {
    fn look(&mut self, pool: &BlockPool, summary: &mut Summary) {
        let update = pool.events_since(self.next);
        let is_snapshot = update.events.first() == Some(&Event::Cleared);
        summary.told += update.events.len();
        summary.behind += usize::from(is_snapshot && self.next != NOTHING_KNOWN);
        self.apply(&update.events);
        self.next = update.next;
        let mut anew = Reader::default();
        anew.apply(&pool.events_since(NOTHING_KNOWN).events);
        assert!(self.known == anew.known, "events do not follow the index");
        assert!(self.known.iter().all(|name| pool.find(name).is_some()), "events tell of what is not found");
    }

    fn apply(&mut self, events: &[Event]) {
        for &event in events {
            match event {
                Event::Stored(name) => assert!(self.known.insert(name), "stored twice"),
                Event::Removed(name) => assert!(self.known.remove(&name), "removed, but never stored"),
                Event::Cleared => self.known.clear(),
            }
        }
    }
}
