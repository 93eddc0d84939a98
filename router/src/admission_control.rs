// SPDX-License-Identifier: Apache-2.0

//! Runs the [`AdmissionPolicy`]: tells it about arrivals, ended streams, workers and time, and
//! carries out its decisions.
//!
//! 1. A small lock guards the policy. It is held for a few map operations and never across an
//!    await.
//! 2. An admitted request holds [`StreamPermits`], which release themselves when dropped. So a
//!    client that disconnects while waiting, and a stream that ends, free capacity at once.
//! 3. [`AdmissionController::run`] tells the policy about workers that join or leave and about
//!    deadlines.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::admission::{
    AdmissionDecision, AdmissionError, AdmissionEvent, AdmissionId, AdmissionLimits, AdmissionPolicy,
    AdmissionRequest, ModelAdmissionStats, PriorityClass, Uptime, WorkerAvailability,
};
use crate::metrics;
use crate::registry::WorkerRegistry;
use crate::routing::ModelKey;

#[derive(Debug)]
pub(crate) struct AdmissionController {
    registry: Arc<WorkerRegistry>,
    start: Instant,
    limits: AdmissionLimits,
    state: Mutex<ControllerState>,
    /// Wakes [`AdmissionController::run`] because the next deadline may have become earlier.
    deadline_changed: Notify,
}

#[derive(Debug)]
struct ControllerState {
    policy: AdmissionPolicy,
    /// Where to send the decision about each waiting request.
    waiting: HashMap<AdmissionId, oneshot::Sender<Result<(), AdmissionError>>>,
    /// Models that the policy knows: they have workers, or are expected to have some.
    models: BTreeSet<ModelKey>,
    /// The router is stopping: no request waits for a worker any longer.
    is_draining: bool,
    last_id: u64,
}

/// Permits for streams on the workers of a model, from the arrival of a request to the end of its
/// last stream. Dropping the value releases the permits, or cancels the request if it is still
/// waiting.
#[derive(Debug)]
pub(crate) struct StreamPermits {
    controller: Arc<AdmissionController>,
    id: AdmissionId,
    count: u32,
}

impl StreamPermits {
    /// Splits off the permits of some streams.
    pub(crate) fn split(&mut self, count: u32) -> StreamPermits {
        assert!(self.count >= count, "a request has one permit for each of its streams");
        self.count -= count;
        StreamPermits { controller: self.controller.clone(), id: self.id, count }
    }

    /// How long a new request would wait for a worker of a model that lost its worker at `lost`.
    /// `None`: it would not wait.
    pub(crate) fn worker_wait(&self, model: &ModelKey, lost: Instant) -> Option<Duration> {
        let AdmissionController { registry, limits, .. } = &*self.controller;
        let wait = limits.worker_wait;
        let is_expected = || {
            let expected = registry.next_worker(model, wait);
            expected.is_some_and(|expected| expected.not_before <= lost + wait)
        };
        let may_wait = registry.has_workers_of(model) || !self.controller.lock().is_draining && is_expected();
        may_wait.then_some(wait)
    }
}

impl Drop for StreamPermits {
    fn drop(&mut self) {
        self.controller.release(self.id, self.count);
    }
}

impl AdmissionController {
    pub(crate) fn new(registry: Arc<WorkerRegistry>, limits: AdmissionLimits) -> Arc<Self> {
        let state = ControllerState {
            policy: AdmissionPolicy::new(limits),
            waiting: HashMap::new(),
            models: BTreeSet::new(),
            is_draining: false,
            last_id: 0,
        };
        let (start, deadline_changed) = (Instant::now(), Notify::new());
        Arc::new(Self { registry, start, limits, state: Mutex::new(state), deadline_changed })
    }

    /// Maximum number of streams in this process.
    pub(crate) fn streams_max(&self) -> u32 {
        self.limits.streams_max
    }

    /// How long a request waits for a worker of a model that has none.
    pub(crate) fn worker_wait(&self) -> Duration {
        self.limits.worker_wait
    }

    pub(crate) fn uptime_at(&self, at: Instant) -> Uptime {
        at.saturating_duration_since(self.start)
    }

    /// Waits until the request is admitted, at most until its deadline. Dropping the future removes
    /// the request from the waiting queue.
    pub(crate) async fn admit(
        self: &Arc<Self>,
        model_name: &str,
        request: AdmissionRequest,
    ) -> Result<StreamPermits, AdmissionError> {
        let (class, count) = (PriorityClass::of_priority(request.priority), request.permits);
        let arrived = Instant::now();
        let (sender, decision) = oneshot::channel();
        let id = self.submit(request, sender);
        let permits = StreamPermits { controller: self.clone(), id, count };
        self.deadline_changed.notify_one();
        decision.await.expect("the policy answers every request once")?;
        metrics::record_queue_time(model_name, class, arrived.elapsed());
        Ok(permits)
    }

