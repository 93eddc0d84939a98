//! The engine's KV cache, with a double of its block pool.

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
    use crate::kv::block_key::{BlockId, Name};
    use crate::kv::events::Update;
    use crate::kv::real_block_pool;
    pub(crate) use crate::kv::real_block_pool::PoolIntegrityError;
    use crate::{Bug, is, now_and_then};
    use std::collections::HashMap;

    #[derive(Debug)]
    pub struct BlockPool {
        real: real_block_pool::BlockPool,
        /// Names that blocks had when they were taken.
        stale: HashMap<[u8; 33], BlockId>,
        names: HashMap<BlockId, [u8; 33]>,
    }

    fn key(name: &Name) -> [u8; 33] {
        let mut key = [name.group; 33];
        key[..32].copy_from_slice(name.hash.as_bytes());
        key
    }

    impl BlockPool {
        pub fn new(usable: usize) -> Self {
            Self {
                real: real_block_pool::BlockPool::new(usable),
                stale: HashMap::new(),
                names: HashMap::new(),
            }
        }

        pub fn free(&self) -> usize {
            self.real.free()
        }

        pub fn evictions(&self) -> u64 {
            self.real.evictions()
        }

        pub fn next_event(&self) -> u64 {
            self.real.next_event()
        }

        pub fn events_since(&self, from: u64) -> Update {
            self.real.events_since(from)
        }

        pub fn is_free(&self, block: BlockId) -> bool {
            self.real.is_free(block)
        }

        pub fn is_writable(&self, block: BlockId) -> bool {
            is(Bug::NoCopyOnWrite) || self.real.is_writable(block)
        }

        pub fn find(&self, name: &Name) -> Option<BlockId> {
            if is(Bug::Forgetful) && name.hash.as_bytes()[0] < 32 {
                return None;
            }
            let stale = self.stale.get(&key(name)).copied().filter(|_| is(Bug::StaleName));
            // Held now, so that holding it once more is possible.
            self.real.find(name).or(stale.filter(|&block| !self.real.is_free(block)))
        }

        pub fn take(&mut self) -> Option<BlockId> {
            let block = self.real.take()?;
            if let Some(name) = self.names.remove(&block) {
                self.stale.insert(name, block);
            }
            Some(block)
        }

        pub fn hold(&mut self, block: BlockId) {
            self.real.hold(block);
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

        pub fn name(&mut self, block: BlockId, name: Name) {
            self.names.insert(block, key(&name));
            self.real.name(block, name);
        }

        pub fn unname(&mut self, block: BlockId) {
            if !is(Bug::FailedStepIsFound) {
                self.names.remove(&block);
                self.real.unname(block);
            }
        }

        pub fn reset(&mut self) -> bool {
            self.real.reset()
        }

        pub fn forget_unused(&mut self) {
            self.real.forget_unused();
        }

        pub fn tail(&self) -> BlockId {
            self.real.tail()
        }

        pub fn check_integrity<'a>(
            &self,
            tables: impl Iterator<Item = &'a [BlockId]>,
        ) -> Result<(), PoolIntegrityError> {
            self.real.check_integrity(tables)
        }
    }
}
