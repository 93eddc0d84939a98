// SPDX-License-Identifier: Apache-2.0

//! Simulation of the admission policy: random requests, classes, tenants, deadlines and worker
//! losses. A reference model of plain maps checks every decision. A failure prints its seed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;

use super::tests::{named, ready};
use super::*;
use crate::routing::ModelKey;

const STEPS_PER_SEED: u64 = 2_000;
const WORKER_WAIT: Duration = Duration::from_secs(5);

/// SplitMix64.
struct SimulationRng(u64);

impl SimulationRng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

#[derive(Clone, Debug)]
struct WaitingRequest {
    request: AdmissionRequest,
    arrived: Uptime,
    /// How many admissions to its model may still come first. Excludes admissions within a floor.
    overtakes_left: u32,
    /// For the first request of a tenant without permits.
    competition: Option<Competition>,
}

/// The admissions that may come before a tenant without permits.
#[derive(Clone, Copy, Debug, Default)]
struct Competition {
    /// Other tenants of the class that were waiting when the tenant arrived.
    tenants: u32,
    /// Admissions since then, of the class and of all classes.
    class_admissions: u32,
    all_admissions: u32,
}

/// The policy under test, and the reference model of its state.
struct Simulation {
    limits: AdmissionLimits,
    policy: AdmissionPolicy,
    now: Uptime,
    last_id: u64,
    permits: BTreeMap<ModelKey, u32>,
    /// Models without workers: since when, and what is known about the next one.
    missing: BTreeMap<ModelKey, (Uptime, WorkerAvailability)>,
    waiting: BTreeMap<AdmissionId, WaitingRequest>,
    /// Admitted requests with the permits that they hold.
    admitted: BTreeMap<AdmissionId, (AdmissionRequest, u32)>,
    admissions: u64,
    refusals: u64,
    /// Refusals for lack of a worker.
    without_worker: u64,
}

fn class_of(request: &AdmissionRequest) -> PriorityClass {
    PriorityClass::of_priority(request.priority)
}

impl Simulation {
    fn new(limits: AdmissionLimits) -> Self {
        Self {
            limits,
            policy: AdmissionPolicy::new(limits),
            now: Duration::ZERO,
            last_id: 0,
            permits: BTreeMap::new(),
            missing: BTreeMap::new(),
            waiting: BTreeMap::new(),
            admitted: BTreeMap::new(),
            admissions: 0,
            refusals: 0,
            without_worker: 0,
        }
    }

    fn held_permits(&self, model: &ModelKey, class: Option<PriorityClass>) -> u32 {
        let counts = |request: &AdmissionRequest| {
            request.model == *model && class.is_none_or(|class| class_of(request) == class)
        };
        self.admitted.values().filter(|(request, _)| counts(request)).map(|(_, held)| held).sum()
    }

    fn floor(&self, class: PriorityClass, total: u32) -> u32 {
        match class {
            PriorityClass::Interactive => total * self.limits.interactive_floor / 100,
            PriorityClass::Default => 0,
            PriorityClass::Batch => total * self.limits.batch_floor / 100,
        }
    }

    /// Unused permits within the floors of the other classes.
    fn reserved_by_others(&self, model: &ModelKey, class: PriorityClass) -> u32 {
        let others = PriorityClass::ALL.into_iter().filter(|&other| other != class);
        let unused = |other| {
            self.floor(other, self.permits[model]).saturating_sub(self.held_permits(model, Some(other)))
        };
        others.map(unused).sum()
    }

    fn handle(&mut self, event: AdmissionEvent) {
        let arrived = match &event {
            AdmissionEvent::Arrived(id, request) => {
                let request = request.clone();
                let arrived = self.now;
                let waiting =
                    WaitingRequest { request, arrived, overtakes_left: u32::MAX, competition: None };
                self.waiting.insert(*id, waiting);
                Some(*id)
            }
            AdmissionEvent::Cancelled(id) => {
                self.waiting.remove(id);
                None
            }
            AdmissionEvent::StreamEnded(id) => {
                if let Some((_, held)) = self.admitted.get_mut(id) {
                    *held -= 1;
                    if *held == 0 {
                        self.admitted.remove(id);
                    }
                }
                None
            }
            AdmissionEvent::WorkersChanged(model, workers) => {
                self.set_workers(model, *workers);
                None
            }
            AdmissionEvent::Tick => None,
        };
        for decision in self.policy.handle(self.now, event.clone()) {
            match decision {
                AdmissionDecision::Admit(id) => self.check_admission(id),
                AdmissionDecision::Refuse(id, error) => self.check_refusal(id, error, arrived),
            }
        }
        // Requests that this arrival admitted were before the new request. Overtaking counts from
        // now.
        if let Some((id, waiting)) = arrived.and_then(|id| self.waiting.remove_entry(&id)) {
            self.add_waiting(id, waiting.request);
        }
        self.check_state(&event);
    }