    fn submit(
        &self,
        request: AdmissionRequest,
        sender: oneshot::Sender<Result<(), AdmissionError>>,
    ) -> AdmissionId {
        let mut state = self.lock();
        state.last_id += 1;
        let id = AdmissionId(state.last_id);
        state.waiting.insert(id, sender);
        // Counts a worker that joined or left after the last refresh.
        self.update_workers(&mut state, &request.model);
        let now = self.uptime_at(Instant::now());
        state.handle(now, AdmissionEvent::Arrived(id, request));
        id
    }

    /// Streams that run or wait, of all models.
    pub(crate) fn streams(&self) -> u32 {
        self.lock().policy.streams()
    }

    pub(crate) fn stats(&self, model: &ModelKey) -> Option<ModelAdmissionStats> {
        self.lock().policy.stats(model)
    }

    /// The queues of models that the router has not heard, by name.
    pub(crate) fn unheard_stats(&self) -> Vec<(ModelKey, ModelAdmissionStats)> {
        let state = self.lock();
        let unheard = state.models.iter().filter(|model| model.is_unheard());
        unheard.filter_map(|model| Some((model.clone(), state.policy.stats(model)?))).collect()
    }

    /// Tells the policy about workers that join or leave and about deadlines, until `stop`.
    pub(crate) async fn run(self: Arc<Self>, stop: CancellationToken) {
        let mut changes = self.registry.subscribe();
        loop {
            let deadline = self.refresh();
            let wait = async {
                match deadline {
                    Some(deadline) => tokio::time::sleep_until(self.start + deadline).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = wait => {}
                // The sender lives as long as the registry.
                _ = changes.changed() => {}
                () = self.deadline_changed.notified() => {}
                () = stop.cancelled() => return,
            }
        }
    }

    /// Refuses requests that wait for a worker, now and from now on. Others wait and run on.
    pub(crate) fn begin_drain(&self) {
        self.lock().is_draining = true;
        self.refresh();
    }

    /// Updates the workers of every model. Returns the next deadline.
    fn refresh(&self) -> Option<Uptime> {
        let mut state = self.lock();
        let known = state.models.iter().cloned();
        let models: BTreeSet<ModelKey> = self.registry.model_keys().into_iter().chain(known).collect();
        for model in models {
            self.update_workers(&mut state, &model);
            let waits = state.policy.stats(&model).is_some_and(|stats| stats.has_waiting());
            if waits && !self.registry.has_workers_of(&model) {
                self.registry.want_worker(&model.name);
            }
        }
        let now = self.uptime_at(Instant::now());
        state.handle(now, AdmissionEvent::Tick);
        state.policy.next_deadline()
    }

    /// Reads the registry under the policy's lock, so that the policy never keeps an older state.
    fn update_workers(&self, state: &mut ControllerState, model: &ModelKey) {
        let permits = self.limits.permits(self.registry.capacity(model));
        let expected = || self.registry.next_worker(model, self.limits.worker_wait);
        let workers = match (permits, state.is_draining) {
            (1.., _) => WorkerAvailability::Ready { permits },
            (0, true) => WorkerAvailability::Gone,
            (0, false) => {
                expected().map_or(WorkerAvailability::Gone, |expected| WorkerAvailability::Expected {
                    not_before: self.uptime_at(expected.not_before),
                    until: expected.until.map(|until| self.uptime_at(until)),
                })
            }
        };
        if workers != WorkerAvailability::Gone {
            state.models.insert(model.clone());
        } else if !state.models.remove(model) {
            return;
        }
        let now = self.uptime_at(Instant::now());
        state.handle(now, AdmissionEvent::WorkersChanged(model.clone(), workers));
    }

    /// Releases `count` permits of an admitted request, or cancels a waiting request.
    fn release(&self, id: AdmissionId, count: u32) {
        let mut state = self.lock();
        let now = self.uptime_at(Instant::now());
        if state.waiting.remove(&id).is_some() {
            return state.handle(now, AdmissionEvent::Cancelled(id));
        }
        for _ in 0..count {
            state.handle(now, AdmissionEvent::StreamEnded(id));
        }
    }

    fn lock(&self) -> MutexGuard<'_, ControllerState> {
        // A panic under this lock is a bug that ends the process in release builds (panic = abort).
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ControllerState {
    fn handle(&mut self, now: Uptime, event: AdmissionEvent) {
        for decision in self.policy.handle(now, event) {
            let (id, answer) = match decision {
                AdmissionDecision::Admit(id) => (id, Ok(())),
                AdmissionDecision::Refuse(id, error) => (id, Err(error)),
            };
            if let Some(sender) = self.waiting.remove(&id) {
                // If the client has just gone, dropping its permits releases them.
                let _gone = sender.send(answer);
            }
        }
    }
}
