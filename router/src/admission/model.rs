// SPDX-License-Identifier: Apache-2.0

//! Admission control of one model: its permits, the requests that hold them, and the requests that
//! wait for them.
//!
//! Invariants, which the simulation checks after every event:
//! 1. Requests hold no more permits than the model has. Exceptions: a request larger than its class
//!    may ever hold, and the time after workers were lost.
//! 2. A class below its floor finds permits up to its floor.
//! 3. No request waits that could be admitted.
//! 4. Every request gets one answer and releases every permit once.
//! 5. A request waits for a worker at most `worker_wait`, counted from its arrival or from the loss
//!    of the last worker. Requests that arrived earlier are refused no later.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use retry_after::{Backlog, RetryAfterEstimator};

use super::class_queue::{ClassQueue, RequestOrder};
use super::limits::AdmissionLimits;
use super::request::{
    AdmissionDecision, AdmissionError, AdmissionId, AdmissionRequest, PriorityClass, Tenant, Uptime,
    WorkerAvailability,
};

/// One in this many admissions goes to the oldest request, whatever its class and tenant.
pub(crate) const OLDEST_FIRST_EVERY: u32 = 8;

/// Bounds of the retry time of a request that finds no worker. A worker that starts now is ready
/// within a second, and `Retry-After` counts seconds. A worker that crashes is started once a
/// minute.
pub(super) const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(60);

/// Admission figures of one model, for metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelAdmissionStats {
    pub permits: u32,
    /// In the order of [`PriorityClass::ALL`].
    pub classes: [ClassStats; 3],
    /// Waiting requests of each named tenant, the largest number first.
    pub tenants: Vec<(Arc<str>, u32)>,
}

impl ModelAdmissionStats {
    pub fn has_waiting(&self) -> bool {
        self.classes.iter().any(|class| class.waiting_requests > 0)
    }

