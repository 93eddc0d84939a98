//! The block pool against a small model of it: vectors and linear search instead of links and an index.

use engine::kv::block_key::{BlockId, Name, TRASH};
use engine::kv::block_pool::BlockPool;
use engine::kv::events::{Event, NOTHING_KNOWN};
use prefix::BlockHash;
use proptest::prelude::*;
use std::collections::HashSet;

const BLOCKS: usize = 7;

#[derive(Clone, Debug)]
enum Operation {
    Take,
    /// Of the n-th held block.
    Hold(usize),
    Release(usize),
    Name(usize, u8),
    Unname(usize),
    FindAndHold(u8),
    Reset,
    /// The reader of events looks.
    Read,
}

fn operation() -> impl Strategy<Value = Operation> {
    let (index, hash) = (0..BLOCKS, 0..5_u8);
    prop_oneof![
        3 => Just(Operation::Take),
        1 => index.clone().prop_map(Operation::Hold),
        3 => index.clone().prop_map(Operation::Release),
        3 => (index.clone(), hash.clone()).prop_map(|(index, hash)| Operation::Name(index, hash)),
        1 => index.prop_map(Operation::Unname),
        3 => hash.prop_map(Operation::FindAndHold),
        1 => Just(Operation::Reset),
        2 => Just(Operation::Read),
    ]
}

fn hash(value: u8) -> Name {
    // The same content in two groups is two names.
    Name { hash: BlockHash::from([value / 2; 32]), group: value % 2 }
}

/// Applies what happened since event `next` to what is known.
fn read(pool: &BlockPool, next: &mut u64, known: &mut HashSet<Name>) {
    let update = pool.events_since(*next);
    for event in update.events {
        match event {
            Event::Stored(name) => assert!(known.insert(name), "stored twice"),
            Event::Removed(name) => assert!(known.remove(&name), "removed, but never stored"),
            Event::Cleared => known.clear(),
        }
    }
    *next = update.next;
}

/// What the pool should be.
struct Model {
    /// Front: taken next.
    free: Vec<BlockId>,
    /// One entry per holder.
    held: Vec<BlockId>,
    names: Vec<Option<u8>>,
    evictions: u64,
}

impl Model {
    fn release(&mut self, index: usize) {
        let block = self.held.remove(index);
        if !self.held.contains(&block) {
            // What cannot be found is taken first, what can be last.
            match self.names[block as usize] {
                Some(_) => self.free.push(block),
                None => self.free.insert(0, block),
            }
        }
    }

    fn hold(&mut self, block: BlockId) {
        self.free.retain(|&other| other != block);
        self.held.push(block);
    }

