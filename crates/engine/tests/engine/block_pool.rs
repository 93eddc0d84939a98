// SPDX-License-Identifier: Apache-2.0

//! The block pool against a simple model of it: vectors and linear search instead of links and an
//! index.

use engine::kv::block_key::{BlockId, BlockKey, NULL_BLOCK};
use engine::kv::block_pool::BlockPool;
use engine::kv::events::{FULL_SNAPSHOT, KvCacheEvent};
use prefix::BlockHash;
use proptest::prelude::*;
use std::collections::HashSet;

const BLOCKS: usize = 7;

#[derive(Clone, Debug)]
enum PoolOperation {
    Allocate,
    /// Retains the n-th block in use.
    Retain(usize),
    Release(usize),
    CacheInsert(usize, u8),
    CacheRemove(usize),
    LookupAndRetain(u8),
    Reset,
    /// The subscriber reads events.
    ReadEvents,
}

fn operation() -> impl Strategy<Value = PoolOperation> {
    let (index, hash) = (0..BLOCKS, 0..5_u8);
    prop_oneof![
        3 => Just(PoolOperation::Allocate),
        1 => index.clone().prop_map(PoolOperation::Retain),
        3 => index.clone().prop_map(PoolOperation::Release),
        3 => (index.clone(), hash.clone()).prop_map(|(index, hash)| PoolOperation::CacheInsert(index, hash)),
        1 => index.prop_map(PoolOperation::CacheRemove),
        3 => hash.prop_map(PoolOperation::LookupAndRetain),
        1 => Just(PoolOperation::Reset),
        2 => Just(PoolOperation::ReadEvents),
    ]
}

fn hash(value: u8) -> BlockKey {
    // Equal content in two groups has two keys.
    BlockKey { hash: BlockHash::from([value / 2; 32]), group: value % 2 }
}

/// Applies the events from number `next` on to the known keys.
fn read(pool: &BlockPool, next: &mut u64, known: &mut HashSet<BlockKey>) {
    let update = pool.events_since(*next);
    for event in update.events {
        match event {
            KvCacheEvent::BlockStored(name) => assert!(known.insert(name), "stored twice"),
            KvCacheEvent::BlockRemoved(name) => assert!(known.remove(&name), "removed, but never stored"),
            KvCacheEvent::AllBlocksCleared => known.clear(),
        }
    }
    *next = update.next;
}

/// The expected state of the pool.
struct PoolModel {
    /// Front: allocated next.
    free: Vec<BlockId>,
    /// One entry for each user.
    retained: Vec<BlockId>,
    names: Vec<Option<u8>>,
    evictions: u64,
}

impl PoolModel {
    fn release(&mut self, index: usize) {
        let block = self.retained.remove(index);
        if !self.retained.contains(&block) {
            // Blocks without a key are allocated first, cached blocks last.
            match self.names[block as usize] {
                Some(_) => self.free.push(block),
                None => self.free.insert(0, block),
            }
        }
    }

    fn hold(&mut self, block: BlockId) {
        self.free.retain(|&other| other != block);
        self.retained.push(block);
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
        let mut model = PoolModel {
            free: (1..=BLOCKS as BlockId).collect(),
            retained: Vec::new(),
            names: vec![None; BLOCKS + 1],
            evictions: 0,
        };
        let (mut next, mut known) = (FULL_SNAPSHOT, HashSet::new());
        // The subscriber reads once more at the end.
        for operation in operations.into_iter().chain([PoolOperation::ReadEvents]) {
            match operation {
                PoolOperation::Allocate => {
                    let taken = pool.allocate();
                    prop_assert_eq!(taken, model.free.first().copied());
                    if let Some(block) = taken {
                        prop_assert_ne!(block, NULL_BLOCK);
                        model.evictions += u64::from(model.name(block).take().is_some());
                        model.hold(block);
                    }
                }
                PoolOperation::Retain(index) => {
                    if let Some(&block) = model.retained.get(index) {
                        pool.retain(block);
                        model.hold(block);
                    }
                }
                PoolOperation::Release(index) => {
                    if let Some(&block) = model.retained.get(index) {
                        pool.release(block);
                        model.release(index);
                    }
                }
                PoolOperation::CacheInsert(index, value) => {
                    if let Some(&block) = model.retained.get(index)
                        && model.name(block).is_none()
                    {
                        pool.cache_insert(block, hash(value));
                        *model.name(block) = Some(value);
                    }
                }
                PoolOperation::CacheRemove(index) => {
                    if let Some(&block) = model.retained.get(index) {
                        pool.cache_remove(block);
                        *model.name(block) = None;
                    }
                }
                PoolOperation::LookupAndRetain(value) => {
                    let found = pool.lookup(&hash(value));
                    prop_assert_eq!(found.is_some(), model.names.contains(&Some(value)));
                    if let Some(block) = found {
                        prop_assert_eq!(*model.name(block), Some(value));
                        prop_assert_eq!(pool.is_free(block), model.free.contains(&block));
                        pool.retain(block);
                        model.hold(block);
                    }
                }
                PoolOperation::Reset => {
                    prop_assert_eq!(pool.reset_prefix_cache(), model.retained.is_empty());
                    if model.retained.is_empty() {
                        model.names.fill(None);
                    }
                }
                PoolOperation::ReadEvents => {
                    read(&pool, &mut next, &mut known);
                    let named: HashSet<BlockKey> = model.names.iter().flatten().copied().map(hash).collect();
                    prop_assert_eq!(&known, &named);
                }
            }
            let cached = model.free.iter().filter(|&&block| model.names[block as usize].is_some()).count();
            prop_assert_eq!(pool.free_blocks(), model.free.len());
            prop_assert_eq!(pool.used_blocks(), BLOCKS - model.free.len());
            prop_assert_eq!(pool.cached_blocks(), cached);
            prop_assert_eq!(pool.evictions(), model.evictions);
            prop_assert_eq!(pool.check_integrity(std::iter::once(&model.retained[..])), Ok(()));
        }
    }
}

