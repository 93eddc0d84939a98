//! The workers that serve now, and their models: what [`crate::worker_link`] finds out and everybody else asks.
//!
//! One small lock around plain values, held for a few map operations and never over an await. A worker is in here only
//! while it is healthy: it joins when its metadata is known and leaves with its connection.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use proto::worker::v1::worker_client::WorkerClient;
use tokio::sync::watch;
use tonic::transport::Channel;

use crate::admission::{Room, Seats};
use crate::model::Model;
use crate::placement::{ModelKey, Placement, Report, WorkerId};

/// Models without a worker whose tokenizers are kept, so that a restarted worker serves at once.
const IDLE_MODELS_MAX: usize = 8;

#[derive(Debug)]
pub(crate) struct Fleet {
    state: Mutex<State>,
    changes: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct State {
    placement: Placement,
    workers: BTreeMap<WorkerId, Worker>,
    /// In order of joining; one for each key.
    models: Vec<Arc<Model>>,
    workers_seen: u64,
}

#[derive(Debug)]
struct Worker {
    name: String,
    model: Arc<Model>,
    client: WorkerClient<Channel>,
    seats: Seats,
    report: Report,
}

/// Whom to call.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    pub(crate) worker: WorkerId,
    pub(crate) worker_name: String,
    pub(crate) client: WorkerClient<Channel>,
}

/// A stream's place on a worker: counted there until this is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    fleet: Arc<Fleet>,
    pub(crate) peer: Peer,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.fleet.lock().placement.end(self.peer.worker);
    }
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ResolveError {
    #[error("the model `{name}` does not exist; served are: {}", .known.join(", "))]
    Unknown { name: String, known: Vec<String> },
    #[error("`model` is missing; served are: {}", .known.join(", "))]
    Ambiguous { known: Vec<String> },
    #[error("no model is served yet")]
    None,
}

/// A model with what serves it, for listings and metrics.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) model: Arc<Model>,
    pub(crate) workers: Vec<ServedBy>,
}

#[derive(Debug)]
pub(crate) struct ServedBy {
    pub(crate) name: String,
    pub(crate) in_flight: u32,
    pub(crate) report: Report,
}

impl Fleet {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), changes: watch::channel(0).0 })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The closures below do not panic half way: a poisoned state is a whole one.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A model with this content, whose text side another of that content shares; the one with this key if there is one.
    pub(crate) fn sibling(&self, key: &ModelKey, digest: &[u8]) -> Option<Arc<Model>> {
        let state = self.lock();
        let siblings = state.models.iter().filter(|model| model.about.digest == digest);
        siblings.max_by_key(|model| model.key() == key).cloned()
    }

    pub(crate) fn join(
        &self,
        name: String,
        model: Arc<Model>,
        client: WorkerClient<Channel>,
        seats: Seats,
    ) -> WorkerId {
        let mut state = self.lock();
        state.workers_seen += 1;
        let id = WorkerId(state.workers_seen);
        state.placement.join(id, model.key().clone(), seats.running_max);
        state.models.retain(|known| known.key() != model.key());
        state.models.push(model.clone());
        state.workers.insert(id, Worker { name, model, client, seats, report: Report::default() });
        state.forget_idle_models();
        drop(state);
        self.changes.send_modify(|n| *n += 1);
        id
    }

    /// Idempotent: the link and a broken stream may both notice.
    pub(crate) fn leave(&self, id: WorkerId) {
        let mut state = self.lock();
        state.placement.leave(id);
        state.workers.remove(&id);
        drop(state);
        self.changes.send_modify(|n| *n += 1);
    }

    pub(crate) fn report(&self, id: WorkerId, report: Report) {
        let mut state = self.lock();
        state.placement.report(id, report);
        if let Some(worker) = state.workers.get_mut(&id) {
            worker.report = report;
        }
    }

    /// A place on the least loaded worker of this model that is not among `tried`; on the one that has `beside`, while
    /// that has a seat free.
    pub(crate) fn place(
        self: &Arc<Self>,
        model: &ModelKey,
        tried: &[WorkerId],
        beside: Option<WorkerId>,
    ) -> Option<Place> {
        let mut state = self.lock();
        let worker = state.placement.begin(model, tried, beside)?;
        let Some(peer) = state.peer(worker) else {
            state.placement.leave(worker);
            return None;
        };
        drop(state);
        Some(Place { fleet: self.clone(), peer })
    }

    /// Who would get this model's next stream, without giving it one.
    pub(crate) fn least_loaded(&self, model: &ModelKey, tried: &[WorkerId]) -> Option<Peer> {
        let state = self.lock();
        let worker = state.placement.least_loaded(model, tried)?;
        state.peer(worker)
    }

    /// What this model's workers have room for.
    pub(crate) fn room(&self, model: &ModelKey) -> Room {
        let state = self.lock();
        let workers = state.workers.values().filter(|worker| worker.model.key() == model);
        workers.map(|worker| worker.seats).collect()
    }

    /// Of every known model.
    pub(crate) fn keys(&self) -> Vec<ModelKey> {
        self.lock().models.iter().map(|model| model.key().clone()).collect()
    }

    /// Changes whenever a worker joins or leaves.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// The model of that name; of two with one name (a swap in progress) the newer one that has workers.
    pub(crate) fn resolve(&self, name: Option<&str>) -> Result<Arc<Model>, ResolveError> {
        let state = self.lock();
        let known = || {
            let mut names: Vec<String> = state.models.iter().map(|model| model.name().to_owned()).collect();
            names.sort();
            names.dedup();
            names
        };
        let name = match (name, known()) {
            (_, names) if names.is_empty() => return Err(ResolveError::None),
            (Some(name), _) => name.to_owned(),
            (None, mut names) if names.len() == 1 => names.remove(0),
            (None, known) => return Err(ResolveError::Ambiguous { known }),
        };
        state
            .models
            .iter()
            .filter(|model| model.name() == name)
            .max_by_key(|model| (state.placement.serving(model.key()) > 0, model.about.generation))
            .cloned()
            .ok_or_else(|| ResolveError::Unknown { name, known: known() })
    }

    /// Whether anybody serves anything.
    pub(crate) fn is_ready(&self) -> bool {
        !self.lock().workers.is_empty()
    }

    /// Every known model, by name.
    pub(crate) fn served(&self) -> Vec<Served> {
        let state = self.lock();
        let mut served: Vec<Served> = state
            .models
            .iter()
            .map(|model| Served {
                model: model.clone(),
                workers: state
                    .workers
                    .iter()
                    .filter(|(_, worker)| worker.model.key() == model.key())
                    .map(|(&id, worker)| ServedBy {
                        name: worker.name.clone(),
                        in_flight: state.placement.in_flight(id),
                        report: worker.report,
                    })
                    .collect(),
            })
            .collect();
        served.sort_by(|a, b| {
            (a.model.name(), a.model.about.generation).cmp(&(b.model.name(), b.model.about.generation))
        });
        served
    }
}

impl State {
    fn peer(&self, id: WorkerId) -> Option<Peer> {
        let Worker { name, client, .. } = self.workers.get(&id)?;
        Some(Peer { worker: id, worker_name: name.clone(), client: client.clone() })
    }

    fn forget_idle_models(&mut self) {
        let placement = &self.placement;
        let idle = |model: &Arc<Model>| placement.serving(model.key()) == 0;
        let mut excess = self.models.iter().filter(|m| idle(m)).count().saturating_sub(IDLE_MODELS_MAX);
        self.models.retain(|model| {
            let forget = excess > 0 && idle(model);
            excess -= usize::from(forget);
            !forget
        });
    }
}
