//! Who waits, and who is next: by priority, then fairly between tenants, then in order of arrival; and every
//! [`OLDEST_FIRST_EVERY`]th time whoever arrived first. A plain value.
//!
//! Fairness is start-time fair queueing. Each priority has a virtual time, the tag of the one that was last admitted; a
//! newcomer's tag is that time or, if later, where its tenant's earlier requests end; its cost, an estimate in tokens,
//! moves its tenant's end. A tag never changes, so the order of those who wait is a sorted map.
//!
//! QueueLimits (tests/queue.rs holds the first and the last two, the simulation the first three):
//! - Whoever enters while `m` older ones live is admitted after at most `OLDEST_FIRST_EVERY * (m + 1)` admissions, one more turn
//!   for each time that an older one is preempted meanwhile: whatever priorities and tenants come after it.
//! - Out of this order only those are passed, within the first bound, that the step could not use: to be scored, while rows
//!   with outputs are used up, or waiting for a prefix that a prompt in progress before them computes. The scheduler asks for
//!   [`next`](WaitingQueue::next) behind them; on its turn by age nobody is passed.
//! - The first request of a tenant, and any of one that has had no more than its share, is passed by at most one request of
//!   each other tenant of its priority: beside those that go by age, come again after a preemption, or were passed before,
//!   and while it is passed itself as above.
//! - Of two tenants of one priority that always wait, one is ahead of the other in work admitted since both began by at most
//!   its largest request and what it was admitted by age, if none of the other's is passed as above.

use crate::schedule::sequence_id::SequenceId;
use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;

/// Admissions of which one goes by age alone.
pub const OLDEST_FIRST_EVERY: u32 = 8;

/// Tenants that are remembered beyond twice the number of waiting requests before those without a lead are forgotten.
const TENANTS_SPARE: usize = 64;

/// Place in the order of service: lower first. Kept through preemption, so the first always moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServiceRank {
    class: PriorityClass,
    tag: u64,
    arrival: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum PriorityClass {
    /// Admitted by age: nothing younger takes its blocks again.
    Promoted,
    Priority(i32),
}

impl ServiceRank {
    /// Lower arrived earlier; unique.
    pub fn arrival(&self) -> u64 {
        self.arrival
    }

    /// Admitted by age.
    pub fn is_promoted(&self) -> bool {
        self.class == PriorityClass::Promoted
    }
}

/// The queue's orders do not list the same sequences: a bug, never a consequence of input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the queue's orders and counts differ: {by_rank} by rank, {is_oldest_turn} by age, {shared} by priority"
)]
pub struct QueueIntegrityError {
    by_rank: usize,
    is_oldest_turn: usize,
    shared: usize,
}

#[derive(Debug, Default)]
pub struct WaitingQueue {
    by_rank: BTreeMap<ServiceRank, SequenceId>,
    by_arrival: BTreeMap<u64, ServiceRank>,
    shares: BTreeMap<i32, FairShare>,
    /// Where the virtual time of a priority begins of which nobody waits: behind every tag that was given, so that a
    /// newcomer never comes before those that run.
    start: u64,
    arrivals: u64,
    /// Admissions since the last one by age.
    admissions_since_oldest: u32,
}

/// Virtual time of one priority while somebody of it waits.
#[derive(Debug, Default)]
struct FairShare {
    waiting: usize,
    virtual_time: u64,
    /// Where the requests of each tenant end.
    tenant_ends: HashMap<u64, u64>,
}

/// Who is next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextSequence {
    pub rank: ServiceRank,
    pub sequence_id: SequenceId,
    /// It is its turn by age alone: it keeps that until it is admitted.
    pub is_oldest_turn: bool,
}

impl WaitingQueue {
    pub fn len(&self) -> usize {
        self.by_rank.len()
    }

    pub fn is_empty(&self) -> bool {
        self.by_rank.is_empty()
    }

    /// A newcomer of `cost` tokens, which is to [`enter`](Self::enter).
    pub fn rank(&mut self, priority: i32, tenant: u64, cost: u64) -> ServiceRank {
        let shares = self.fair_share_of(priority);
        let end = shares.tenant_ends.entry(tenant).or_default();
        let tag = shares.virtual_time.max(*end);
        *end = tag.saturating_add(cost.max(1));
        if shares.tenant_ends.len() > 2 * shares.waiting + TENANTS_SPARE {
            shares.tenant_ends.retain(|_, end| *end > shares.virtual_time);
        }
        self.arrivals += 1;
        ServiceRank { class: PriorityClass::Priority(priority), tag, arrival: self.arrivals }
    }

