// SPDX-License-Identifier: Apache-2.0

//! The rules of the admission policy, one small test each.

use std::time::Duration;

use super::*;
use crate::routing::ModelKey;

const SECOND: Uptime = Duration::from_secs(1);
const WORKER_WAIT: Duration = Duration::from_secs(5);

fn limits() -> AdmissionLimits {
    AdmissionLimits {
        streams_max: 1000,
        queue_max: 20,
        tenant_queue_max: 10,
        interactive_floor: 20,
        batch_floor: 10,
        worker_wait: WORKER_WAIT,
    }
}

fn model() -> ModelKey {
    ModelKey::numbered(1)
}

pub(super) fn ready(model: ModelKey, permits: u32) -> AdmissionEvent {
    AdmissionEvent::WorkersChanged(model, WorkerAvailability::Ready { permits })
}

/// The last worker is lost, and restarts.
fn lost_worker(not_before: Uptime) -> AdmissionEvent {
    AdmissionEvent::WorkersChanged(model(), WorkerAvailability::Expected { not_before, until: None })
}

pub(super) fn named(name: &str) -> Tenant {
    Tenant::Named(name.into())
}

/// A policy with one model, and a clock.
struct TestQueue {
    policy: AdmissionPolicy,
    now: Uptime,
    last_id: u64,
}

impl TestQueue {
    fn new(permits: u32, limits: AdmissionLimits) -> Self {
        let mut queue = Self { policy: AdmissionPolicy::new(limits), now: SECOND, last_id: 0 };
        assert_eq!(queue.handle(ready(model(), permits)), []);
        queue
    }

    fn handle(&mut self, event: AdmissionEvent) -> Vec<AdmissionDecision> {
        self.policy.handle(self.now, event)
    }

    fn request(&self, tenant: &Tenant, priority: i32, permits: u32) -> AdmissionRequest {
        let deadline = self.now + 1000 * SECOND;
        AdmissionRequest { model: model(), tenant: tenant.clone(), priority, permits, deadline }
    }

    fn arrive(&mut self, request: AdmissionRequest) -> (AdmissionId, Vec<AdmissionDecision>) {
        self.last_id += 1;
        let id = AdmissionId(self.last_id);
        (id, self.handle(AdmissionEvent::Arrived(id, request)))
    }

    /// A request that is admitted at once.
    fn arrive_admitted(&mut self, tenant: &Tenant, priority: i32) -> AdmissionId {
        let (id, decisions) = self.arrive(self.request(tenant, priority, 1));
        assert_eq!(decisions, [AdmissionDecision::Admit(id)]);
        id
    }

    /// A request that has to wait.
    fn arrive_waiting(&mut self, tenant: &Tenant, priority: i32) -> AdmissionId {
        let (id, decisions) = self.arrive(self.request(tenant, priority, 1));
        assert_eq!(decisions, []);
        id
    }

    /// A request that is refused at once.
    fn arrive_refused(&mut self, tenant: &Tenant, priority: i32) -> AdmissionError {
        let (id, decisions) = self.arrive(self.request(tenant, priority, 1));
        match decisions[..] {
            [AdmissionDecision::Refuse(refused, error)] if refused == id => error,
            _ => panic!("not refused: {decisions:?}"),
        }
    }

    fn end_stream(&mut self, id: AdmissionId) -> Vec<AdmissionDecision> {
        self.handle(AdmissionEvent::StreamEnded(id))
    }

    fn held_permits(&self) -> u32 {
        self.policy.stats(&model()).unwrap().classes.iter().map(|class| class.held_permits).sum()
    }
}

#[test]
fn a_free_permit_is_granted_at_once_and_the_next_request_waits() {
    let mut queue = TestQueue::new(2, limits());
    let first = queue.arrive_admitted(&Tenant::Unnamed, 0);
    queue.arrive_admitted(&Tenant::Unnamed, 0);
    let third = queue.arrive_waiting(&Tenant::Unnamed, 0);
    assert_eq!(queue.end_stream(first), [AdmissionDecision::Admit(third)]);
    assert_eq!(queue.end_stream(first), [], "a permit is released once");
    assert_eq!(queue.held_permits(), 2);
}

