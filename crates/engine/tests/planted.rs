//! The storm finds bugs: ten are planted, one at a time, and each is found, by the invariant that is there for it.
//!
//! Blocks, sequences and drafts are the engine's own sources, compiled here once more over doubles of admission, pool, queue
//! and scheduler, which stand on the engine's own too. A double passes every call on, except the one that its bug is about.
//! docs/decisions/0007 describes them.

#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]
#![expect(
    dead_code,
    unreachable_pub,
    unused_imports,
    reason = "the engine's sources offer more than the storm asks for"
)]

#[path = "../src/blocks.rs"]
mod blocks;
#[path = "../src/draft/mod.rs"]
mod draft;
#[path = "../src/events.rs"]
mod events;
#[path = "../src/integrity.rs"]
mod integrity;
#[path = "../src/plan.rs"]
mod plan;
#[path = "../src/sequence.rs"]
mod sequence;
mod storm;

#[path = "../src/admission.rs"]
mod real_admission;
#[path = "../src/pool.rs"]
mod real_pool;
#[path = "../src/queue.rs"]
mod real_queue;
#[path = "../src/scheduler.rs"]
mod real_scheduler;

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
    /// Now and then the draft behind the last right one counts too.
    OneDraftTooMany,
    /// Now and then a tenant's place in the queue stays taken when its request leaves that.
    TenantLeak,
    /// Some of what is cached is never found, and so computed again.
    Forgetful,
    /// Now and then the second in line goes first.
    Overtakes,
}

thread_local! {
    static BUG: Cell<Bug> = const { Cell::new(Bug::None) };
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

fn is(bug: Bug) -> bool {
    BUG.get() == bug
}

/// One call in `n`.
fn now_and_then(n: u64) -> bool {
    CALLS.set(CALLS.get() + 1);
    CALLS.get().is_multiple_of(n)
}

/// The double of `engine::admission`.
mod admission {
    pub use crate::real_admission::{Bounds, Full};
    use crate::{Bug, is, now_and_then, real_admission};
    use std::time::Duration;

    /// Nobody's.
    const OTHER: u64 = u64::MAX;

    #[derive(Debug)]
    pub struct Admission(real_admission::Admission);

    fn leaver(tenant: u64) -> u64 {
        if is(Bug::TenantLeak) && now_and_then(100) { OTHER } else { tenant }
    }

    impl Admission {
        pub fn new(bounds: Bounds) -> Self {
            Self(real_admission::Admission::new(bounds))
        }

        pub fn places(&self, priority: i32) -> usize {
            self.0.places(priority)
        }

        pub fn enter(&mut self, priority: i32, tenant: u64) -> Result<(), Full> {
            self.0.enter(priority, tenant)
        }

        pub fn leave(&mut self, tenant: u64) {
            self.0.leave(leaver(tenant));
        }

        pub fn admitted(&mut self, tenant: u64, now: Duration) {
            self.0.admitted(leaver(tenant), now);
        }

        pub fn waiting(&self) -> usize {
            self.0.waiting()
        }
    }
}

/// The double of `engine::scheduler`.
mod scheduler {
    use crate::blocks::GroupKind;
    pub use crate::real_scheduler::{Chunk, ChunkOutputs, Fork, Limits, Plan, Slot};
    use crate::{Bug, is, now_and_then, real_scheduler};
    use std::ops::{Deref, DerefMut};

    #[derive(Debug)]
    pub struct Scheduler(real_scheduler::Scheduler);

    impl Scheduler {
        pub fn with_groups(limits: Limits, blocks: usize, groups: Vec<GroupKind>) -> Self {
            Self(real_scheduler::Scheduler::with_groups(limits, blocks, groups))
        }

        pub fn accept(&mut self, slot: Slot, position: usize, token: u32) -> bool {
            let drawn = self.sequence(slot).and_then(|sequence| sequence.tokens().get(position).copied());
            // Another guess is taken for what was drawn: the row behind it is one of another text.
            let wrong = drawn.filter(|&drawn| drawn != token && is(Bug::OneDraftTooMany) && now_and_then(20));
            self.0.accept(slot, position, wrong.unwrap_or(token))
        }
    }

    impl Deref for Scheduler {
        type Target = real_scheduler::Scheduler;

        fn deref(&self) -> &Self::Target {
            &self.0
        }
    }

    impl DerefMut for Scheduler {
        fn deref_mut(&mut self) -> &mut Self::Target {
            &mut self.0
        }
    }
}

/// The double of `engine::pool`.
mod pool {
    use crate::events::Update;
    pub use crate::real_pool::{BlockId, IntegrityError, Name, TRASH};
    use crate::{Bug, is, now_and_then, real_pool};
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
        ) -> Result<(), IntegrityError> {
            self.real.check_integrity(tables)
        }
    }
}