    fn fair_share_of(&mut self, priority: i32) -> &mut FairShare {
        let virtual_time = self.start;
        self.shares.entry(priority).or_insert_with(|| FairShare { virtual_time, ..FairShare::default() })
    }

    pub fn enter(&mut self, rank: ServiceRank, sequence_id: SequenceId) {
        self.by_rank.insert(rank, sequence_id);
        self.by_arrival.insert(rank.arrival, rank);
        if let PriorityClass::Priority(priority) = rank.class {
            self.fair_share_of(priority).waiting += 1;
        }
    }

    /// Gone without having been admitted.
    pub fn leave(&mut self, rank: ServiceRank) {
        self.by_rank.remove(&rank);
        self.by_arrival.remove(&rank.arrival);
        if let PriorityClass::Priority(priority) = rank.class
            && let Some(shares) = self.shares.get_mut(&priority)
        {
            shares.waiting -= 1;
            if shares.waiting == 0 {
                // Nobody waits: there is nothing to be fair about.
                let last = shares.tenant_ends.values().copied().max().unwrap_or(0);
                self.start = self.start.max(shares.virtual_time).max(last);
                self.shares.remove(&priority);
            }
        }
    }

    /// Who stands there.
    pub fn at(&self, rank: ServiceRank) -> Option<SequenceId> {
        self.by_rank.get(&rank).copied()
    }

    /// Compares the two orders and the counts of each priority.
    pub fn check_integrity(&self) -> Result<(), QueueIntegrityError> {
        let (by_rank, is_oldest_turn) = (self.by_rank.len(), self.by_arrival.len());
        let same = self
            .by_arrival
            .iter()
            .all(|(&arrival, rank)| rank.arrival == arrival && self.by_rank.contains_key(rank));
        let mut classes = BTreeMap::new();
        for rank in self.by_rank.keys() {
            if let PriorityClass::Priority(priority) = rank.class {
                *classes.entry(priority).or_insert(0_usize) += 1;
            }
        }
        let shared = self.shares.values().map(|shares| shares.waiting).sum();
        let counts = self.shares.iter().map(|(&priority, shares)| (priority, shares.waiting));
        let counts = counts.filter(|&(_, waiting)| waiting > 0);
        match same && by_rank == is_oldest_turn && counts.eq(classes) {
            true => Ok(()),
            false => Err(QueueIntegrityError { by_rank, is_oldest_turn, shared }),
        }
    }

    /// How many stand before this one.
    pub fn ahead(&self, rank: ServiceRank) -> usize {
        self.by_rank.range(..rank).count()
    }

    /// Who would be admitted next; by rank, one behind `passed`: those up to it cannot be admitted in this step and are not
    /// in the way of others.
    pub fn next(&self, skipped: Option<ServiceRank>) -> Option<NextSequence> {
        if self.admissions_since_oldest + 1 >= OLDEST_FIRST_EVERY {
            let (_, &rank) = self.by_arrival.first_key_value()?;
            return self.by_rank.get(&rank).map(|&sequence_id| NextSequence {
                rank,
                sequence_id,
                is_oldest_turn: true,
            });
        }
        let from = skipped.map_or(Bound::Unbounded, Bound::Excluded);
        let (&rank, &sequence_id) = self.by_rank.range((from, Bound::Unbounded)).next()?;
        Some(NextSequence { rank, sequence_id, is_oldest_turn: false })
    }

    /// It leaves; the rank that it has from now on.
    pub fn admit(&mut self, next: NextSequence) -> ServiceRank {
        let NextSequence { mut rank, is_oldest_turn, .. } = next;
        if is_oldest_turn {
            self.admissions_since_oldest = 0;
        } else {
            self.admissions_since_oldest = (self.admissions_since_oldest + 1).min(OLDEST_FIRST_EVERY - 1);
            if let PriorityClass::Priority(priority) = rank.class
                && let Some(shares) = self.shares.get_mut(&priority)
            {
                shares.virtual_time = shares.virtual_time.max(rank.tag);
            }
        }
        self.leave(rank);
        if is_oldest_turn {
            rank.class = PriorityClass::Promoted;
            rank.tag = 0;
        }
        rank
    }
}