    fn name(&mut self, block: BlockId) -> &mut Option<u8> {
        &mut self.names[block as usize]
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn pool_behaves_as_its_model(operations in prop::collection::vec(operation(), 1..200)) {
        let mut pool = BlockPool::new(BLOCKS);
        let mut model = Model {
            free: (1..=BLOCKS as BlockId).collect(),
            held: Vec::new(),
            names: vec![None; BLOCKS + 1],
            evictions: 0,
        };
        let (mut next, mut known) = (NOTHING_KNOWN, HashSet::new());
        // The last look is at the end.
        for operation in operations.into_iter().chain([Operation::Read]) {
            match operation {
                Operation::Take => {
                    let taken = pool.take();
                    prop_assert_eq!(taken, model.free.first().copied());
                    if let Some(block) = taken {
                        prop_assert_ne!(block, TRASH);
                        model.evictions += u64::from(model.name(block).take().is_some());
                        model.hold(block);
                    }
                }
                Operation::Hold(index) => {
                    if let Some(&block) = model.held.get(index) {
                        pool.hold(block);
                        model.hold(block);
                    }
                }
                Operation::Release(index) => {
                    if let Some(&block) = model.held.get(index) {
                        pool.release(block);
                        model.release(index);
                    }
                }
                Operation::Name(index, value) => {
                    if let Some(&block) = model.held.get(index)
                        && model.name(block).is_none()
                    {
                        pool.name(block, hash(value));
                        *model.name(block) = Some(value);
                    }
                }
                Operation::Unname(index) => {
                    if let Some(&block) = model.held.get(index) {
                        pool.unname(block);
                        *model.name(block) = None;
                    }
                }
                Operation::FindAndHold(value) => {
                    let found = pool.find(&hash(value));
                    prop_assert_eq!(found.is_some(), model.names.contains(&Some(value)));
                    if let Some(block) = found {
                        prop_assert_eq!(*model.name(block), Some(value));
                        prop_assert_eq!(pool.is_free(block), model.free.contains(&block));
                        pool.hold(block);
                        model.hold(block);
                    }
                }
                Operation::Reset => {
                    prop_assert_eq!(pool.reset(), model.held.is_empty());
                    if model.held.is_empty() {
                        model.names.fill(None);
                    }
                }
                Operation::Read => {
                    read(&pool, &mut next, &mut known);
                    let named: HashSet<Name> = model.names.iter().flatten().copied().map(hash).collect();
                    prop_assert_eq!(&known, &named);
                }
            }
            let cached = model.free.iter().filter(|&&block| model.names[block as usize].is_some()).count();
            prop_assert_eq!(pool.free(), model.free.len());
            prop_assert_eq!(pool.used(), BLOCKS - model.free.len());
            prop_assert_eq!(pool.cached(), cached);
            prop_assert_eq!(pool.evictions(), model.evictions);
            prop_assert_eq!(pool.check_integrity(std::iter::once(&model.held[..])), Ok(()));
        }
    }
}

#[test]
fn a_cached_block_that_is_held_again_is_not_evicted() {
    let mut pool = BlockPool::new(2);
    let (a, b) = (pool.take().unwrap(), pool.take().unwrap());
    pool.name(a, hash(1));
    pool.release(a);
    pool.release(b);
    pool.hold(a);
    assert_eq!(pool.take(), Some(b));
    assert_eq!(pool.take(), None);
    assert_eq!(pool.find(&hash(1)), Some(a));
}

#[test]
fn removing_one_of_two_twins_leaves_the_other_findable() {
    let mut pool = BlockPool::new(2);
    let (a, b) = (pool.take().unwrap(), pool.take().unwrap());
    pool.name(a, hash(1));
    pool.name(b, hash(1));
    pool.release(a);
    assert_eq!(pool.take(), Some(a), "the freed twin is evicted");
    assert_eq!(pool.find(&hash(1)), Some(b));
    pool.unname(b);
    assert_eq!(pool.find(&hash(1)), None);
}

#[test]
fn integrity_check_finds_a_leak() {
    let mut pool = BlockPool::new(2);
    let block = pool.take().unwrap();
    assert!(pool.check_integrity(std::iter::once(&[block][..])).is_ok());
    assert!(pool.check_integrity(std::iter::empty()).is_err());
}

#[test]
fn twins_are_stored_and_removed_once() {
    let mut pool = BlockPool::new(9);
    let (a, b) = (pool.take().unwrap(), pool.take().unwrap());
    pool.name(a, hash(1));
    pool.name(b, hash(1));
    pool.unname(a);
    assert_eq!(pool.events_since(1).events, [Event::Stored(hash(1))]);
    assert_eq!(pool.events_since(NOTHING_KNOWN).events, [Event::Cleared, Event::Stored(hash(1))]);
    pool.unname(b);
    assert_eq!(pool.events_since(2).events, [Event::Removed(hash(1))]);
}

#[test]
fn who_has_missed_more_events_than_there_are_blocks_begins_anew() {
    let mut pool = BlockPool::new(3);
    assert_eq!((pool.next_event(), pool.events_since(1).events), (1, vec![]));
    let block = pool.take().unwrap();
    for value in 0..2 {
        pool.name(block, hash(value));
        pool.unname(block);
    }
    pool.name(block, hash(2));
    let told = pool.events_since(3);
    assert_eq!(told.events, [Event::Stored(hash(1)), Event::Removed(hash(1)), Event::Stored(hash(2))]);
    assert_eq!(told.next, 6);
    for out_of_reach in [NOTHING_KNOWN, 2, 7] {
        let snapshot = pool.events_since(out_of_reach);
        assert_eq!(snapshot.events, [Event::Cleared, Event::Stored(hash(2))], "from {out_of_reach}");
        assert_eq!(snapshot.next, 6);
    }
    pool.release(block);
    assert!(pool.reset());
    assert_eq!(pool.events_since(6).events, [Event::Cleared]);
}
