// SPDX-License-Identifier: Apache-2.0

//! The router process around its real policies: admission, routing, quarantine, opening of streams
//! and failover. It does in the simulation what registry, controllers and tasks of choices do.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use router::RoutingMode;
use router::admission::{
    AdmissionDecision, AdmissionEvent, AdmissionId, AdmissionLimits, AdmissionPolicy, ModelCapacity,
    WorkerAvailability, WorkerCapacity,
};
use router::quarantine::QuarantinePolicy;
use router::routing::{ModelKey, RoutingPolicy, WorkerFingerprint, WorkerId, WorkerProfile, WorkerReport};

use crate::fleet::Fleet;
use crate::messages::{Message, Notice, ToRouter};
use crate::network::{Micros, SECOND, SimPid};
use crate::streams::SimRequest;
use crate::weights::MODELS;
use crate::worker_process::{BLOCK_TOKENS, KV_BLOCKS, QUEUE_MAX, RUNNING_MAX};

/// For how long a content is refused.
pub(crate) const QUARANTINE: Duration = Duration::from_secs(600);

const LIMITS: AdmissionLimits = AdmissionLimits {
    streams_max: 64,
    queue_max: 32,
    tenant_queue_max: 16,
    interactive_floor: 0,
    batch_floor: 0,
    worker_wait: Duration::from_secs(30),
};

const CAPACITY: WorkerCapacity = WorkerCapacity {
    running_max: RUNNING_MAX as u32,
    queue_max: QUEUE_MAX as u32,
    batch_queue_max: QUEUE_MAX as u32,
    tenant_queue_max: QUEUE_MAX as u32,
    kv_blocks: KV_BLOCKS as u64,
    kv_block_tokens: BLOCK_TOKENS as u32,
};

#[derive(Debug)]
pub(crate) struct KnownWorker {
    pub(crate) pid: SimPid,
    pub(crate) key: ModelKey,
    pub(crate) source: u64,
    generation: u64,
}

#[derive(Debug)]
pub(crate) struct SimRouter {
    pub(crate) pid: SimPid,
    pub(crate) is_ready: bool,
    pub(crate) admission: AdmissionPolicy,
    pub(crate) routing: RoutingPolicy,
    pub(crate) quarantine: QuarantinePolicy,
    pub(crate) workers: BTreeMap<WorkerId, KnownWorker>,
    pub(crate) requests: BTreeMap<u64, SimRequest>,
    /// The request of each open call.
    pub(crate) calls: BTreeMap<u64, (u64, SimPid)>,
    /// Requests that wait for a change of the workers.
    pub(crate) waiting: BTreeSet<u64>,
    /// Requests that the quarantine keeps from all workers.
    pub(crate) blocked: BTreeSet<u64>,
    last_worker: u64,
    tick_at: Micros,
}

/// The key under which workers of a file serve a model.
pub(crate) fn key_of(model: u8, source: u64) -> ModelKey {
    let fingerprint = WorkerFingerprint(source.to_le_bytes().to_vec());
    ModelKey { name: MODELS[usize::from(model)].into(), fingerprint }
}

impl SimRouter {
    pub(crate) fn new(pid: SimPid) -> Self {
        Self {
            pid,
            is_ready: false,
            admission: AdmissionPolicy::new(LIMITS),
            routing: RoutingPolicy::new(RoutingMode::Auto),
            quarantine: QuarantinePolicy::new(QUARANTINE),
            workers: BTreeMap::new(),
            requests: BTreeMap::new(),
            calls: BTreeMap::new(),
            waiting: BTreeSet::new(),
            blocked: BTreeSet::new(),
            last_worker: 0,
            tick_at: Micros::MAX,
        }
    }

    pub(crate) fn streams_on(&self, worker: SimPid) -> Vec<u64> {
        self.calls.iter().filter(|(_, (_, pid))| *pid == worker).map(|(stream, _)| *stream).collect()
    }

    /// The model of that name: the newest one that has workers.
    pub(crate) fn resolve(&self, model: &str) -> Option<(ModelKey, u64)> {
        let named = self.workers.values().filter(|worker| &*worker.key.name == model);
        named.max_by_key(|worker| worker.generation).map(|worker| (worker.key.clone(), worker.source))
    }

    fn permits(&self, key: &ModelKey) -> u32 {
        let workers = self.workers.values().filter(|worker| worker.key == *key);
        LIMITS.permits(workers.map(|_| CAPACITY).collect::<ModelCapacity>())
    }
}

impl Fleet {
    /// Time since the start. The router's policies only compare times.
    pub(crate) fn uptime(&self) -> Duration {
        Duration::from_micros(self.net.now)
    }