    fn set_workers(&mut self, model: &ModelKey, workers: WorkerAvailability) {
        if let WorkerAvailability::Ready { permits } = workers {
            self.permits.insert(model.clone(), permits);
            self.missing.remove(model);
            return;
        }
        self.permits.insert(model.clone(), 0);
        let since = self.missing.get(model).map_or(self.now, |(since, _)| *since);
        self.missing.insert(model.clone(), (since, workers));
    }

    /// Whether a request waits for a worker of its model no longer.
    fn waits_in_vain(&self, waiting: &WaitingRequest) -> bool {
        let model = &waiting.request.model;
        if self.permits.get(model).is_some_and(|&permits| permits > 0) {
            return false;
        }
        match self.missing.get(model) {
            Some(&(since, WorkerAvailability::Expected { not_before, until })) => {
                let own = waiting.arrived.max(since) + WORKER_WAIT;
                let limit = until.unwrap_or(own).min(own);
                limit <= self.now || not_before > limit
            }
            _ => true,
        }
    }

    fn add_waiting(&mut self, id: AdmissionId, request: AdmissionRequest) {
        let older = self.waiting.values().filter(|other| other.request.model == request.model);
        let is_same_class =
            |other: &AdmissionRequest| other.model == request.model && class_of(other) == class_of(&request);
        let is_same_tenant =
            |other: &AdmissionRequest| is_same_class(other) && other.tenant == request.tenant;
        let is_first = !self.waiting.values().any(|other| is_same_tenant(&other.request))
            && !self.admitted.values().any(|(other, _)| is_same_tenant(other));
        let same_class = self.waiting.values().filter(|other| is_same_class(&other.request));
        let tenants: BTreeSet<&Tenant> = same_class.map(|other| &other.request.tenant).collect();
        let competition = Competition { tenants: tenants.len() as u32, ..Competition::default() };
        let waiting = WaitingRequest {
            arrived: self.now,
            overtakes_left: OLDEST_FIRST_EVERY * (older.count() as u32 + 1),
            competition: is_first.then_some(competition),
            request,
        };
        self.waiting.insert(id, waiting);
    }

    fn check_admission(&mut self, id: AdmissionId) {
        let WaitingRequest { request, .. } =
            self.waiting.remove(&id).expect("only waiting requests are admitted");
        let (model, class, total) = (&request.model, class_of(&request), self.permits[&request.model]);
        assert!(request.deadline > self.now, "admitted after its deadline");
        let other_classes = PriorityClass::ALL.into_iter().filter(|&other| other != class);
        let floors: u32 = other_classes.map(|other| self.floor(other, total)).sum();
        let permits = request.permits.min(total - floors);
        let free = total.saturating_sub(self.held_permits(model, None));
        assert!(permits <= free, "{permits} permits granted, {free} were free");
        let is_within_floor = self.held_permits(model, Some(class)) + permits <= self.floor(class, total);
        if !is_within_floor {
            let reserved = self.reserved_by_others(model, class);
            assert!(permits + reserved <= free, "floors of {reserved} permits were violated");
        }
        for other in self.waiting.values_mut().filter(|other| other.request.model == *model) {
            if other.request.tenant == request.tenant {
                // The tenant now holds a permit.
                other.competition = None;
            }
            if !is_within_floor {
                assert!(other.overtakes_left > 1, "{other:?} was overtaken too often");
                other.overtakes_left -= 1;
            }
            if let Some(competition) = &mut other.competition {
                competition.all_admissions += 1;
                competition.class_admissions += u32::from(class_of(&other.request) == class);
                let oldest_first = competition.all_admissions / OLDEST_FIRST_EVERY + 1;
                let most = competition.tenants + oldest_first;
                assert!(
                    competition.class_admissions <= most,
                    "more requests than competing tenants overtook {other:?}"
                );
            }
        }
        self.admitted.insert(id, (request.clone(), request.permits));
        self.admissions += 1;
    }

