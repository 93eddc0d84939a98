// SPDX-License-Identifier: Apache-2.0

//! Admission control: bounds the waiting queue as a whole, per tenant and per priority, and
//! estimates when a refused client should retry. A plain value that counts requests waiting for
//! their first admission.

use std::collections::HashMap;
use std::time::Duration;

use retry_after::{Backlog, RetryAfterEstimator};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLimits {
    /// Most waiting requests when a request of ordinary priority (0) arrives.
    pub queue_max: usize,
    /// Most waiting requests of one tenant.
    pub tenant_queue_max: usize,
}

/// Capacity for requests of lower priority (above 0) and of higher priority (below 0), in eighths
/// of `queue_max`. The last eighth is thus reserved for the next higher priority.
const LOW_EIGHTHS: usize = 7;
const HIGH_EIGHTHS: usize = 9;

/// Capacity for one tenant, in eighths of `queue_max`.
const TENANT_EIGHTHS: usize = 6;

impl QueueLimits {
    pub fn for_queue(queue_max: usize) -> Self {
        Self { queue_max, tenant_queue_max: eighths(queue_max, TENANT_EIGHTHS) }
    }

    /// Most waiting requests, of any priority, when a request of this priority arrives.
    pub fn capacity_for(&self, priority: i32) -> usize {
        match priority {
            ..0 => eighths(self.queue_max, HIGH_EIGHTHS),
            0 => self.queue_max,
            1.. => eighths(self.queue_max, LOW_EIGHTHS),
        }
    }
}

/// At least one.
fn eighths(whole: usize, parts: usize) -> usize {
    (whole * parts).div_ceil(8).max(1)
}

/// The queue is full for this request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueFullError {
    pub waiting: usize,
    pub max: usize,
    /// The tenant's own limit is reached, not that of the queue.
    pub is_tenant_limit: bool,
    pub retry_after: Duration,
}

#[derive(Debug)]
pub struct AdmissionControl {
    bounds: QueueLimits,
    waiting: usize,
    tenants: HashMap<u64, TenantWaiting>,
    /// Time of the last step.
    now: Duration,
    /// Time of the first step that found a waiting request since the queue was empty.
    since: Option<Duration>,
    retry_after: RetryAfterEstimator,
}

#[derive(Debug, Default)]
struct TenantWaiting {
    waiting: usize,
    backlog: Backlog,
}

impl AdmissionControl {
    pub fn new(bounds: QueueLimits) -> Self {
        let retry_after = RetryAfterEstimator::default();
        Self { bounds, waiting: 0, tenants: HashMap::new(), now: Duration::ZERO, since: None, retry_after }
    }

    /// Most waiting requests, of any priority, when a request of this priority arrives.
    pub fn capacity_for(&self, priority: i32) -> usize {
        self.bounds.capacity_for(priority)
    }

    /// Counts one more waiting request, or refuses it.
    pub fn try_enter(&mut self, priority: i32, tenant: u64) -> Result<(), QueueFullError> {
        let (waiting, max) = (self.waiting, self.capacity_for(priority));
        if waiting >= max {
            let retry_after = self.retry_after.estimate(self.now, waiting as u32, 1);
            return Err(QueueFullError { waiting, max, is_tenant_limit: false, retry_after });
        }
        let share = self.tenants.len() as u32;
        let tenant_waiting = self.tenants.entry(tenant).or_default();
        let (waiting, max) = (tenant_waiting.waiting, self.bounds.tenant_queue_max);
        // Requests without a tenant have no tenant limit.
        if tenant != 0 && waiting >= max {
            let ahead = waiting as u32;
            let retry_after =
                self.retry_after.estimate_for_tenant(&mut tenant_waiting.backlog, self.now, ahead, 1, share);
            return Err(QueueFullError { waiting, max, is_tenant_limit: true, retry_after });
        }
        tenant_waiting.waiting += 1;
        self.waiting += 1;
        Ok(())
    }

    /// The request has left the queue without being admitted.
    pub fn leave(&mut self, tenant: u64) {
        assert!(self.waiting > 0, "a request leaves an empty waiting queue");
        self.waiting -= 1;
        let Some(tenant_waiting) = self.tenants.get_mut(&tenant) else {
            panic!("a request of tenant {tenant} leaves, but none waits")
        };
        tenant_waiting.waiting -= 1;
        if tenant_waiting.waiting == 0 {
            self.tenants.remove(&tenant);
        }
        self.start_step(self.now);
    }

    /// The engine calls this at the start of each step. An empty queue says nothing about the rate
    /// of admissions.
    pub fn start_step(&mut self, now: Duration) {
        self.now = now;
        match self.waiting {
            0 => self.since = None,
            _ => self.since = self.since.or(Some(now)),
        }
        self.retry_after.set_waiting(now, self.waiting > 0);
    }