    /// Adds the figures of another queue under the same name.
    pub fn add(&mut self, other: Self) {
        self.permits = self.permits.saturating_add(other.permits);
        for (class, more) in self.classes.iter_mut().zip(other.classes) {
            class.waiting_requests = class.waiting_requests.saturating_add(more.waiting_requests);
            class.held_permits = class.held_permits.saturating_add(more.held_permits);
        }
        for (tenant, waiting) in other.tenants {
            match self.tenants.iter_mut().find(|(known, _)| *known == tenant) {
                Some((_, sum)) => *sum = sum.saturating_add(waiting),
                None => self.tenants.push((tenant, waiting)),
            }
        }
        self.tenants.sort_by(|(_, a), (_, b)| b.cmp(a));
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassStats {
    pub waiting_requests: u32,
    pub held_permits: u32,
}

#[derive(Debug)]
pub(super) struct ModelAdmission {
    limits: AdmissionLimits,
    /// 0 while no worker is ready.
    permits: u32,
    workers: WorkerAvailability,
    /// The time since which the model has had no worker.
    no_worker_since: Option<Uptime>,
    /// In the order of [`PriorityClass::ALL`].
    queues: [ClassQueue; 3],
    /// Every request that waits or holds permits.
    requests: HashMap<AdmissionId, QueuedRequestState>,
    /// Waiting requests by arrival.
    waiting: BTreeMap<u64, AdmissionId>,
    deadlines: BTreeSet<(Uptime, AdmissionId)>,
    /// Tenants with waiting requests, over all classes.
    tenants: HashMap<Tenant, TenantUsage>,
    /// Permits that waiting requests ask for.
    waiting_permits: u32,
    arrivals: u64,
    /// Admissions since the last oldest-first admission.
    since_oldest_first: u32,
    retry_after: RetryAfterEstimator,
}

#[derive(Debug)]
struct QueuedRequestState {
    tenant: Tenant,
    class: PriorityClass,
    order: RequestOrder,
    permits: u32,
    arrived: Uptime,
    deadline: Uptime,
    /// Permits that the request holds. `None` while it waits.
    held_permits: Option<u32>,
}

/// What a tenant's waiting requests ask for.
#[derive(Debug, Default)]
struct TenantUsage {
    waiting_requests: u32,
    waiting_permits: u32,
    backlog: Backlog,
}

/// Whether a request can have its permits now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PermitAvailability {
    Free,
    /// Free within the floor of the request's own class. No other class could use these permits.
    WithinFloor,
    Unavailable,
}

impl ModelAdmission {
    pub(super) fn new(limits: AdmissionLimits) -> Self {
        Self {
            limits,
            permits: 0,
            workers: WorkerAvailability::Gone,
            no_worker_since: None,
            queues: Default::default(),
            requests: HashMap::new(),
            waiting: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            tenants: HashMap::new(),
            waiting_permits: 0,
            arrivals: 0,
            since_oldest_first: 0,
            retry_after: RetryAfterEstimator::default(),
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.workers == WorkerAvailability::Gone && self.requests.is_empty()
    }

    /// The error for a request that arrived at this time and waits for a worker no longer.
    pub(super) fn no_worker_error(&self, arrived: Uptime, now: Uptime) -> Option<AdmissionError> {
        self.worker_deadline(arrived).filter(|&deadline| deadline <= now)?;
        let retry_after = self.retry_after_restart(now).unwrap_or(RETRY_MIN);
        Some(AdmissionError::NoWorker { waited: now.saturating_sub(arrived), retry_after })
    }

    /// When a client should retry a request while the model has no worker. `None` while workers are
    /// ready.
    fn retry_after_restart(&self, now: Uptime) -> Option<Duration> {
        let next_start = match self.workers {
            WorkerAvailability::Ready { .. } => return None,
            WorkerAvailability::Expected { not_before, .. } => not_before.saturating_sub(now),
            WorkerAvailability::Gone => Duration::ZERO,
        };
        let whole_seconds =
            Duration::from_secs(next_start.as_secs() + u64::from(next_start.subsec_nanos() > 0));
        Some(whole_seconds.clamp(RETRY_MIN, RETRY_MAX))
    }

    /// When a waiting request that arrived at this time is refused for lack of a worker. `None`
    /// while workers are ready.
    fn worker_deadline(&self, arrived: Uptime) -> Option<Uptime> {
        let limit = arrived.max(self.no_worker_since?) + self.limits.worker_wait;
        match self.workers {
            WorkerAvailability::Ready { .. } => None,
            WorkerAvailability::Expected { not_before, until } => {
                let limit = until.map_or(limit, |until| limit.min(until));
                // Waiting would be in vain.
                Some(if not_before > limit { Uptime::ZERO } else { limit })
            }
            WorkerAvailability::Gone => Some(Uptime::ZERO),
        }
    }

    /// The waiting request that arrived first.
    fn oldest_waiting(&self) -> Option<(AdmissionId, Uptime)> {
        let (_, &id) = self.waiting.first_key_value()?;
        Some((id, self.requests[&id].arrived))
    }

    /// Streams that run or wait.
    pub(super) fn streams(&self) -> u32 {
        self.waiting_permits + self.queues.iter().map(ClassQueue::held_permits).sum::<u32>()
    }

    /// The next time at which a decision is due without an event.
    pub(super) fn next_deadline(&self) -> Option<Uptime> {
        let request_deadline = self.deadlines.first().map(|&(at, _)| at);
        let worker_deadline = self.oldest_waiting().and_then(|(_, arrived)| self.worker_deadline(arrived));
        request_deadline.into_iter().chain(worker_deadline).min()
    }

    pub(super) fn stats(&self) -> ModelAdmissionStats {
        let class_stats = |class| {
            let queue = &self.queues[class as usize];
            ClassStats { waiting_requests: queue.waiting_requests(), held_permits: queue.held_permits() }
        };
        let named = |(tenant, usage): (&Tenant, &TenantUsage)| match tenant {
            Tenant::Named(name) => Some((name.clone(), usage.waiting_requests)),
            Tenant::Unnamed => None,
        };
        let mut tenants: Vec<_> = self.tenants.iter().filter_map(named).collect();
        tenants.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        ModelAdmissionStats { permits: self.permits, classes: PriorityClass::ALL.map(class_stats), tenants }
    }

    pub(super) fn arrive(
        &mut self,
        now: Uptime,
        id: AdmissionId,
        request: AdmissionRequest,
        decisions: &mut Vec<AdmissionDecision>,
    ) {
        self.advance(now, decisions);
        if request.deadline <= now {
            return decisions.push(AdmissionDecision::Refuse(id, AdmissionError::DeadlineExceeded));
        }
        self.arrivals += 1;
        let order = RequestOrder { priority: request.priority, arrival: self.arrivals };
        let state = QueuedRequestState {
            class: PriorityClass::of_priority(request.priority),
            tenant: request.tenant,
            order,
            permits: request.permits,
            arrived: now,
            deadline: request.deadline,
            held_permits: None,
        };
        self.queues[state.class as usize].push(&state.tenant, order);
        self.waiting.insert(order.arrival, id);
        self.deadlines.insert((state.deadline, id));
        let usage = self.tenants.entry(state.tenant.clone()).or_default();
        usage.waiting_requests += 1;
        usage.waiting_permits += state.permits;
        self.waiting_permits += state.permits;
        self.requests.insert(id, state);
        self.admit_waiting(decisions);
        // Queue limits apply only to requests that have to wait.
        if let Some(error) = self.queue_limit_error(now, id) {
            self.remove_waiting(id);
            decisions.push(AdmissionDecision::Refuse(id, error));
        }
        self.note_waiting(now);
    }

    /// Removes a waiting request. Returns false if the request is not waiting.
    pub(super) fn cancel(
        &mut self,
        now: Uptime,
        id: AdmissionId,
        decisions: &mut Vec<AdmissionDecision>,
    ) -> bool {
        let is_waiting = self.requests.get(&id).is_some_and(|request| request.held_permits.is_none());
        if is_waiting {
            self.remove_waiting(id);
        }
        self.advance(now, decisions);
        is_waiting
    }

    /// Releases one permit of a request. Returns true if it was the last one.
    pub(super) fn end_stream(
        &mut self,
        now: Uptime,
        id: AdmissionId,
        decisions: &mut Vec<AdmissionDecision>,
    ) -> bool {
        let Some(QueuedRequestState { tenant, class, held_permits: Some(held), .. }) =
            self.requests.get_mut(&id)
        else {
            return false;
        };
        *held -= 1;
        self.queues[*class as usize].release_permit(tenant);
        let was_last = *held == 0;
        if was_last {
            self.requests.remove(&id);
        }
        self.retry_after.record_freed(now);
        self.advance(now, decisions);
        was_last
    }

    pub(super) fn set_workers(
        &mut self,
        now: Uptime,
        workers: WorkerAvailability,
        decisions: &mut Vec<AdmissionDecision>,
    ) {
        self.workers = workers;
        (self.permits, self.no_worker_since) = match workers {
            WorkerAvailability::Ready { permits } => (permits, None),
            WorkerAvailability::Expected { .. } | WorkerAvailability::Gone => {
                (0, Some(self.no_worker_since.unwrap_or(now)))
            }
        };
        self.advance(now, decisions);
    }

    /// When a client should retry a request of `permits` that this process has no capacity for.
    pub(super) fn estimate_retry_after(&mut self, now: Uptime, permits: u32) -> Duration {
        // Without a worker no permit is freed, which says nothing about the rate afterwards.
        self.retry_after_restart(now)
            .unwrap_or_else(|| self.retry_after.estimate(now, self.waiting_permits, permits))
    }

    /// Refuses expired requests and admits waiting ones. Every event ends with it.
    pub(super) fn advance(&mut self, now: Uptime, decisions: &mut Vec<AdmissionDecision>) {
        self.expire(now, decisions);
        self.admit_waiting(decisions);
        self.note_waiting(now);
    }

    /// The time without a worker is not counted: it would make the measured rate too low.
    fn note_waiting(&mut self, now: Uptime) {
        let has_workers = self.permits > 0;
        self.retry_after.set_waiting(now, has_workers && !self.waiting.is_empty());
    }

    fn expire(&mut self, now: Uptime, decisions: &mut Vec<AdmissionDecision>) {
        while let Some(&(deadline, id)) = self.deadlines.first()
            && deadline <= now
        {
            self.remove_waiting(id);
            decisions.push(AdmissionDecision::Refuse(id, AdmissionError::DeadlineExceeded));
        }
        while let Some((id, arrived)) = self.oldest_waiting()
            && let Some(error) = self.no_worker_error(arrived, now)
        {
            self.remove_waiting(id);
            decisions.push(AdmissionDecision::Refuse(id, error));
        }
    }

    fn admit_waiting(&mut self, decisions: &mut Vec<AdmissionDecision>) {
        while let Some((id, is_oldest_first)) = self.next_admission() {
            let request = self.requests.get_mut(&id).expect("every waiting request has a state");
            request.held_permits = Some(request.permits);
            self.queues[request.class as usize].admit(&request.tenant, request.order, request.permits);
            self.waiting.remove(&request.order.arrival);
            self.deadlines.remove(&(request.deadline, id));
            let (tenant, permits) = (request.tenant.clone(), request.permits);
            self.subtract_waiting(&tenant, permits);
            self.since_oldest_first = match is_oldest_first {
                true => 0,
                false => (self.since_oldest_first + 1).min(OLDEST_FIRST_EVERY - 1),
            };
            decisions.push(AdmissionDecision::Admit(id));
        }
    }

    /// The request that is admitted now, and whether this is an oldest-first admission.
    fn next_admission(&self) -> Option<(AdmissionId, bool)> {
        let mut is_blocked = false;
        if self.since_oldest_first + 1 >= OLDEST_FIRST_EVERY
            && let Some((_, &oldest)) = self.waiting.first_key_value()
        {
            match self.permit_availability(oldest) {
                PermitAvailability::Free | PermitAvailability::WithinFloor => return Some((oldest, true)),
                // The oldest request keeps its turn.
                PermitAvailability::Unavailable => is_blocked = true,
            }
        }
        for class in PriorityClass::ALL {
            let Some(first) = self.queues[class as usize].first() else { continue };
            let id = self.waiting[&first.arrival];
            match self.permit_availability(id) {
                PermitAvailability::Free if !is_blocked => return Some((id, false)),
                PermitAvailability::WithinFloor => return Some((id, false)),
                // Requests after a blocked one do not take the permits that it waits for.
                PermitAvailability::Free | PermitAvailability::Unavailable => is_blocked = true,
            }
        }
        None
    }

    fn permit_availability(&self, id: AdmissionId) -> PermitAvailability {
        let QueuedRequestState { class, permits, .. } = self.requests[&id];
        let floor = |class: PriorityClass| self.limits.floor(class, self.permits);
        let held_by = |class: PriorityClass| self.queues[class as usize].held_permits();
        let held: u32 = PriorityClass::ALL.into_iter().map(held_by).sum();
        // The most that the other classes leave to this class. A larger request makes do with it.
        let most = self.permits - class.others().map(floor).sum::<u32>();
        let wanted = permits.min(most);
        let free = self.permits.saturating_sub(held);
        if wanted == 0 || wanted > free {
            return PermitAvailability::Unavailable;
        }
        if held_by(class) + wanted <= floor(class) {
            return PermitAvailability::WithinFloor;
        }
        let reserved: u32 = class.others().map(|other| floor(other).saturating_sub(held_by(other))).sum();
        match wanted <= free.saturating_sub(reserved) {
            true => PermitAvailability::Free,
            false => PermitAvailability::Unavailable,
        }
    }

    /// The error for a request that has to wait and exceeds a queue limit.
    fn queue_limit_error(&mut self, now: Uptime, id: AdmissionId) -> Option<AdmissionError> {
        let request = self.requests.get(&id).filter(|request| request.held_permits.is_none())?;
        let (class, permits) = (request.class, request.permits);
        let permits_ahead = self.waiting_permits - permits;
        let max = self.limits.tenant_queue_max;
        let restart = self.retry_after_restart(now);
        let usage = self.tenants.get_mut(&request.tenant).expect("a waiting request counts for its tenant");
        if request.tenant != Tenant::Unnamed && usage.waiting_requests > max {
            let tenants = self.queues[class as usize].waiting_tenants();
            let waiting = usage.waiting_requests - 1;
            let permits_ahead = usage.waiting_permits - permits;
            let backlog = &mut usage.backlog;
            let retry_after = restart.unwrap_or_else(|| {
                self.retry_after.estimate_for_tenant(backlog, now, permits_ahead, permits, tenants)
            });
            return Some(AdmissionError::TenantQueueFull { waiting, max, retry_after });
        }
        let queue_max = self.limits.queue_max;
        let waiting_in = |class: PriorityClass| self.queues[class as usize].waiting_requests();
        let reserved =
            |class: PriorityClass| self.limits.floor(class, queue_max).saturating_sub(waiting_in(class));
        let max = queue_max - class.others().map(reserved).sum::<u32>();
        let waiting = self.waiting.len() as u32 - 1;
        if waiting >= max {
            let retry_after =
                restart.unwrap_or_else(|| self.retry_after.estimate(now, permits_ahead, permits));
            return Some(AdmissionError::QueueFull { class, waiting, max, retry_after });
        }
        None
    }

    /// Forgets a waiting request.
    fn remove_waiting(&mut self, id: AdmissionId) {
        let request = self.requests.remove(&id).expect("every waiting request has a state");
        assert!(request.held_permits.is_none(), "only a waiting request is removed without its permits");
        self.queues[request.class as usize].remove(&request.tenant, request.order);
        self.waiting.remove(&request.order.arrival);
        self.deadlines.remove(&(request.deadline, id));
        self.subtract_waiting(&request.tenant, request.permits);
    }

    fn subtract_waiting(&mut self, tenant: &Tenant, permits: u32) {
        self.waiting_permits -= permits;
        let usage = self.tenants.get_mut(tenant).expect("a waiting request counts for its tenant");
        usage.waiting_requests -= 1;
        usage.waiting_permits -= permits;
        if usage.waiting_requests == 0 {
            self.tenants.remove(tenant);
        }
    }
}