#[test]
fn a_flooding_tenant_reaches_its_own_limit_and_other_tenants_do_not() {
    let mut queue = TestQueue::new(1, limits());
    let (a, b) = (named("a"), named("b"));
    queue.arrive_admitted(&a, 0);
    for _ in 0..10 {
        queue.arrive_waiting(&a, 0);
    }
    let refused = queue.arrive_refused(&a, 0);
    assert_eq!(refused, AdmissionError::TenantQueueFull { waiting: 10, max: 10, retry_after: SECOND });
    queue.arrive_waiting(&b, 0);
}

#[test]
fn a_full_queue_keeps_the_reserved_floors() {
    let mut queue = TestQueue::new(1, limits());
    queue.arrive_admitted(&Tenant::Unnamed, 0);
    // Of 20 waiting requests, 4 are reserved for class interactive and 2 for class batch.
    for _ in 0..14 {
        queue.arrive_waiting(&Tenant::Unnamed, 0);
    }
    let full = |class, waiting, max| AdmissionError::QueueFull { class, waiting, max, retry_after: SECOND };
    assert_eq!(queue.arrive_refused(&Tenant::Unnamed, 0), full(PriorityClass::Default, 14, 14));
    for _ in 0..2 {
        queue.arrive_waiting(&Tenant::Unnamed, 7);
    }
    assert_eq!(queue.arrive_refused(&Tenant::Unnamed, 7), full(PriorityClass::Batch, 16, 16));
    for _ in 0..4 {
        queue.arrive_waiting(&Tenant::Unnamed, -1);
    }
    assert_eq!(queue.arrive_refused(&Tenant::Unnamed, -1), full(PriorityClass::Interactive, 20, 20));
}

#[test]
fn requests_of_the_unnamed_tenant_may_fill_the_queue() {
    let mut queue = TestQueue::new(1, AdmissionLimits { interactive_floor: 0, batch_floor: 0, ..limits() });
    queue.arrive_admitted(&Tenant::Unnamed, 0);
    for _ in 0..20 {
        queue.arrive_waiting(&Tenant::Unnamed, 0);
    }
    assert!(matches!(
        queue.arrive_refused(&Tenant::Unnamed, 0),
        AdmissionError::QueueFull { waiting: 20, max: 20, .. }
    ));
}

#[test]
fn the_floor_of_a_class_stays_free_for_it() {
    let mut queue = TestQueue::new(10, limits());
    // Two permits are reserved for class interactive.
    for _ in 0..8 {
        queue.arrive_admitted(&Tenant::Unnamed, 1);
    }
    queue.arrive_waiting(&Tenant::Unnamed, 1);
    queue.arrive_waiting(&Tenant::Unnamed, 0);
    queue.arrive_admitted(&Tenant::Unnamed, -1);
    queue.arrive_admitted(&Tenant::Unnamed, -1);
    queue.arrive_waiting(&Tenant::Unnamed, -1);
    assert_eq!(queue.held_permits(), 10);
}

#[test]
fn higher_classes_come_first_and_the_oldest_request_every_eighth_time() {
    let mut queue = TestQueue::new(1, AdmissionLimits { queue_max: 100, ..limits() });
    let mut holder = queue.arrive_admitted(&Tenant::Unnamed, 0);
    let batch = queue.arrive_waiting(&Tenant::Unnamed, 1);
    let mut interactive = Vec::new();
    let mut admissions = 0;
    loop {
        interactive.push(queue.arrive_waiting(&Tenant::Unnamed, -1));
        let decisions = queue.end_stream(holder);
        admissions += 1;
        let [AdmissionDecision::Admit(next)] = decisions[..] else { panic!("{decisions:?}") };
        if next == batch {
            break;
        }
        assert!(interactive.contains(&next));
        holder = next;
    }
    assert!((2..=OLDEST_FIRST_EVERY).contains(&admissions), "admitted as number {admissions}");
}