    pub(crate) fn handle_router(&mut self, event: ToRouter) {
        match event {
            ToRouter::Ready => {
                let Some(router) = self.router.as_mut() else { return };
                router.is_ready = true;
                let pid = router.pid;
                self.notify(pid, Notice::Ready);
                let workers: Vec<SimPid> = self.workers.keys().copied().collect();
                workers.into_iter().for_each(|worker| self.report_serving(worker));
            }
            ToRouter::Tick => {
                if let Some(router) = self.router.as_mut() {
                    router.tick_at = Micros::MAX;
                }
                self.admit(AdmissionEvent::Tick);
            }
            ToRouter::WorkerServes { pid, model, source, generation } => {
                if self.is_alive(pid) {
                    self.register_worker(pid, model, source, generation);
                }
            }
            ToRouter::WorkerGone { pid } => {
                let workers = self.router.iter().flat_map(|router| &router.workers);
                let gone: Vec<WorkerId> =
                    workers.filter(|(_, worker)| worker.pid == pid).map(|(id, _)| *id).collect();
                gone.into_iter().for_each(|id| self.remove_worker_from_router(id));
            }
            ToRouter::Report { pid, running, waiting, steps } => {
                let now = self.uptime();
                let Some(router) = self.router.as_mut() else { return };
                let known = router.workers.iter().find(|(_, worker)| worker.pid == pid);
                if let Some((&id, _)) = known {
                    let report = WorkerReport { running, waiting, steps, ..WorkerReport::default() };
                    router.routing.update_load(id, report, now);
                }
            }
            ToRouter::Frame { stream, frame } => self.handle_stream_frame(stream, frame),
            ToRouter::Retry { request, number } => self.retry_request(request, number),
        }
        self.check_router();
    }

    fn register_worker(&mut self, pid: SimPid, model: u8, source: u64, generation: u64) {
        let now = self.uptime();
        let Some(router) = self.router.as_mut().filter(|router| router.is_ready) else { return };
        if router.workers.values().any(|worker| worker.pid == pid) {
            return;
        }
        let key = key_of(model, source);
        router.last_worker += 1;
        let id = WorkerId(router.last_worker);
        let profile = WorkerProfile {
            name: pid.to_string().into(),
            model: key.clone(),
            device: Arc::from("host"),
            running_max: CAPACITY.running_max,
            kv_tokens: CAPACITY.kv_blocks * u64::from(CAPACITY.kv_block_tokens),
        };
        router.routing.add_worker(id, profile, now);
        router.workers.insert(id, KnownWorker { pid, key: key.clone(), source, generation });
        self.workers_changed(key);
    }

    pub(crate) fn remove_worker_from_router(&mut self, id: WorkerId) {
        let Some(router) = self.router.as_mut() else { return };
        router.routing.remove_worker(id);
        if let Some(worker) = router.workers.remove(&id) {
            self.workers_changed(worker.key);
        }
    }

    fn workers_changed(&mut self, key: ModelKey) {
        let Some(router) = self.router.as_ref() else { return };
        let now = self.uptime();
        let workers = match router.permits(&key) {
            // As without a supervisor that answers.
            0 => WorkerAvailability::Expected { not_before: now, until: Some(now + LIMITS.worker_wait) },
            permits => WorkerAvailability::Ready { permits },
        };
        self.admit(AdmissionEvent::WorkersChanged(key, workers));
        let waiting = self.router.as_mut().map(|router| std::mem::take(&mut router.waiting));
        waiting.unwrap_or_default().into_iter().for_each(|request| self.wake_request(request));
    }

    /// Gives an event to admission control and carries out its decisions.
    pub(crate) fn admit(&mut self, event: AdmissionEvent) {
        let now = self.uptime();
        let Some(router) = self.router.as_mut() else { return };
        let decisions = router.admission.handle(now, event);
        for decision in decisions {
            match decision {
                AdmissionDecision::Admit(AdmissionId(request)) => self.request_admitted(request),
                AdmissionDecision::Refuse(AdmissionId(request), error) => {
                    self.request_refused_by_admission(request, error);
                }
            }
        }
        let Some(router) = self.router.as_mut() else { return };
        if let Some(deadline) = router.admission.next_deadline() {
            let at = (deadline.as_micros() as Micros).max(self.net.now);
            if at < router.tick_at {
                router.tick_at = at;
                let after = (at - self.net.now).min(60 * SECOND);
                self.net.timer(router.pid, after, Message::Router(ToRouter::Tick));
            }
        }
    }

    /// A trial ended: blocked requests look again.
    pub(crate) fn wake_blocked(&mut self) {
        let blocked = self.router.as_mut().map(|router| std::mem::take(&mut router.blocked));
        blocked.unwrap_or_default().into_iter().for_each(|request| self.wake_request(request));
    }
}
