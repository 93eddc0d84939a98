//! The storm finds bugs: ten are planted, one at a time, and each is found, by the invariant that is there for it.
//!
//! Blocks, sequences and drafts are the engine's own sources, compiled here once more over doubles of admission, pool, queue
//! and scheduler, which stand on the engine's own too. A double passes every call on, except the one that its bug is about.
//! docs/decisions/0007 describes them.

#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]
#![expect(dead_code, unreachable_pub, reason = "the engine's sources offer more than the storm asks for")]

#[path = "../src/draft/mod.rs"]
mod draft;
#[path = "planted/kv.rs"]
mod kv;
#[path = "planted/schedule.rs"]
mod schedule;
mod storm;

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