#[test]
fn tenants_share_permits_and_not_admissions() {
    let mut queue = TestQueue::new(4, AdmissionLimits { interactive_floor: 0, batch_floor: 0, ..limits() });
    let (long, short) = (named("long"), named("short"));
    let held: Vec<AdmissionId> = (0..4).map(|_| queue.arrive_admitted(&long, 0)).collect();
    let more: Vec<AdmissionId> = (0..6).map(|_| queue.arrive_waiting(&long, 0)).collect();
    let wanted: Vec<AdmissionId> = (0..6).map(|_| queue.arrive_waiting(&short, 0)).collect();
    // Two of the four permits go to the other tenant.
    assert_eq!(queue.end_stream(held[0]), [AdmissionDecision::Admit(wanted[0])]);
    assert_eq!(queue.end_stream(held[1]), [AdmissionDecision::Admit(wanted[1])]);
    assert_eq!(
        queue.end_stream(wanted[0]),
        [AdmissionDecision::Admit(wanted[2])],
        "the tenant gets its own permit again"
    );
    assert_eq!(
        queue.end_stream(wanted[1]),
        [AdmissionDecision::Admit(more[0])],
        "the eighth admission goes to the oldest request"
    );
    assert_eq!(queue.end_stream(more[0]), [AdmissionDecision::Admit(wanted[3])]);
}

#[test]
fn requests_of_a_tenant_come_by_priority_then_by_arrival() {
    let mut queue = TestQueue::new(1, limits());
    let mut holder = queue.arrive_admitted(&Tenant::Unnamed, -1);
    let later = queue.arrive_waiting(&Tenant::Unnamed, -1);
    let last = queue.arrive_waiting(&Tenant::Unnamed, -1);
    let urgent = queue.arrive_waiting(&Tenant::Unnamed, -5);
    for next in [urgent, later, last] {
        assert_eq!(queue.end_stream(holder), [AdmissionDecision::Admit(next)]);
        holder = next;
    }
}

#[test]
fn small_requests_do_not_overtake_a_large_one() {
    let mut queue = TestQueue::new(4, AdmissionLimits { interactive_floor: 0, batch_floor: 0, ..limits() });
    let small: Vec<AdmissionId> = (0..4).map(|_| queue.arrive_admitted(&Tenant::Unnamed, 0)).collect();
    let (large, decisions) = queue.arrive(queue.request(&Tenant::Unnamed, 0, 3));
    assert_eq!(decisions, []);
    let after = queue.arrive_waiting(&Tenant::Unnamed, 0);
    assert_eq!(queue.end_stream(small[0]), []);
    assert_eq!(queue.end_stream(small[1]), []);
    assert_eq!(queue.end_stream(small[2]), [AdmissionDecision::Admit(large)]);
    assert_eq!(queue.end_stream(large), [AdmissionDecision::Admit(after)]);
    assert_eq!(queue.end_stream(large), []);
}

#[test]
fn a_request_larger_than_the_fleet_is_admitted_when_the_fleet_is_empty() {
    let mut queue = TestQueue::new(2, limits());
    let small = queue.arrive_admitted(&Tenant::Unnamed, 0);
    let (large, decisions) = queue.arrive(queue.request(&Tenant::Unnamed, 0, 5));
    assert_eq!(decisions, []);
    assert_eq!(queue.end_stream(small), [AdmissionDecision::Admit(large)]);
    let after = queue.arrive_waiting(&Tenant::Unnamed, 0);
    (0..3).for_each(|_| assert_eq!(queue.end_stream(large), []));
    assert_eq!(queue.end_stream(large), [AdmissionDecision::Admit(after)]);
}

