//! The storm finds bugs: six are planted, one at a time, and each is found, by the invariant that is there for it.
//!
//! Scheduler, sequences and admission are the engine's own sources, compiled here once more over doubles of the pool and of
//! the queue. A double passes every call on, except the one that its bug is about. docs/decisions/0007 describes them.

#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]
#![expect(dead_code, unreachable_pub, reason = "the engine's sources offer more than the storm asks for")]

#[path = "../src/admission.rs"]
mod admission;
#[path = "../src/blocks.rs"]
mod blocks;
#[path = "../src/plan.rs"]
mod plan;
#[path = "../src/scheduler.rs"]
mod scheduler;
#[path = "../src/sequence.rs"]
mod sequence;
mod storm;

#[path = "../src/pool.rs"]
mod real_pool;
#[path = "../src/queue.rs"]
mod real_queue;

use std::cell::Cell;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    /// One block in a thousand is not given back.
    Leak,
    /// A block that two hold is free when the first gives it back.
    DoubleFree,
    /// A block that is taken for something else can still be found by its old content.
    StaleName,
    /// Blocks of a failed step stay findable.
    FailedStepIsFound,
    /// A fork writes into the block that it shares.
    NoCopyOnWrite,
    /// Who is preempted goes to the end of the line.
    LostPlace,
}

thread_local! {
    static BUG: Cell<Bug> = const { Cell::new(Bug::None) };
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

fn is(bug: Bug) -> bool {
    BUG.get() == bug
}

/// The double of `engine::pool`.
mod pool {
    pub use crate::real_pool::{BlockId, IntegrityError, Name, TRASH};
    use crate::{Bug, CALLS, is, real_pool};
    use std::collections::HashMap;

    #[derive(Debug)]
    pub struct BlockPool {
        real: real_pool::BlockPool,
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
            Self { real: real_pool::BlockPool::new(usable), stale: HashMap::new(), names: HashMap::new() }
        }

        pub fn free(&self) -> usize {
            self.real.free()
        }

        pub fn evictions(&self) -> u64 {
            self.real.evictions()
        }

        pub fn is_free(&self, block: BlockId) -> bool {
            self.real.is_free(block)
        }

        pub fn is_writable(&self, block: BlockId) -> bool {
            is(Bug::NoCopyOnWrite) || self.real.is_writable(block)
        }

        pub fn find(&self, name: &Name) -> Option<BlockId> {
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
            CALLS.set(CALLS.get() + 1);
            if is(Bug::Leak) && CALLS.get().is_multiple_of(1000) {
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

        pub fn tail(&self) -> BlockId {
            self.real.tail()
        }

        pub fn check_integrity<'a>(
            &self,
            tables: impl Iterator<Item = &'a [BlockId]>,
        ) -> Result<(), IntegrityError> {
            self.real.check_integrity(tables)
        }
    }
}

/// The double of `engine::queue`.
mod queue {
    pub use crate::real_queue::{AGED_EVERY, Next, Passed, Rank};
    use crate::scheduler::Slot;
    use crate::{Bug, is, real_queue};

    #[derive(Debug, Default)]
    pub struct Queue(real_queue::Queue);

    impl Queue {
        pub fn len(&self) -> usize {
            self.0.len()
        }

        pub fn is_empty(&self) -> bool {
            self.0.is_empty()
        }

        pub fn rank(&mut self, priority: i32, tenant: u64, cost: u64) -> Rank {
            self.0.rank(priority, tenant, cost)
        }

        pub fn enter(&mut self, rank: Rank, slot: Slot) {
            self.0.enter(rank, slot);
        }

        pub fn leave(&mut self, rank: Rank) {
            self.0.leave(rank);
        }

        pub fn ahead(&self, rank: Rank) -> usize {
            self.0.ahead(rank)
        }

        pub fn next(&self, passed: Passed) -> Option<Next> {
            self.0.next(passed)
        }

        pub fn admit(&mut self, next: Next) -> Rank {
            let rank = self.0.admit(next);
            if is(Bug::LostPlace) { self.0.rank(0, 0, 1) } else { rank }
        }
    }
}

/// The first seed that finds it, and how.
fn find(bug: Bug, seeds: u64) -> Option<(u64, String)> {
    let hunt = move || {
        BUG.set(bug);
        CALLS.set(0);
        (0..seeds).find_map(|seed| Some((seed, storm::run(seed).err()?)))
    };
    std::thread::spawn(hunt).join().unwrap()
}

#[test]
fn every_planted_bug_is_found() {
    // What is found is told below, once.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let bugs = [
        Bug::Leak,
        Bug::DoubleFree,
        Bug::StaleName,
        Bug::FailedStepIsFound,
        Bug::NoCopyOnWrite,
        Bug::LostPlace,
    ];
    let found = bugs.map(|bug| (bug, find(bug, 200)));
    let clean = find(Bug::None, 20);
    std::panic::set_hook(hook);
    for (bug, found) in &found {
        let (seed, broken) = found.as_ref().unwrap_or_else(|| panic!("{bug:?} is not found"));
        println!("{bug:?}: seed {seed}: {broken}");
    }
    assert_eq!(clean, None, "the doubles themselves break nothing");
}
