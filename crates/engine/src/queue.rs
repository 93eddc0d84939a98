//! Who waits, and who is next: by priority, then fairly between tenants, then in order of arrival; and every
//! [`AGED_EVERY`]th time whoever arrived first. A plain value.
//!
//! Fairness is start-time fair queueing. Each priority has a virtual time, the tag of the one that was last admitted; a
//! newcomer's tag is that time or, if later, where its tenant's earlier requests end; its cost, an estimate in tokens,
//! moves its tenant's end. A tag never changes, so the order of those who wait is a sorted map.
//!
//! Bounds, in admissions (tests/queue.rs and the simulation hold them):
//! - Whoever enters while `m` older ones live is admitted after at most `AGED_EVERY * (m + 1)` admissions, one more turn
//!   for each time that an older one is preempted meanwhile: whatever priorities and tenants come after it.
//! - Between turns of age, a tenant without other requests is passed by at most one request of each other tenant of its
//!   priority that waits or arrives; of two tenants that always wait, the admitted work differs by at most the largest
//!   request of each.

use crate::scheduler::Slot;
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

/// Those who could not be admitted in this step and are not in the way of others.
#[derive(Clone, Copy, Debug, Default)]
pub struct Passed {
    by_age: Option<u64>,
    by_rank: Option<Rank>,
}

/// Who is next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Next {
    pub rank: Rank,
    pub slot: Slot,
    by_age: bool,
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

    /// How many stand before this one.
    pub fn ahead(&self, rank: Rank) -> usize {
        self.order.range(..rank).count()
    }

    /// Who would be admitted next, without those that were passed.
    pub fn next(&self, passed: Passed) -> Option<Next> {
        if self.turn + 1 >= AGED_EVERY {
            let from = passed.by_age.map_or(Bound::Unbounded, Bound::Excluded);
            let (_, &rank) = self.by_age.range((from, Bound::Unbounded)).next()?;
            return self.order.get(&rank).map(|&slot| Next { rank, slot, by_age: true });
        }
        let from = passed.by_rank.map_or(Bound::Unbounded, Bound::Excluded);
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

impl Passed {
    pub fn add(&mut self, next: Next) {
        if next.by_age {
            self.by_age = Some(next.rank.arrival);
        } else {
            self.by_rank = Some(next.rank);
        }
    }
}