#[test]
fn a_cancelled_request_leaves_the_queue_at_once() {
    let mut queue = TestQueue::new(1, limits());
    let a = named("a");
    let holder = queue.arrive_admitted(&a, 0);
    let queued: Vec<AdmissionId> = (0..10).map(|_| queue.arrive_waiting(&a, 0)).collect();
    assert!(matches!(queue.arrive_refused(&a, 0), AdmissionError::TenantQueueFull { .. }));
    assert_eq!(queue.handle(AdmissionEvent::Cancelled(queued[0])), []);
    queue.arrive_waiting(&a, 0);
    assert_eq!(
        queue.end_stream(holder),
        [AdmissionDecision::Admit(queued[1])],
        "the cancelled request is not admitted"
    );
    assert_eq!(
        queue.handle(AdmissionEvent::Cancelled(queued[1])),
        [],
        "an admitted request releases its permit when its stream ends"
    );
    assert_eq!(queue.held_permits(), 1);
}

#[test]
fn requests_behind_a_cancelled_large_request_are_admitted() {
    let mut queue = TestQueue::new(3, AdmissionLimits { interactive_floor: 0, batch_floor: 0, ..limits() });
    queue.arrive_admitted(&Tenant::Unnamed, 0);
    let (large, _) = queue.arrive(queue.request(&Tenant::Unnamed, 0, 3));
    let after = [queue.arrive_waiting(&Tenant::Unnamed, 0), queue.arrive_waiting(&Tenant::Unnamed, 1)];
    assert_eq!(queue.handle(AdmissionEvent::Cancelled(large)), after.map(AdmissionDecision::Admit));
}

#[test]
fn a_deadline_ends_the_wait_and_is_the_next_deadline() {
    let mut queue = TestQueue::new(1, limits());
    let holder = queue.arrive_admitted(&Tenant::Unnamed, 0);
    let soon = AdmissionRequest { deadline: queue.now + SECOND, ..queue.request(&Tenant::Unnamed, 0, 1) };
    let (id, decisions) = queue.arrive(soon);
    assert_eq!((decisions, queue.policy.next_deadline()), (vec![], Some(2 * SECOND)));
    queue.now += SECOND;
    assert_eq!(
        queue.handle(AdmissionEvent::Tick),
        [AdmissionDecision::Refuse(id, AdmissionError::DeadlineExceeded)]
    );
    assert_eq!(queue.policy.next_deadline(), None);
    // A permit that becomes free after the deadline does not admit the request.
    let soon = AdmissionRequest { deadline: queue.now + SECOND, ..queue.request(&Tenant::Unnamed, 0, 1) };
    let (id, _) = queue.arrive(soon.clone());
    queue.now += 2 * SECOND;
    assert_eq!(queue.end_stream(holder), [AdmissionDecision::Refuse(id, AdmissionError::DeadlineExceeded)]);
    let (late, decisions) = queue.arrive(soon);
    assert_eq!(decisions, [AdmissionDecision::Refuse(late, AdmissionError::DeadlineExceeded)]);
}

#[test]
fn a_deadline_noticed_at_an_arrival_frees_permits_at_once() {
    let mut queue = TestQueue::new(3, limits());
    queue.arrive_admitted(&Tenant::Unnamed, 0);
    let soon = AdmissionRequest { deadline: queue.now + SECOND, ..queue.request(&Tenant::Unnamed, 0, 3) };
    let (large, _) = queue.arrive(soon.clone());
    let small = queue.arrive_waiting(&Tenant::Unnamed, 0);
    queue.now += SECOND;
    let (late, decisions) = queue.arrive(soon);
    let expired = |id| AdmissionDecision::Refuse(id, AdmissionError::DeadlineExceeded);
    assert_eq!(decisions, [expired(large), AdmissionDecision::Admit(small), expired(late)]);
}

/// How the policy refuses a request that has waited for a worker.
fn no_worker(waited: Duration, retry_after: Duration) -> AdmissionError {
    AdmissionError::NoWorker { waited, retry_after }
}

