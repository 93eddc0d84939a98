//! Who waits, and who is next: by priority, then fairly between tenants, then in order of arrival; and every
//! [`AGED_EVERY`]th time whoever arrived first. A plain value.
//!
//! Fairness is start-time fair queueing. Each priority has a virtual time, the tag of the one that was last admitted; a
//! newcomer's tag is that time or, if later, where its tenant's earlier requests end; its cost, an estimate in tokens,
//! moves its tenant's end. A tag never changes, so the order of those who wait is a sorted map.
//!
//! Bounds (tests/queue.rs holds the first and the last two, the simulation the first three):
//! - Whoever enters while `m` older ones live is admitted after at most `AGED_EVERY * (m + 1)` admissions, one more turn
//!   for each time that an older one is preempted meanwhile: whatever priorities and tenants come after it.
//! - Out of this order only those are passed, within the first bound, that the step could not use: to be scored, while rows
//!   with outputs are used up, or waiting for a prefix that a prompt in progress before them computes. The scheduler asks for
//!   [`next`](Queue::next) behind them; on its turn by age nobody is passed.
//! - The first request of a tenant, and any of one that has had no more than its share, is passed by at most one request of
//!   each other tenant of its priority: beside those that go by age, come again after a preemption, or were passed before,
//!   and while it is passed itself as above.
//! - Of two tenants of one priority that always wait, one is ahead of the other in work admitted since both began by at most
//!   its largest request and what it was admitted by age, if none of the other's is passed as above.

use crate::schedule::sequence_id::Slot;
use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;

/// Admissions of which one goes by age alone.
pub const AGED_EVERY: u32 = 8;

/// Tenants that are remembered beyond twice the number of waiting requests before those without a lead are forgotten.
const TENANTS_SPARE: usize = 64;

/// Place in the order of service: lower first. Kept through preemption, so the first always moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    class: Class,
    tag: u64,
    arrival: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Class {
    /// Admitted by age: nothing younger takes its blocks again.
    Aged,
    Priority(i32),
}

impl Rank {
    /// Lower arrived earlier; unique.
    pub fn arrival(&self) -> u64 {
        self.arrival
    }

    /// Admitted by age.
    pub fn is_aged(&self) -> bool {
        self.class == Class::Aged
    }
}

/// The queue's orders do not list the same sequences: a bug, never a consequence of input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the queue's orders and counts differ: {by_rank} by rank, {by_age} by age, {shared} by priority")]
pub struct QueueIntegrityError {
    by_rank: usize,
    by_age: usize,
    shared: usize,
}

#[derive(Debug, Default)]
pub struct Queue {
    order: BTreeMap<Rank, Slot>,
    by_age: BTreeMap<u64, Rank>,
    shares: BTreeMap<i32, Shares>,
    /// Where the virtual time of a priority begins of which nobody waits: behind every tag that was given, so that a
    /// newcomer never comes before those that run.
    start: u64,
    arrivals: u64,
    /// Admissions since the last one by age.
    turn: u32,
}

/// Virtual time of one priority while somebody of it waits.
#[derive(Debug, Default)]
struct Shares {
    waiting: usize,
    now: u64,
    /// Where the requests of each tenant end.
    ends: HashMap<u64, u64>,
}

/// Who is next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Next {
    pub rank: Rank,
    pub slot: Slot,
    /// It is its turn by age alone: it keeps that until it is admitted.
    pub by_age: bool,
}

impl Queue {
    pub fn len(&self) -> usize {
        self.order.len()
    }

    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// A newcomer of `cost` tokens, which is to [`enter`](Self::enter).
    pub fn rank(&mut self, priority: i32, tenant: u64, cost: u64) -> Rank {
        let shares = self.shares_of(priority);
        let end = shares.ends.entry(tenant).or_default();
        let tag = shares.now.max(*end);
        *end = tag.saturating_add(cost.max(1));
        if shares.ends.len() > 2 * shares.waiting + TENANTS_SPARE {
            shares.ends.retain(|_, end| *end > shares.now);
        }
        self.arrivals += 1;
        Rank { class: Class::Priority(priority), tag, arrival: self.arrivals }
    }

    fn shares_of(&mut self, priority: i32) -> &mut Shares {
        let now = self.start;
        self.shares.entry(priority).or_insert_with(|| Shares { now, ..Shares::default() })
    }

    pub fn enter(&mut self, rank: Rank, slot: Slot) {
        self.order.insert(rank, slot);
        self.by_age.insert(rank.arrival, rank);
        if let Class::Priority(priority) = rank.class {
            self.shares_of(priority).waiting += 1;
        }
    }

    /// Gone without having been admitted.
    pub fn leave(&mut self, rank: Rank) {
        self.order.remove(&rank);
        self.by_age.remove(&rank.arrival);
        if let Class::Priority(priority) = rank.class
            && let Some(shares) = self.shares.get_mut(&priority)
        {
            shares.waiting -= 1;
            if shares.waiting == 0 {
                // Nobody waits: there is nothing to be fair about.
                let last = shares.ends.values().copied().max().unwrap_or(0);
                self.start = self.start.max(shares.now).max(last);
                self.shares.remove(&priority);
            }
        }
    }

    /// Who stands there.
    pub fn at(&self, rank: Rank) -> Option<Slot> {
        self.order.get(&rank).copied()
    }

    /// Compares the two orders and the counts of each priority.
    pub fn check_integrity(&self) -> Result<(), QueueIntegrityError> {
        let (by_rank, by_age) = (self.order.len(), self.by_age.len());
        let same = self
            .by_age
            .iter()
            .all(|(&arrival, rank)| rank.arrival == arrival && self.order.contains_key(rank));
        let mut classes = BTreeMap::new();
        for rank in self.order.keys() {
            if let Class::Priority(priority) = rank.class {
                *classes.entry(priority).or_insert(0_usize) += 1;
            }
        }
        let shared = self.shares.values().map(|shares| shares.waiting).sum();
        let counts = self.shares.iter().map(|(&priority, shares)| (priority, shares.waiting));
        let counts = counts.filter(|&(_, waiting)| waiting > 0);
        match same && by_rank == by_age && counts.eq(classes) {
            true => Ok(()),
            false => Err(QueueIntegrityError { by_rank, by_age, shared }),
        }
    }

    /// How many stand before this one.
    pub fn ahead(&self, rank: Rank) -> usize {
        self.order.range(..rank).count()
    }

    /// Who would be admitted next; by rank, one behind `passed`: those up to it cannot be admitted in this step and are not
    /// in the way of others.
    pub fn next(&self, passed: Option<Rank>) -> Option<Next> {
        if self.turn + 1 >= AGED_EVERY {
            let (_, &rank) = self.by_age.first_key_value()?;
            return self.order.get(&rank).map(|&slot| Next { rank, slot, by_age: true });
        }
        let from = passed.map_or(Bound::Unbounded, Bound::Excluded);
        let (&rank, &slot) = self.order.range((from, Bound::Unbounded)).next()?;
        Some(Next { rank, slot, by_age: false })
    }

    /// It leaves; the rank that it has from now on.
    pub fn admit(&mut self, next: Next) -> Rank {
        let Next { mut rank, by_age, .. } = next;
        if by_age {
            self.turn = 0;
        } else {
            self.turn = (self.turn + 1).min(AGED_EVERY - 1);
            if let Class::Priority(priority) = rank.class
                && let Some(shares) = self.shares.get_mut(&priority)
            {
                shares.now = shares.now.max(rank.tag);
            }
        }
        self.leave(rank);
        if by_age {
            rank.class = Class::Aged;
            rank.tag = 0;
        }
        rank
    }
}
