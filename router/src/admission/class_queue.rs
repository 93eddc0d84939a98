// SPDX-License-Identifier: Apache-2.0

//! Fair-share queue of the requests of one priority class that wait for one model.
//!
//! 1. The tenant that holds the fewest permits comes first.
//! 2. Among tenants with equal permits, the one whose last turn is longest ago comes first.
//! 3. Requests of one tenant are ordered by priority, then by arrival.
//!
//! Tenants share permits and not admissions, because a stream holds its permit for as long as it
//! runs. So a tenant with long streams gets no more of a worker than a tenant with short ones.

use std::collections::{BTreeSet, HashMap};

use super::request::Tenant;

/// The order of the requests of one tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RequestOrder {
    pub(super) priority: i32,
    /// Lower arrived earlier. Unique within a model.
    pub(super) arrival: u64,
}

#[derive(Debug, Default)]
pub(super) struct ClassQueue {
    tenants: HashMap<Tenant, TenantShare>,
    /// Tenants with waiting requests, the next one first.
    order: BTreeSet<(ShareOrder, Tenant)>,
    waiting_requests: u32,
    held_permits: u32,
    /// Counts arrivals and admissions, as a clock for [`ShareOrder::since`].
    turns: u64,
}

#[derive(Debug, Default)]
struct TenantShare {
    waiting: BTreeSet<RequestOrder>,
    order: ShareOrder,
}

/// The order of tenants: the smallest comes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct ShareOrder {
    held_permits: u32,
    /// Turn at which the tenant began to wait or was last admitted, whichever is later.
    since: u64,
}

impl ClassQueue {
    pub(super) fn waiting_requests(&self) -> u32 {
        self.waiting_requests
    }

    pub(super) fn held_permits(&self) -> u32 {
        self.held_permits
    }

    pub(super) fn waiting_tenants(&self) -> u32 {
        self.order.len() as u32
    }

    /// The request that is admitted next.
    pub(super) fn first(&self) -> Option<RequestOrder> {
        let (_, tenant) = self.order.first()?;
        self.tenants.get(tenant)?.waiting.first().copied()
    }

    pub(super) fn push(&mut self, tenant: &Tenant, request: RequestOrder) {
        self.turns += 1;
        let now = self.turns;
        self.update_share(tenant, |share| {
            if share.waiting.is_empty() {
                share.order.since = now;
            }
            share.waiting.insert(request);
        });
        self.waiting_requests += 1;
    }

    /// Removes a request that was not admitted.
    pub(super) fn remove(&mut self, tenant: &Tenant, request: RequestOrder) {
        self.update_share(tenant, |share| share.waiting.remove(&request));
        self.waiting_requests -= 1;
    }

    /// Removes a request and gives its tenant `permits`.
    pub(super) fn admit(&mut self, tenant: &Tenant, request: RequestOrder, permits: u32) {
        self.remove(tenant, request);
        self.turns += 1;
        let now = self.turns;
        self.update_share(tenant, |share| {
            share.order = ShareOrder { held_permits: share.order.held_permits + permits, since: now };
        });
        self.held_permits += permits;
    }

    /// Takes back one permit of the tenant.
    pub(super) fn release_permit(&mut self, tenant: &Tenant) {
        self.update_share(tenant, |share| share.order.held_permits -= 1);
        self.held_permits -= 1;
    }

    /// Keeps `order` in step with the tenant's share. Removes a tenant without requests and
    /// permits.
    fn update_share<T>(&mut self, tenant: &Tenant, update: impl FnOnce(&mut TenantShare) -> T) {
        let share = self.tenants.entry(tenant.clone()).or_default();
        if !share.waiting.is_empty() {
            self.order.remove(&(share.order, tenant.clone()));
        }
        update(share);
        if !share.waiting.is_empty() {
            self.order.insert((share.order, tenant.clone()));
        } else if share.order.held_permits == 0 {
            self.tenants.remove(tenant);
        }
    }
}
