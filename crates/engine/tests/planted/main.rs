// SPDX-License-Identifier: Apache-2.0

//! Planted bugs: the simulation must find each of ten bugs, through the invariant that exists for
//! it.
//!
//! Block tables, sequences and drafts are the engine's own sources, compiled a second time over
//! doubles of admission control, block pool, waiting queue and scheduler. A double forwards every
//! call to the real type, except where its planted bug acts. docs/decisions/0007 describes the
//! bugs.

#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]
#![expect(dead_code, unreachable_pub, reason = "the engine's sources offer more than the storm asks for")]

#[path = "../../src/draft/mod.rs"]
mod draft;
mod kv;
mod schedule;
#[path = "../engine/storm/mod.rs"]
mod storm;

use std::cell::Cell;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    /// One release in a thousand is lost.
    Leak,
    /// A block with two users is free after the first release.
    DoubleFree,
    /// A lookup still finds a reallocated block by its old key.
    StaleName,
    /// Blocks of a failed step stay in the prefix cache.
    FailedStepIsFound,
    /// A fork writes into a shared block.
    NoCopyOnWrite,
    /// A preempted sequence goes to the end of the queue.
    LostPlace,
    /// Sometimes a draft token after the last right one is accepted.
    OneDraftTooMany,
    /// Sometimes a tenant's waiting count is not reduced when its request leaves the queue.
    TenantLeak,
    /// Lookups miss some cached blocks, which are then recomputed.
    Forgetful,
    /// Sometimes the second sequence in the queue is admitted first.
    Overtakes,
}

thread_local! {
    static BUG: Cell<Bug> = const { Cell::new(Bug::None) };
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

fn is(bug: Bug) -> bool {
    BUG.get() == bug
}

/// True for one call in `n`.
fn now_and_then(n: u64) -> bool {
    CALLS.set(CALLS.get() + 1);
    CALLS.get().is_multiple_of(n)
}

/// The first seed for which the simulation stops with this reason, and its message.
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

/// Each bug, and the message of the invariant that finds it.
const BUGS: [(Bug, &str); 10] = [
    (Bug::Leak, "has reference count"),
    (Bug::DoubleFree, "reference count"),
    (Bug::StaleName, "is not its own"),
    (Bug::FailedStepIsFound, "is not its own"),
    (Bug::NoCopyOnWrite, "a writable block is shared"),
    (Bug::LostPlace, "a request starves"),
    (Bug::OneDraftTooMany, "a draft counts that was not drawn"),
    (Bug::TenantLeak, "leaves, but none waits"),
    (Bug::Forgetful, "is recomputed"),
    (Bug::Overtakes, "is passed for nothing"),
];

#[test]
fn every_planted_bug_is_found() {
    // The test prints each finding once, below.
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
