// SPDX-License-Identifier: Apache-2.0

//! The waiting queue: orders sequences by priority, then by fair share between tenants, then by
//! arrival. Every [`OLDEST_FIRST_EVERY`]th admission takes the oldest sequence instead. A plain
//! value.
//!
//! Fair share is start-time fair queueing. Each priority has a virtual time: the start tag of the
//! sequence admitted last. A new sequence gets as its tag the later of the virtual time and the end
//! of its tenant's earlier requests. Its cost, an estimate in tokens, then moves its tenant's end.
//! A tag never changes, so a sorted map holds the order.
//!
//! Bounds. `tests/engine/waiting_queue.rs` checks 1, 3 and 4, the simulation checks 1, 2 and 3.
//!
//! 1. A sequence that enters while `m` older sequences are in the engine is admitted after at most
//!    `OLDEST_FIRST_EVERY * (m + 1)` admissions. Each preemption of an older sequence, and each
//!    return of an older one from a pause, adds one turn. Later arrivals of any priority or tenant
//!    do not matter.
//! 2. A sequence that the current step cannot use is skipped: it needs a scoring row and none is
//!    left, or its prefix is still being computed. Bound 1 still holds for it. On the oldest-first
//!    turn no sequence is skipped.
//! 3. A tenant's first request, and any request of a tenant within its share, is overtaken by at
//!    most one request of each other tenant of its priority. Oldest-first admissions, preempted
//!    or paused sequences and skips by bound 2 do not count.
//! 4. Take two tenants of one priority that always have waiting requests. In admitted work, one is
//!    ahead by at most its largest request and its oldest-first admissions, if the other is not
//!    skipped by bound 2.

use crate::schedule::sequence_id::SequenceId;
use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;

/// One admission in this many takes the oldest waiting sequence.
pub const OLDEST_FIRST_EVERY: u32 = 8;

/// When a priority remembers this many tenants more than twice its waiting sequences, it forgets
/// tenants whose end has passed.
const TENANTS_SPARE: usize = 64;

/// Position in the order of service: lower is served first. A sequence keeps its rank through
/// preemption, so the first sequence always makes progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServiceRank {
    class: ServiceClass,
    tag: u64,
    arrival: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ServiceClass {
    /// Admitted as the oldest. No younger sequence preempts it.
    Promoted,
    Priority(i32),
}

impl ServiceRank {
    /// Lower arrived earlier. Unique.
    pub fn arrival(&self) -> u64 {
        self.arrival
    }

    /// Whether the sequence was admitted as the oldest.
    pub fn is_promoted(&self) -> bool {
        self.class == ServiceClass::Promoted
    }
}

/// The queue's orders do not list the same sequences: a bug, never a consequence of input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the waiting queue lists {by_rank} sequences by rank, {by_arrival} by arrival, {by_priority} by priority"
)]
pub struct QueueIntegrityError {
    by_rank: usize,
    by_arrival: usize,
    by_priority: usize,
}

#[derive(Debug, Default)]
pub struct WaitingQueue {
    by_rank: BTreeMap<ServiceRank, SequenceId>,
    by_arrival: BTreeMap<u64, ServiceRank>,
    shares: BTreeMap<i32, FairShare>,
    /// Virtual time at which a priority without waiting sequences starts. It is later than every
    /// tag given so far, so a new sequence never ranks before a running one.
    start: u64,
    arrivals: u64,
    /// Admissions since the last oldest-first admission.
    admissions_since_oldest: u32,
}

/// Fair share of one priority while sequences of it wait.
#[derive(Debug, Default)]
struct FairShare {
    waiting: usize,
    virtual_time: u64,
    /// Virtual time at which the requests of each tenant end.
    tenant_ends: HashMap<u64, u64>,
}

/// The sequence to admit next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextSequence {
    pub rank: ServiceRank,
    pub sequence_id: SequenceId,
    /// The sequence is next because it is the oldest. It stays next until it is admitted.
    pub is_oldest_turn: bool,
}

impl WaitingQueue {
    pub fn len(&self) -> usize {
        self.by_rank.len()
    }

    pub fn is_empty(&self) -> bool {
        self.by_rank.is_empty()
    }