#[test]
fn a_cached_block_that_is_retained_again_is_not_evicted() {
    let mut pool = BlockPool::new(2);
    let (a, b) = (pool.allocate().unwrap(), pool.allocate().unwrap());
    pool.cache_insert(a, hash(1));
    pool.release(a);
    pool.release(b);
    pool.retain(a);
    assert_eq!(pool.allocate(), Some(b));
    assert_eq!(pool.allocate(), None);
    assert_eq!(pool.lookup(&hash(1)), Some(a));
}

#[test]
fn removing_one_of_two_duplicates_leaves_the_other_cached() {
    let mut pool = BlockPool::new(2);
    let (a, b) = (pool.allocate().unwrap(), pool.allocate().unwrap());
    pool.cache_insert(a, hash(1));
    pool.cache_insert(b, hash(1));
    pool.release(a);
    assert_eq!(pool.allocate(), Some(a), "the freed duplicate is evicted");
    assert_eq!(pool.lookup(&hash(1)), Some(b));
    pool.cache_remove(b);
    assert_eq!(pool.lookup(&hash(1)), None);
}

#[test]
fn integrity_check_finds_a_leak() {
    let mut pool = BlockPool::new(2);
    let block = pool.allocate().unwrap();
    assert!(pool.check_integrity(std::iter::once(&[block][..])).is_ok());
    assert!(pool.check_integrity(std::iter::empty()).is_err());
}

#[test]
fn duplicates_log_one_stored_and_one_removed_event() {
    let mut pool = BlockPool::new(9);
    let (a, b) = (pool.allocate().unwrap(), pool.allocate().unwrap());
    pool.cache_insert(a, hash(1));
    pool.cache_insert(b, hash(1));
    pool.cache_remove(a);
    assert_eq!(pool.events_since(1).events, [KvCacheEvent::BlockStored(hash(1))]);
    assert_eq!(
        pool.events_since(FULL_SNAPSHOT).events,
        [KvCacheEvent::AllBlocksCleared, KvCacheEvent::BlockStored(hash(1))]
    );
    pool.cache_remove(b);
    assert_eq!(pool.events_since(2).events, [KvCacheEvent::BlockRemoved(hash(1))]);
}

#[test]
fn a_subscriber_that_missed_more_events_than_blocks_gets_a_snapshot() {
    let mut pool = BlockPool::new(3);
    assert_eq!((pool.next_event_number(), pool.events_since(1).events), (1, vec![]));
    let block = pool.allocate().unwrap();
    for value in 0..2 {
        pool.cache_insert(block, hash(value));
        pool.cache_remove(block);
    }
    pool.cache_insert(block, hash(2));
    let told = pool.events_since(3);
    assert_eq!(
        told.events,
        [
            KvCacheEvent::BlockStored(hash(1)),
            KvCacheEvent::BlockRemoved(hash(1)),
            KvCacheEvent::BlockStored(hash(2))
        ]
    );
    assert_eq!(told.next, 6);
    for out_of_reach in [FULL_SNAPSHOT, 2, 7] {
        let snapshot = pool.events_since(out_of_reach);
        assert_eq!(
            snapshot.events,
            [KvCacheEvent::AllBlocksCleared, KvCacheEvent::BlockStored(hash(2))],
            "from {out_of_reach}"
        );
        assert_eq!(snapshot.next, 6);
    }
    pool.release(block);
    assert!(pool.reset_prefix_cache());
    assert_eq!(pool.events_since(6).events, [KvCacheEvent::AllBlocksCleared]);
}

#[test]
fn eviction_of_unused_blocks_keeps_the_used_ones_near_the_start() {
    let mut pool = BlockPool::new(10);
    let blocks: Vec<BlockId> = (0..10).map(|_| pool.allocate().unwrap()).collect();
    assert_eq!(blocks, (1..=10).collect::<Vec<BlockId>>());
    for (value, &block) in (0..10).zip(&blocks) {
        pool.cache_insert(block, hash(value));
    }
    // Block 1 stays in use. Since the first call, only blocks 4 and 10 are used again.
    blocks[1..].iter().for_each(|&block| pool.release(block));
    pool.evict_unused();
    assert_eq!(pool.cached_blocks(), 9, "all were used since the start");
    for block in [blocks[3], blocks[9]] {
        pool.retain(block);
        pool.release(block);
    }
    pool.evict_unused();
    // Three blocks are of use, so cached blocks stay up to block 6.
    let found: Vec<bool> = (0..10).map(|value| pool.lookup(&hash(value)).is_some()).collect();
    assert_eq!(found, [true, false, false, true, false, false, false, false, false, false]);
    pool.check_integrity([&blocks[..1]].into_iter()).unwrap();
}

#[test]
fn end_of_use_follows_blocks_in_use_and_cached_blocks() {
    let mut pool = BlockPool::new(4);
    assert_eq!(pool.in_use_end(), 1);
    let [first, second, third] = [(); 3].map(|()| pool.allocate().unwrap());
    assert_eq!(pool.in_use_end(), third + 1);
    pool.release(third);
    assert_eq!(pool.in_use_end(), second + 1);
    pool.cache_insert(second, hash(1));
    pool.release(second);
    assert_eq!(pool.in_use_end(), second + 1, "cached");
    pool.retain(second);
    pool.cache_remove(second);
    pool.release(second);
    assert_eq!(pool.in_use_end(), first + 1);
}