#[test]
fn requests_wait_for_a_restarted_worker_in_the_order_of_the_queue() {
    let mut queue = TestQueue::new(1, limits());
    let holder = queue.arrive_admitted(&Tenant::Unnamed, 0);
    let first = queue.arrive_waiting(&Tenant::Unnamed, 0);
    assert_eq!(queue.handle(lost_worker(queue.now)), []);
    let second = queue.arrive_waiting(&Tenant::Unnamed, 0);
    let urgent = queue.arrive_waiting(&Tenant::Unnamed, -1);
    assert_eq!(queue.end_stream(holder), []);
    queue.now += SECOND;
    assert_eq!(queue.handle(ready(model(), 3)), [urgent, first, second].map(AdmissionDecision::Admit));
}

#[test]
fn each_request_waits_for_a_worker_for_a_bounded_time() {
    let mut queue = TestQueue::new(1, limits());
    let holder = queue.arrive_admitted(&Tenant::Unnamed, 0);
    let first = queue.arrive_waiting(&Tenant::Unnamed, 0);
    // The time in which it waited for a permit does not count.
    queue.now += 9 * SECOND;
    let lost = queue.now;
    assert_eq!(queue.handle(lost_worker(lost)), []);
    queue.now += 2 * SECOND;
    let second = queue.arrive_waiting(&Tenant::Unnamed, 0);
    // The supervisor says again that a worker starts.
    assert_eq!(queue.handle(lost_worker(queue.now)), []);
    assert_eq!(queue.policy.next_deadline(), Some(lost + WORKER_WAIT));
    queue.now = lost + WORKER_WAIT;
    let refused = |id, waited| AdmissionDecision::Refuse(id, no_worker(waited, SECOND));
    assert_eq!(queue.handle(AdmissionEvent::Tick), [refused(first, 9 * SECOND + WORKER_WAIT)]);
    queue.now += 2 * SECOND;
    assert_eq!(queue.handle(AdmissionEvent::Tick), [refused(second, WORKER_WAIT)]);
    let third = queue.arrive_waiting(&Tenant::Unnamed, 0);
    assert_eq!(
        queue.handle(AdmissionEvent::WorkersChanged(model(), WorkerAvailability::Gone)),
        [refused(third, Duration::ZERO)]
    );
    assert_eq!(queue.end_stream(holder), []);
    assert_eq!(queue.policy.stats(&model()), None, "a model without workers and requests is removed");
    assert_eq!(queue.arrive_refused(&Tenant::Unnamed, 0), no_worker(Duration::ZERO, SECOND));
}

#[test]
fn a_request_does_not_wait_for_a_worker_that_starts_after_the_bound() {
    let mut queue = TestQueue::new(1, limits());
    queue.arrive_admitted(&Tenant::Unnamed, 0);
    let lost = queue.now;
    assert_eq!(queue.handle(lost_worker(lost)), []);
    let early = queue.arrive_waiting(&Tenant::Unnamed, 0);
    queue.now += 2 * SECOND;
    let late = queue.arrive_waiting(&Tenant::Unnamed, 0);
    // Too late for the first request only.
    let start = lost + WORKER_WAIT + SECOND;
    let refused = AdmissionDecision::Refuse(early, no_worker(2 * SECOND, 4 * SECOND));
    assert_eq!(queue.handle(lost_worker(start)), [refused]);
    let far = start + 90 * SECOND;
    let refused = AdmissionDecision::Refuse(late, no_worker(Duration::ZERO, 60 * SECOND));
    assert_eq!(queue.handle(lost_worker(far)), [refused]);
    let after = Duration::from_millis(7_500);
    assert_eq!(queue.handle(lost_worker(queue.now + after)), []);
    assert_eq!(queue.arrive_refused(&Tenant::Unnamed, 0), no_worker(Duration::ZERO, 8 * SECOND));
}