/// The double of `engine::queue`.
mod queue {
    use crate::integrity::IntegrityError;
    pub use crate::real_queue::{AGED_EVERY, Next, Rank};
    use crate::scheduler::Slot;
    use crate::{Bug, is, now_and_then, real_queue};

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

        pub fn at(&self, rank: Rank) -> Option<Slot> {
            self.0.at(rank)
        }

        pub fn ahead(&self, rank: Rank) -> usize {
            self.0.ahead(rank)
        }

        pub fn check_integrity(&self) -> Result<(), IntegrityError> {
            self.0.check_integrity()
        }

        pub fn next(&self, passed: Option<Rank>) -> Option<Next> {
            let first = self.0.next(passed)?;
            let second = || self.0.next(Some(first.rank));
            let overtakes = is(Bug::Overtakes) && now_and_then(20);
            Some(if overtakes { second().unwrap_or(first) } else { first })
        }

        pub fn admit(&mut self, next: Next) -> Rank {
            let rank = self.0.admit(next);
            if is(Bug::LostPlace) && !next.by_age { self.0.rank(0, 0, 1) } else { rank }
        }
    }
}

/// The first seed with which the storm stops for that reason, and all that is said.
fn find(bug: Bug, reason: &str, seeds: u64) -> Option<(u64, String)> {
    let reason = reason.to_owned();
    let hunt = move || {
        BUG.set(bug);
        CALLS.set(0);
        let mut broken = (0..seeds).filter_map(|seed| Some((seed, storm::run(seed).err()?)));
        broken.find(|(_, broken)| broken.contains(&reason))
    };
    std::thread::spawn(hunt).join().unwrap()
}

/// Each bug, and what the invariant says that is there for it.
const BUGS: [(Bug, &str); 10] = [
    (Bug::Leak, "holders, "),
    (Bug::DoubleFree, "holder"),
    (Bug::StaleName, "is not its own"),
    (Bug::FailedStepIsFound, "is not its own"),
    (Bug::NoCopyOnWrite, "a writable block is shared"),
    (Bug::LostPlace, "a request starves"),
    (Bug::OneDraftTooMany, "a draft counts that was not drawn"),
    (Bug::TenantLeak, "of the tenant"),
    (Bug::Forgetful, "is recomputed"),
    (Bug::Overtakes, "is passed for nothing"),
];

#[test]
fn every_planted_bug_is_found() {
    // What is found is told below, once.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let found = BUGS.map(|(bug, reason)| (bug, reason, find(bug, reason, 200)));
    let clean = find(Bug::None, "", 20);
    std::panic::set_hook(hook);
    for (bug, reason, found) in &found {
        let (seed, broken) = found
            .as_ref()
            .unwrap_or_else(|| panic!("{bug:?} is not found by the invariant that says {reason:?}"));
        println!("{bug:?}: seed {seed}: {broken}");
    }
    assert_eq!(clean, None, "the doubles themselves break nothing");
}