    fn check_refusal(&mut self, id: AdmissionId, error: AdmissionError, arrived: Option<AdmissionId>) {
        let removed = self.waiting.remove(&id).expect("only waiting requests are refused");
        let request = &removed.request;
        match error {
            AdmissionError::DeadlineExceeded => assert!(request.deadline <= self.now),
            AdmissionError::NoWorker { waited, retry_after } => {
                assert!(self.waits_in_vain(&removed), "{removed:?} was refused too early");
                assert_eq!(waited, self.now - removed.arrived);
                assert!((1..=60).contains(&retry_after.as_secs()));
                self.without_worker += 1;
            }
            AdmissionError::QueueFull { waiting, max, retry_after, class } => {
                assert_eq!((Some(id), class), (arrived, class_of(request)));
                assert!(waiting >= max && max <= self.limits.queue_max);
                assert_eq!(waiting as usize, self.waiting_for(&request.model).count());
                assert!((1..=60).contains(&retry_after.as_secs()));
            }
            AdmissionError::TenantQueueFull { waiting, max, retry_after } => {
                assert_eq!(Some(id), arrived);
                assert_ne!(request.tenant, Tenant::Unnamed);
                assert_eq!((waiting, max), (self.limits.tenant_queue_max, self.limits.tenant_queue_max));
                assert!((1..=60).contains(&retry_after.as_secs()));
            }
            AdmissionError::TooManyStreams { streams, max, .. } => assert!(streams + request.permits > max),
        }
        self.refusals += 1;
    }

    fn waiting_for(&self, model: &ModelKey) -> impl Iterator<Item = &WaitingRequest> {
        self.waiting.values().filter(move |waiting| waiting.request.model == *model)
    }

    fn check_state(&self, event: &AdmissionEvent) {
        let held: u32 = self.admitted.values().map(|(_, held)| held).sum();
        let wanted: u32 = self.waiting.values().map(|waiting| waiting.request.permits).sum();
        assert_eq!(self.policy.streams(), held + wanted);
        assert!(held + wanted <= self.limits.streams_max);
        for (model, &permits) in &self.permits {
            self.check_model(model, permits);
        }
        if matches!(event, AdmissionEvent::Tick) {
            assert!(!self.waiting.values().any(|waiting| self.waits_in_vain(waiting)));
            assert!(self.waiting.values().all(|waiting| waiting.request.deadline > self.now));
            assert!(self.policy.next_deadline().is_none_or(|at| at > self.now));
        }
        let first = self.waiting.values().map(|waiting| waiting.request.deadline).min();
        assert!(first.is_none_or(|first| self.policy.next_deadline().is_some_and(|at| at <= first)));
    }

    fn check_model(&self, model: &ModelKey, permits: u32) {
        let waiting: Vec<&WaitingRequest> = self.waiting_for(model).collect();
        assert!(waiting.len() as u32 <= self.limits.queue_max);
        let Some(stats) = self.policy.stats(model) else {
            assert!(permits == 0 && waiting.is_empty() && self.held_permits(model, None) == 0);
            let is_expected =
                |workers: &WorkerAvailability| matches!(workers, WorkerAvailability::Expected { .. });
            assert!(!self.missing.get(model).is_some_and(|(_, workers)| is_expected(workers)));
            return;
        };
        let mut tenants: BTreeMap<&Tenant, u32> = BTreeMap::new();
        for (class, stats) in PriorityClass::ALL.into_iter().zip(stats.classes) {
            let of_class: Vec<_> = waiting.iter().filter(|w| class_of(&w.request) == class).collect();
            assert_eq!(stats.waiting_requests as usize, of_class.len());
            assert_eq!(stats.held_permits, self.held_permits(model, Some(class)));
            of_class.iter().for_each(|w| *tenants.entry(&w.request.tenant).or_default() += 1);
            // No request for one permit waits while a permit is free.
            if permits > 0 && waiting.iter().all(|w| w.request.permits == 1) && !of_class.is_empty() {
                let free = permits.saturating_sub(self.held_permits(model, None));
                assert!(free <= self.reserved_by_others(model, class), "{class:?} could be admitted");
                let has_floor = stats.held_permits >= self.floor(class, permits);
                assert!(free == 0 || has_floor, "{class:?} is below its floor");
            }
        }
        let is_idle = permits > 0 && self.held_permits(model, None) == 0;
        assert!(!is_idle || waiting.is_empty(), "requests wait for an idle fleet");
        for (tenant, waiting) in tenants {
            assert!(*tenant == Tenant::Unnamed || waiting <= self.limits.tenant_queue_max);
        }
    }