#[test]
fn without_a_supervisor_the_bound_counts_from_the_loss_for_all_requests() {
    let mut queue = TestQueue::new(1, limits());
    let until = queue.now + WORKER_WAIT;
    let lost = WorkerAvailability::Expected { not_before: queue.now, until: Some(until) };
    assert_eq!(queue.handle(AdmissionEvent::WorkersChanged(model(), lost)), []);
    queue.now += 4 * SECOND;
    let waiting = queue.arrive_waiting(&Tenant::Unnamed, 0);
    assert_eq!(queue.policy.next_deadline(), Some(until));
    queue.now = until;
    let refused = AdmissionDecision::Refuse(waiting, no_worker(SECOND, SECOND));
    assert_eq!(queue.handle(AdmissionEvent::Tick), [refused]);
    assert_eq!(queue.arrive_refused(&Tenant::Unnamed, 0), no_worker(Duration::ZERO, SECOND));
}

#[test]
fn the_limits_of_the_queue_hold_without_a_worker() {
    let mut queue = TestQueue::new(1, limits());
    assert_eq!(queue.handle(lost_worker(queue.now)), []);
    for _ in 0..10 {
        queue.arrive_waiting(&named("a"), 0);
    }
    assert!(matches!(
        queue.arrive_refused(&named("a"), 0),
        AdmissionError::TenantQueueFull { waiting: 10, .. }
    ));
    for _ in 0..4 {
        queue.arrive_waiting(&Tenant::Unnamed, 0);
    }
    let full = queue.arrive_refused(&Tenant::Unnamed, 0);
    assert!(matches!(full, AdmissionError::QueueFull { waiting: 14, max: 14, .. }), "{full}");
    let mut small = TestQueue::new(1, AdmissionLimits { streams_max: 5, ..limits() });
    assert_eq!(small.handle(lost_worker(small.now)), []);
    for _ in 0..5 {
        small.arrive_waiting(&Tenant::Unnamed, 0);
    }
    let full = small.arrive_refused(&Tenant::Unnamed, 0);
    assert!(matches!(full, AdmissionError::TooManyStreams { streams: 5, .. }), "{full}");
}

#[test]
fn requests_beyond_the_limits_retry_when_the_worker_starts() {
    const RESTART: Duration = SECOND;
    let full_queue = |not_before: Uptime| {
        let mut queue = TestQueue::new(1, limits());
        let now = queue.now;
        assert_eq!(queue.handle(lost_worker(now + not_before)), []);
        for _ in 0..14 {
            queue.arrive_waiting(&Tenant::Unnamed, 0);
        }
        // The queue stalls, which the estimate from freed permits would count.
        queue.now += 3 * SECOND;
        queue
    };
    let retry_after = |queue: &mut TestQueue| match queue.arrive_refused(&Tenant::Unnamed, 0) {
        AdmissionError::QueueFull { retry_after, .. } => retry_after,
        error => panic!("{error}"),
    };
    let mut queue = full_queue(Duration::ZERO);
    let told: Vec<Duration> = (0..50).map(|_| retry_after(&mut queue)).collect();
    assert_eq!(told, [RESTART; 50]);
    assert_eq!(retry_after(&mut full_queue(5 * SECOND)), 2 * SECOND, "the worker starts in 2 s");
    // The outage does not count in the estimate after it.
    queue.handle(ready(model(), 1));
    queue.arrive_waiting(&Tenant::Unnamed, 0);
    assert_eq!(retry_after(&mut queue), RESTART);
}

#[test]
fn a_wait_of_zero_refuses_at_once() {
    let mut queue = TestQueue::new(1, AdmissionLimits { worker_wait: Duration::ZERO, ..limits() });
    queue.arrive_admitted(&Tenant::Unnamed, 0);
    let waiting = queue.arrive_waiting(&Tenant::Unnamed, 0);
    let refused = no_worker(Duration::ZERO, SECOND);
    assert_eq!(queue.handle(lost_worker(queue.now)), [AdmissionDecision::Refuse(waiting, refused)]);
    assert_eq!(queue.arrive_refused(&Tenant::Unnamed, 0), refused);
}

