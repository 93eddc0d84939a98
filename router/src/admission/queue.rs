//! Those of one class that wait for one model: the tenant that holds the fewest places comes first, of equals the one
//! whose last turn is longest ago; a tenant's own requests by priority, then in order of arrival.
//!
//! A stream holds its place for as long as it likes, so places are what is shared, not admissions: a tenant of long
//! streams gets no more of a worker than one of short ones.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::Tenant;

/// A tenant's requests come in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    pub(super) priority: i32,
    /// Lower came earlier; unique in the line.
    pub(super) arrival: u64,
}

#[derive(Debug, Default)]
pub(super) struct Queue {
    tenants: HashMap<Tenant, Share>,
    /// Tenants that wait, the next one first.
    order: BTreeSet<(Turn, Tenant)>,
    /// Requests that wait.
    waiting: u32,
    /// Places that are held.
    held: u32,
    turns: u64,
}

#[derive(Debug, Default)]
struct Share {
    waiting: BTreeMap<Rank, ()>,
    turn: Turn,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Turn {
    /// Places.
    held: u32,
    /// When it came to wait or was last admitted, whichever is later.
    since: u64,
}

impl Queue {
    pub(super) fn waiting(&self) -> u32 {
        self.waiting
    }

    pub(super) fn held(&self) -> u32 {
        self.held
    }

    /// Tenants that wait.
    pub(super) fn tenants(&self) -> u32 {
        self.order.len() as u32
    }

    pub(super) fn next(&self) -> Option<Rank> {
        let (_, tenant) = self.order.first()?;
        self.tenants.get(tenant)?.waiting.first_key_value().map(|(&rank, ())| rank)
    }

    pub(super) fn enter(&mut self, tenant: &Tenant, rank: Rank) {
        self.turns += 1;
        let now = self.turns;
        self.change(tenant, |share| {
            if share.waiting.is_empty() {
                share.turn.since = now;
            }
            share.waiting.insert(rank, ());
        });
        self.waiting += 1;
    }

    /// Gone without having been admitted.
    pub(super) fn leave(&mut self, tenant: &Tenant, rank: Rank) {
        self.change(tenant, |share| share.waiting.remove(&rank));
        self.waiting -= 1;
    }

    pub(super) fn admit(&mut self, tenant: &Tenant, rank: Rank, places: u32) {
        self.leave(tenant, rank);
        self.turns += 1;
        let now = self.turns;
        self.change(tenant, |share| {
            share.turn = Turn { held: share.turn.held + places, since: now };
        });
        self.held += places;
    }

    /// A place was given back.
    pub(super) fn release(&mut self, tenant: &Tenant) {
        self.change(tenant, |share| share.turn.held -= 1);
        self.held -= 1;
    }

    /// Keeps the order true to the tenant's share, and forgets who neither waits nor holds anything.
    fn change<T>(&mut self, tenant: &Tenant, change: impl FnOnce(&mut Share) -> T) {
        let share = self.tenants.entry(tenant.clone()).or_default();
        if !share.waiting.is_empty() {
            self.order.remove(&(share.turn, tenant.clone()));
        }
        change(share);
        if !share.waiting.is_empty() {
            self.order.insert((share.turn, tenant.clone()));
        } else if share.turn.held == 0 {
            self.tenants.remove(tenant);
        }
    }
}