    fn random_admitted(&self, rng: &mut SimulationRng) -> Option<AdmissionId> {
        let at = rng.below(self.admitted.len().max(1) as u64) as usize;
        self.admitted.keys().nth(at).copied()
    }

    fn random_waiting(&self, rng: &mut SimulationRng) -> Option<AdmissionId> {
        let at = rng.below(self.waiting.len().max(1) as u64) as usize;
        self.waiting.keys().nth(at).copied()
    }
}

/// What random requests a seed generates.
struct SimulatedWorkload {
    models: [ModelKey; 2],
    tenants: Vec<Tenant>,
    has_large_requests: bool,
    arrival_percent: u64,
}

impl SimulatedWorkload {
    fn random(rng: &mut SimulationRng) -> Self {
        let tenant = |n: u64| if n == 0 { Tenant::Unnamed } else { named(&n.to_string()) };
        Self {
            models: [ModelKey::numbered(0), ModelKey::numbered(1)],
            tenants: (0..1 + rng.below(6)).map(tenant).collect(),
            has_large_requests: rng.one_in(2),
            arrival_percent: 30 + rng.below(40),
        }
    }

    /// `None` if the event would need a request that does not exist.
    fn random_event(&self, simulation: &mut Simulation, rng: &mut SimulationRng) -> Option<AdmissionEvent> {
        let model = self.models[rng.below(2) as usize].clone();
        let roll = rng.below(100);
        if roll < self.arrival_percent {
            simulation.last_id += 1;
            let patience_ms = if rng.one_in(3) { 4_000 } else { 60_000 };
            let request = AdmissionRequest {
                model,
                // The first tenants send the most requests.
                tenant: self.tenants[rng.below(1 + rng.0 % self.tenants.len() as u64) as usize].clone(),
                priority: rng.below(5) as i32 - 2,
                permits: if self.has_large_requests && rng.one_in(8) { 1 + rng.below(12) as u32 } else { 1 },
                deadline: simulation.now + Duration::from_millis(rng.below(patience_ms)),
            };
            Some(AdmissionEvent::Arrived(AdmissionId(simulation.last_id), request))
        } else if roll < self.arrival_percent + 3 {
            simulation.random_waiting(rng).map(AdmissionEvent::Cancelled)
        } else if roll < self.arrival_percent + 5 {
            Some(AdmissionEvent::WorkersChanged(model, random_workers(simulation.now, rng)))
        } else if roll < self.arrival_percent + 8 {
            Some(AdmissionEvent::Tick)
        } else {
            simulation.random_admitted(rng).map(AdmissionEvent::StreamEnded)
        }
    }
}

/// In half of the cases no worker is ready: one starts soon or late, or never.
fn random_workers(now: Uptime, rng: &mut SimulationRng) -> WorkerAvailability {
    let soon = Duration::from_millis(rng.below(12_000));
    match rng.below(8) {
        0 => WorkerAvailability::Gone,
        1 => WorkerAvailability::Expected { not_before: now, until: Some(now + soon) },
        2 => WorkerAvailability::Expected { not_before: now + soon, until: None },
        3 => WorkerAvailability::Expected { not_before: now, until: None },
        _ => WorkerAvailability::Ready { permits: 1 + rng.below(19) as u32 },
    }
}