    /// The scheduler has admitted the request: it holds KV blocks from now on.
    pub fn admitted(&mut self, tenant: u64, now: Duration) {
        // A request that is admitted in its first step has waited for no other.
        if self.since.is_some_and(|since| since < now) {
            self.retry_after.record_freed(now);
        }
        self.leave(tenant);
    }

    pub fn waiting(&self) -> usize {
        self.waiting
    }

    pub fn waiting_of(&self, tenant: u64) -> usize {
        self.tenants.get(&tenant).map_or(0, |tenant_waiting| tenant_waiting.waiting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admission() -> AdmissionControl {
        AdmissionControl::new(QueueLimits { queue_max: 16, tenant_queue_max: 10 })
    }

    #[test]
    fn each_priority_leaves_capacity_to_higher_ones() {
        let mut admission = admission();
        (0..14).for_each(|tenant| admission.try_enter(1, tenant).unwrap());
        let low = admission.try_enter(1, 99).unwrap_err();
        assert_eq!((low.waiting, low.max, low.is_tenant_limit), (14, 14, false));
        (14..16).for_each(|tenant| admission.try_enter(0, tenant).unwrap());
        assert_eq!(admission.try_enter(0, 99).unwrap_err().max, 16);
        (16..18).for_each(|tenant| admission.try_enter(-1, tenant).unwrap());
        assert_eq!(admission.try_enter(-1, 99).unwrap_err().max, 18);
    }

    #[test]
    fn a_tenant_cannot_fill_the_queue() {
        let mut admission = admission();
        (0..10).for_each(|_| admission.try_enter(0, 7).unwrap());
        let full = admission.try_enter(0, 7).unwrap_err();
        assert_eq!((full.waiting, full.max, full.is_tenant_limit), (10, 10, true));
        admission.try_enter(0, 8).unwrap();
        admission.leave(7);
        admission.try_enter(0, 7).unwrap();
    }

    /// A queue of two requests that is always full. The scheduler admits one every four seconds,
    /// from second 4 to second 80.
    fn measured() -> AdmissionControl {
        let mut admission = AdmissionControl::new(QueueLimits { queue_max: 2, tenant_queue_max: 2 });
        (0..2).for_each(|_| admission.try_enter(0, 2).unwrap());
        assert_eq!(admission.try_enter(0, 1).unwrap_err().retry_after.as_secs(), 1, "nothing is known yet");
        admission.start_step(Duration::ZERO);
        (1..=20).for_each(|k| one_gets_in(&mut admission, 4 * k));
        admission
    }

    fn one_gets_in(admission: &mut AdmissionControl, second: u64) {
        let now = Duration::from_secs(second);
        admission.start_step(now);
        admission.admitted(2, now);
        admission.try_enter(0, 2).unwrap();
    }

    fn told(admission: &mut AdmissionControl) -> u64 {
        admission.try_enter(0, 1).unwrap_err().retry_after.as_secs()
    }

    #[test]
    fn refused_requests_get_successive_retry_times_at_the_measured_rate() {
        let mut admission = measured();
        assert_eq!([told(&mut admission), told(&mut admission), told(&mut admission)], [12, 16, 20]);
        one_gets_in(&mut admission, 84);
        assert_eq!(told(&mut admission), 20, "behind those of before, who are four seconds nearer");
        (0..100).for_each(|_| _ = told(&mut admission));
        assert_eq!(told(&mut admission), 60);
    }

    #[test]
    fn idle_time_does_not_change_the_rate() {
        let mut admission = measured();
        // Both requests leave. An hour later, new requests are admitted in their first step.
        let later = |second: u64| Duration::from_secs(3600 + second);
        (0..2).for_each(|_| admission.leave(2));
        for second in 0..50 {
            admission.try_enter(0, 2).unwrap();
            admission.start_step(later(second));
            admission.admitted(2, later(second));
        }
        (0..2).for_each(|_| admission.try_enter(0, 2).unwrap());
        admission.start_step(later(50));
        assert_eq!(told(&mut admission), 12, "as before that hour");
    }

    #[test]
    fn the_backlog_expires() {
        let mut admission = measured();
        (0..100).for_each(|_| _ = told(&mut admission));
        (21..=40).for_each(|k| one_gets_in(&mut admission, 4 * k));
        assert_eq!(told(&mut admission), 12, "those who were refused had their turn, or have gone");
    }

    #[test]
    fn a_tenant_at_its_limit_gets_its_own_retry_time() {
        let mut admission = AdmissionControl::new(QueueLimits { queue_max: 9, tenant_queue_max: 2 });
        (0..2).for_each(|_| admission.try_enter(0, 2).unwrap());
        admission.try_enter(0, 3).unwrap();
        admission.start_step(Duration::ZERO);
        (1..=20).for_each(|k| one_gets_in(&mut admission, 4 * k));
        let full = admission.try_enter(0, 2).unwrap_err();
        assert_eq!(
            (full.is_tenant_limit, full.retry_after.as_secs()),
            (true, 24),
            "every second place is its tenant_waiting"
        );
    }
}
