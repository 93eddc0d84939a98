// SPDX-License-Identifier: Apache-2.0

//! The engine's KV cache with a double of the block pool.

#[path = "../../src/kv/block_key.rs"]
pub(crate) mod block_key;
#[path = "../../src/kv/block_tables.rs"]
pub(crate) mod block_tables;
#[path = "../../src/kv/events.rs"]
pub(crate) mod events;
#[path = "../../src/kv/group.rs"]
pub(crate) mod group;
#[path = "../../src/kv/block_pool.rs"]
pub(crate) mod real_block_pool;

/// The double of `engine::kv::block_pool`.
pub(crate) mod block_pool {
    use crate::kv::block_key::{BlockId, BlockKey};
    use crate::kv::events::KvEventBatch;
    use crate::kv::real_block_pool;
    pub(crate) use crate::kv::real_block_pool::PoolIntegrityError;
    use crate::{Bug, is, now_and_then};
    use std::collections::HashMap;

    #[derive(Debug)]
    pub struct BlockPool {
        real: real_block_pool::BlockPool,
        /// Keys that blocks had when they were reallocated.
        stale: HashMap<[u8; 33], BlockId>,
        keys: HashMap<BlockId, [u8; 33]>,
    }

    fn key_bytes(key: &BlockKey) -> [u8; 33] {
        let mut bytes = [key.group; 33];
        bytes[..32].copy_from_slice(key.hash.as_bytes());
        bytes
    }

    impl BlockPool {
        pub fn new(usable: usize) -> Self {
            Self {
                real: real_block_pool::BlockPool::new(usable),
                stale: HashMap::new(),
                keys: HashMap::new(),
            }
        }

        pub fn free_blocks(&self) -> usize {
            self.real.free_blocks()
        }

        pub fn evictions(&self) -> u64 {
            self.real.evictions()
        }

        pub fn next_event_number(&self) -> u64 {
            self.real.next_event_number()
        }

        pub fn events_since(&self, from: u64) -> KvEventBatch {
            self.real.events_since(from)
        }

        pub fn is_free(&self, block: BlockId) -> bool {
            self.real.is_free(block)
        }

        pub fn is_writable(&self, block: BlockId) -> bool {
            is(Bug::NoCopyOnWrite) || self.real.is_writable(block)
        }

        pub fn lookup(&self, key: &BlockKey) -> Option<BlockId> {
            if is(Bug::Forgetful) && key.hash.as_bytes()[0] < 32 {
                return None;
            }
            let stale = self.stale.get(&key_bytes(key)).copied().filter(|_| is(Bug::StaleName));
            // Only blocks in use, so that they can be retained once more.
            self.real.lookup(key).or(stale.filter(|&block| !self.real.is_free(block)))
        }

        pub fn allocate(&mut self) -> Option<BlockId> {
            let block = self.real.allocate()?;
            if let Some(key) = self.keys.remove(&block) {
                self.stale.insert(key, block);
            }
            Some(block)
        }

        pub fn retain(&mut self, block: BlockId) {
            self.real.retain(block);
        }

        pub fn release(&mut self, block: BlockId) {
            if is(Bug::Leak) && now_and_then(1000) {
                return;
            }
            if is(Bug::DoubleFree) && !self.real.is_free(block) && !self.real.is_writable(block) {
                self.real.release(block);
                if self.real.is_free(block) {
                    return;
                }
            }
            self.real.release(block);
        }

        pub fn cache_insert(&mut self, block: BlockId, key: BlockKey) {
            self.keys.insert(block, key_bytes(&key));
            self.real.cache_insert(block, key);
        }

        pub fn cache_remove(&mut self, block: BlockId) {
            if !is(Bug::FailedStepIsFound) {
                self.keys.remove(&block);
                self.real.cache_remove(block);
            }
        }

        pub fn reset_prefix_cache(&mut self) -> bool {
            self.real.reset_prefix_cache()
        }

        pub fn evict_unused(&mut self) {
            self.real.evict_unused();
        }

        pub fn in_use_end(&self) -> BlockId {
            self.real.in_use_end()
        }

        pub fn check_integrity<'a>(
            &self,
            tables: impl Iterator<Item = &'a [BlockId]>,
        ) -> Result<(), PoolIntegrityError> {
            self.real.check_integrity(tables)
        }
    }
}