/// Returns the number of admissions, of refusals, and of refusals for lack of a worker.
fn simulate(seed: u64, steps: u64) -> (u64, u64, u64) {
    let mut rng = SimulationRng(seed);
    let queue_max = 1 + rng.below(40) as u32;
    let limits = AdmissionLimits {
        streams_max: 20 + rng.below(200) as u32,
        queue_max,
        tenant_queue_max: 1 + rng.below(u64::from(queue_max)) as u32,
        interactive_floor: rng.below(46) as u32,
        batch_floor: rng.below(46) as u32,
        worker_wait: WORKER_WAIT,
    };
    let workload = SimulatedWorkload::random(&mut rng);
    let mut simulation = Simulation::new(limits);
    for _ in 0..steps {
        simulation.now += Duration::from_millis(rng.below(300));
        if let Some(event) = workload.random_event(&mut simulation, &mut rng) {
            simulation.handle(event);
        }
    }
    // All workers leave and all streams end: the policy holds nothing.
    for model in &workload.models {
        simulation.handle(AdmissionEvent::WorkersChanged(model.clone(), WorkerAvailability::Gone));
    }
    assert!(simulation.waiting.is_empty());
    while let Some(id) = simulation.random_admitted(&mut rng) {
        simulation.handle(AdmissionEvent::StreamEnded(id));
    }
    assert!(simulation.policy.models.is_empty() && simulation.policy.requests.is_empty());
    (simulation.admissions, simulation.refusals, simulation.without_worker)
}

fn simulate_seeds(seeds: std::ops::Range<u64>) {
    let steps = (seeds.end - seeds.start) * STEPS_PER_SEED;
    let (mut admissions, mut refusals, mut without_worker) = (0, 0, 0);
    for seed in seeds {
        let outcome = std::panic::catch_unwind(|| simulate(seed, STEPS_PER_SEED));
        let (admitted, refused, no_worker) =
            outcome.unwrap_or_else(|_| panic!("seed {seed} violated an invariant"));
        admissions += admitted;
        refusals += refused;
        without_worker += no_worker;
    }
    let is_mixed = admissions > steps / 20 && refusals > steps / 20 && without_worker > steps / 100;
    assert!(is_mixed, "{admissions} admissions, {refusals} refusals, {without_worker} without a worker");
}

#[test]
fn random_events_violate_no_invariant() {
    simulate_seeds(0..500);
}

#[test]
#[ignore = "nightly"]
fn nightly_a_hundred_million_events_violate_no_invariant() {
    simulate_seeds(1_000_000..1_050_000);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever one tenant did before, the first request of another tenant is admitted with the
    /// third permit that becomes free, at the latest. One permit may go to the first tenant if it
    /// holds none, one to the oldest request.
    #[test]
    fn a_flood_of_one_tenant_does_not_delay_another_tenant(
        permits in 1u32..20,
        flood in 1u32..100,
        ended in prop::collection::vec(any::<prop::sample::Index>(), 0..60),
    ) {
        let limits = AdmissionLimits {
            streams_max: 1000, queue_max: 200, tenant_queue_max: 150, interactive_floor: 0, batch_floor: 0,
            worker_wait: WORKER_WAIT,
        };
        let mut simulation = Simulation::new(limits);
        let model = ModelKey::numbered(0);
        simulation.handle(ready(model.clone(), permits));
        let arrive = |simulation: &mut Simulation, tenant: &str| {
            simulation.last_id += 1;
            let id = AdmissionId(simulation.last_id);
            let deadline = Duration::from_secs(600);
            simulation.handle(AdmissionEvent::Arrived(id, AdmissionRequest {
                model: model.clone(), tenant: named(tenant), priority: 0, permits: 1, deadline,
            }));
            id
        };
        for _ in 0..permits + flood {
            arrive(&mut simulation, "flood");
        }
        for index in ended {
            simulation.now += Duration::from_millis(10);
            let admitted: Vec<AdmissionId> = simulation.admitted.keys().copied().collect();
            simulation.handle(AdmissionEvent::StreamEnded(*index.get(&admitted)));
            arrive(&mut simulation, "flood");
        }
        let other = arrive(&mut simulation, "other");
        for _ in 0..3 {
            let Some(admitted) = simulation.admitted.keys().copied().find(|&id| id != other) else { break };
            simulation.handle(AdmissionEvent::StreamEnded(admitted));
        }
        prop_assert!(simulation.admitted.contains_key(&other));
    }
}