#[test]
fn a_lost_worker_takes_no_permit_from_admitted_requests() {
    let mut queue = TestQueue::new(4, limits());
    let holders: Vec<AdmissionId> = (0..4).map(|_| queue.arrive_admitted(&Tenant::Unnamed, 0)).collect();
    let next = queue.arrive_waiting(&Tenant::Unnamed, 0);
    assert_eq!(queue.handle(ready(model(), 2)), []);
    assert_eq!(queue.end_stream(holders[0]), []);
    assert_eq!(queue.end_stream(holders[1]), []);
    assert_eq!(queue.end_stream(holders[2]), [AdmissionDecision::Admit(next)]);
    let more = queue.arrive_waiting(&Tenant::Unnamed, 0);
    assert_eq!(
        queue.handle(ready(model(), 3)),
        [AdmissionDecision::Admit(more)],
        "a new worker adds permits at once"
    );
}

#[test]
fn the_process_limits_the_number_of_streams() {
    let mut queue = TestQueue::new(2, AdmissionLimits { streams_max: 5, ..limits() });
    queue.arrive_admitted(&Tenant::Unnamed, 0);
    let (_, decisions) = queue.arrive(queue.request(&Tenant::Unnamed, 0, 3));
    assert_eq!((decisions, queue.policy.streams()), (vec![], 4));
    let (id, decisions) = queue.arrive(queue.request(&Tenant::Unnamed, 0, 2));
    let full = AdmissionError::TooManyStreams { streams: 4, max: 5, retry_after: SECOND };
    assert_eq!(decisions, [AdmissionDecision::Refuse(id, full)]);
    queue.arrive_waiting(&Tenant::Unnamed, 0);
}

#[test]
fn retry_times_follow_the_measured_rate() {
    let mut queue =
        TestQueue::new(1, AdmissionLimits { queue_max: 4, interactive_floor: 0, batch_floor: 0, ..limits() });
    let mut holder = queue.arrive_admitted(&Tenant::Unnamed, 0);
    for _ in 0..4 {
        queue.arrive_waiting(&Tenant::Unnamed, 0);
    }
    for _ in 0..30 {
        queue.now += 3 * SECOND;
        let decisions = queue.end_stream(holder);
        let [AdmissionDecision::Admit(next)] = decisions[..] else { panic!("{decisions:?}") };
        holder = next;
        queue.arrive_waiting(&Tenant::Unnamed, 0);
    }
    // Four requests wait, and each takes three seconds.
    for seconds in [15, 18, 21] {
        let AdmissionError::QueueFull { retry_after, .. } = queue.arrive_refused(&Tenant::Unnamed, 0) else {
            panic!()
        };
        assert_eq!(retry_after.as_secs(), seconds);
    }
}

#[test]
fn models_have_separate_queues() {
    let mut queue = TestQueue::new(1, limits());
    let other = ModelKey::numbered(2);
    assert_eq!(queue.handle(ready(other.clone(), 1)), []);
    queue.arrive_admitted(&Tenant::Unnamed, 0);
    queue.arrive_waiting(&Tenant::Unnamed, 0);
    let (id, decisions) =
        queue.arrive(AdmissionRequest { model: other, ..queue.request(&Tenant::Unnamed, 0, 1) });
    assert_eq!(decisions, [AdmissionDecision::Admit(id)]);
    let unknown = ModelKey::numbered(3);
    let (id, decisions) =
        queue.arrive(AdmissionRequest { model: unknown, ..queue.request(&Tenant::Unnamed, 0, 1) });
    assert_eq!(decisions, [AdmissionDecision::Refuse(id, no_worker(Duration::ZERO, SECOND))]);
}