    /// Gives a rank to a new sequence of `cost` tokens. The caller then calls
    /// [`enter`](Self::enter).
    pub fn rank(&mut self, priority: i32, tenant: u64, cost: u64) -> ServiceRank {
        let shares = self.fair_share_of(priority);
        let end = shares.tenant_ends.entry(tenant).or_default();
        let tag = shares.virtual_time.max(*end);
        *end = tag.saturating_add(cost.max(1));
        if shares.tenant_ends.len() > 2 * shares.waiting + TENANTS_SPARE {
            shares.tenant_ends.retain(|_, end| *end > shares.virtual_time);
        }
        self.arrivals += 1;
        ServiceRank { class: ServiceClass::Priority(priority), tag, arrival: self.arrivals }
    }

    /// A rank right behind this one, for a sequence that continues the same request.
    pub fn rank_behind(&mut self, rank: ServiceRank) -> ServiceRank {
        self.arrivals += 1;
        ServiceRank { arrival: self.arrivals, ..rank }
    }

    fn fair_share_of(&mut self, priority: i32) -> &mut FairShare {
        let virtual_time = self.start;
        self.shares.entry(priority).or_insert_with(|| FairShare { virtual_time, ..FairShare::default() })
    }

    pub fn enter(&mut self, rank: ServiceRank, sequence_id: SequenceId) {
        self.by_rank.insert(rank, sequence_id);
        self.by_arrival.insert(rank.arrival, rank);
        if let ServiceClass::Priority(priority) = rank.class {
            self.fair_share_of(priority).waiting += 1;
        }
    }

    /// Removes a sequence that was not admitted: it has ended, or is paused.
    pub fn leave(&mut self, rank: ServiceRank) {
        self.by_rank.remove(&rank);
        self.by_arrival.remove(&rank.arrival);
        if let ServiceClass::Priority(priority) = rank.class {
            let Some(shares) = self.shares.get_mut(&priority).filter(|shares| shares.waiting > 0) else {
                panic!("{rank:?} leaves a priority in which no sequence waits")
            };
            shares.waiting -= 1;
            if shares.waiting == 0 {
                // Without waiting sequences there is no share to keep.
                let last = shares.tenant_ends.values().copied().max().unwrap_or(0);
                self.start = self.start.max(shares.virtual_time).max(last);
                self.shares.remove(&priority);
            }
        }
    }

    /// The waiting sequence with this rank.
    pub fn at(&self, rank: ServiceRank) -> Option<SequenceId> {
        self.by_rank.get(&rank).copied()
    }

    /// Compares both orders and the count of each priority.
    pub fn check_integrity(&self) -> Result<(), QueueIntegrityError> {
        let (by_rank, by_arrival) = (self.by_rank.len(), self.by_arrival.len());
        let same = self
            .by_arrival
            .iter()
            .all(|(&arrival, rank)| rank.arrival == arrival && self.by_rank.contains_key(rank));
        let mut classes = BTreeMap::new();
        for rank in self.by_rank.keys() {
            if let ServiceClass::Priority(priority) = rank.class {
                *classes.entry(priority).or_insert(0_usize) += 1;
            }
        }
        let by_priority = self.shares.values().map(|shares| shares.waiting).sum();
        let counts = self.shares.iter().map(|(&priority, shares)| (priority, shares.waiting));
        let counts = counts.filter(|&(_, waiting)| waiting > 0);
        match same && by_rank == by_arrival && counts.eq(classes) {
            true => Ok(()),
            false => Err(QueueIntegrityError { by_rank, by_arrival, by_priority }),
        }
    }

    /// Sequences with a lower rank.
    pub fn ahead(&self, rank: ServiceRank) -> usize {
        self.by_rank.range(..rank).count()
    }

    /// The sequence to admit next. In order of rank, it is the first behind `skipped`: the
    /// sequences up to that rank cannot use the current step.
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

    /// Removes an admitted sequence and returns its rank from now on.
    pub fn admit(&mut self, next: NextSequence) -> ServiceRank {
        let NextSequence { mut rank, is_oldest_turn, .. } = next;
        if is_oldest_turn {
            self.admissions_since_oldest = 0;
        } else {
            self.admissions_since_oldest = (self.admissions_since_oldest + 1).min(OLDEST_FIRST_EVERY - 1);
            if let ServiceClass::Priority(priority) = rank.class
                && let Some(shares) = self.shares.get_mut(&priority)
            {
                shares.virtual_time = shares.virtual_time.max(rank.tag);
            }
        }
        self.leave(rank);
        if is_oldest_turn {
            rank.class = ServiceClass::Promoted;
            rank.tag = 0;
        }
        rank
    }
}
