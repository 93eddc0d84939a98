// SPDX-License-Identifier: Apache-2.0

//! Registry of the workers that serve now and of their models. [`crate::worker_link`] registers
//! workers, all other parts of the router query the registry.
//!
//! 1. One small lock guards plain values. It is held for a few map operations and never across an
//!    await.
//! 2. The registered workers are healthy: a worker is registered when its metadata is known and
//!    removed when its connection ends. Workers that the router cannot serve are listed apart.
//! 3. The registry and its routing policy hold the same workers.

mod file_versions;
mod listing;
mod model_choice;
mod prefix_caches;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use proto::worker::v1::worker_client::WorkerClient;
use service::printable::excerpt;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tonic::transport::Channel;

use crate::access::ModelAccess;
use crate::admission::{ModelCapacity, WorkerCapacity};
use crate::metrics;
use crate::model::{ServedModel, ServedModelInfo};
use crate::refused_workers::{RefusedWorkers, SocketId};
use crate::routing::{
    ModelKey, RouterTime, RoutingMode, RoutingPolicy, StreamDemand, StreamPlacement, WorkerId, WorkerProfile,
    WorkerReport,
};
use crate::worker_outlook::{ExpectedWorker, SupervisorReply, WorkerOutlook};

use file_versions::FileVersions;
pub(crate) use file_versions::ModelFiles;
pub(crate) use listing::{ModelSnapshot, UnheardModel, WorkerSnapshot};

/// Maximum length of a client's text in an error.
pub(crate) const QUOTED_CHARS_MAX: usize = 80;
/// Maximum number of models without a worker whose tokenizers stay loaded, beside those that the
/// supervisor lists. So a restarted worker serves at once.
const IDLE_MODELS_MAX: usize = 8;

#[derive(Debug)]
pub(crate) struct WorkerRegistry {
    start: Instant,
    state: Mutex<RegistryState>,
    /// Counts changes of the sets of workers, registered and refused.
    changes: watch::Sender<u64>,
    /// A request waits for an idle model.
    wake_wanted: Notify,
    /// A request names a model that the supervisor has not listed.
    answer_wanted: Notify,
}

#[derive(Debug, Default)]
struct RegistryState {
    routing: RoutingPolicy,
    workers: BTreeMap<WorkerId, RegisteredWorker>,
    /// One for each key, in the order of registration. Workers with equal descriptions share it, so
    /// that its references count the requests that hold it.
    models: Vec<Arc<ServedModel>>,
    /// The digest that each model of the fleet is to have, as the supervisor has last said. Empty
    /// if no weights of the model are known.
    preferred: HashMap<String, Vec<u8>>,
    files: FileVersions,
    outlook: WorkerOutlook,
    /// Idle models that requests wait for and that the supervisor was not yet asked to wake.
    wanted: BTreeSet<String>,
    /// When models without workers lost their last one.
    lost: HashMap<ModelKey, Instant>,
    last_worker_id: u64,
    refused: RefusedWorkers,
    /// Sockets in the runtime directory whose workers have told their model since this router
    /// started. A worker that restarts binds the same path.
    identified: HashSet<PathBuf>,
    /// Sockets of the last scan whose workers have neither told their model nor been refused.
    unidentified: HashSet<SocketId>,
    /// Sockets of the first scan: workers that are older than this router.
    older: Option<HashSet<SocketId>>,
}

#[derive(Debug)]
struct RegisteredWorker {
    name: String,
    model: Arc<ServedModel>,
    device: Arc<str>,
    /// Of its copy of the weights.
    generation: u64,
    client: WorkerClient<Channel>,
    capacity: WorkerCapacity,
    report: WorkerReport,
}

/// A worker and the client to call it with.
#[derive(Clone, Debug)]
pub(crate) struct WorkerHandle {
    pub(crate) id: WorkerId,
    pub(crate) name: String,
    pub(crate) client: WorkerClient<Channel>,
}

/// A stream that is placed on a worker. The routing policy counts it until this value is dropped.
#[derive(Debug)]
pub(crate) struct PlacedStream {
    registry: Arc<WorkerRegistry>,
    /// Absent only while the value is dropped.
    placement: Option<StreamPlacement>,
    pub(crate) worker: WorkerHandle,
}

impl PlacedStream {
    /// The stream has its first token. Idempotent.
    pub(crate) fn end_prefill(&mut self) {
        // The lock is taken once a stream, not once a token.
        if let Some(placement) = self.placement.as_mut().filter(|placement| placement.is_in_prefill()) {
            self.registry.lock().routing.end_prefill(placement);
        }
    }
}

impl Drop for PlacedStream {
    fn drop(&mut self) {
        if let Some(placement) = self.placement.take() {
            let now = self.registry.now();
            self.registry.lock().routing.end_stream(placement, now);
        }
    }
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ResolveError {
    #[error("the model `{name}` does not exist; served models: {}", list(.known))]
    Unknown { name: String, known: Vec<String> },
    #[error("`model` is missing; served models: {}", list(.known))]
    Ambiguous { known: Vec<String> },
    #[error("the model `{name}` cannot be loaded: {why}")]
    Failed { name: String, why: String },
    #[error("no worker serves a model yet")]
    NoModel,
    #[error("not every worker has told its model yet")]
    NotAllKnown,
}

fn list(models: &[String]) -> String {
    match models {
        [] => "none".to_owned(),
        models => models.join(", "),
    }
}

impl ResolveError {
    /// Quotes the name that the client sent, however long it is.
    pub(crate) fn unknown(name: &str, known: Vec<String>) -> Self {
        Self::Unknown { name: excerpt(name, QUOTED_CHARS_MAX), known }
    }
}

impl WorkerRegistry {
    pub(crate) fn new(mode: RoutingMode) -> Arc<Self> {
        let state = RegistryState { routing: RoutingPolicy::new(mode), ..RegistryState::default() };
        let (changes, wake_wanted) = (watch::channel(0).0, Notify::new());
        let (start, answer_wanted) = (Instant::now(), Notify::new());
        Arc::new(Self { start, state: state.into(), changes, wake_wanted, answer_wanted })
    }

    fn now(&self) -> RouterTime {
        self.start.elapsed()
    }

    fn lock(&self) -> MutexGuard<'_, RegistryState> {
        // A panic under this lock is a bug that ends the process in release builds (panic = abort).
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A model with the same content, whose tokenizer a new model can share. Prefers a model with
    /// the same chat template, then the one with the same key.
    pub(crate) fn model_with_content(&self, description: &ServedModelInfo) -> Option<Arc<ServedModel>> {
        let state = self.lock();
        let same_content = state.models.iter().filter(|model| model.description.digest == description.digest);
        let order =
            |model: &&Arc<ServedModel>| (model.has_text_of(description), *model.key() == description.key);
        same_content.max_by_key(order).cloned()
    }

    pub(crate) fn register(
        &self,
        name: String,
        model: Arc<ServedModel>,
        client: WorkerClient<Channel>,
        device: Arc<str>,
        capacity: WorkerCapacity,
    ) -> WorkerId {
        let generation = model.description.generation;
        let profile = WorkerProfile {
            name: name.as_str().into(),
            model: model.key().clone(),
            device: device.clone(),
            running_max: capacity.running_max,
            kv_tokens: capacity.kv_blocks.saturating_mul(u64::from(capacity.kv_block_tokens)),
        };
        let mut state = self.lock();
        state.last_worker_id += 1;
        let id = WorkerId(state.last_worker_id);
        state.routing.add_worker(id, profile, self.now());
        let known = state.models.iter().find(|known| known.is_equal_but_for_copy(&model)).cloned();
        let model = known.unwrap_or(model);
        state.models.retain(|known| known.key() != model.key());
        state.models.push(model.clone());
        state.lost.remove(model.key());
        let report = WorkerReport::default();
        let worker = RegisteredWorker { name, model, device, generation, client, capacity, report };
        state.workers.insert(id, worker);
        state.remove_idle_models();
        drop(state);
        self.changes.send_modify(|n| *n += 1);
        id
    }

    /// Sets the models of the fleet, with the digest that each is to have, or an empty one. While a
    /// model is swapped, the workers of two files serve under its name. Forgets models that have
    /// left the fleet.
    pub(crate) fn set_fleet_models(&self, digests: HashMap<String, Vec<u8>>) {
        let mut state = self.lock();
        state.preferred = digests;
        state.remove_departed_models();
    }

    /// Sets the files of each model of the fleet, as the supervisor says.
    pub(crate) fn set_fleet_files(&self, models: Vec<ModelFiles>) {
        let mut state = self.lock();
        let RegistryState { models: known, files, .. } = &mut *state;
        files.update(models, |name, digest| {
            known.iter().any(|model| model.name() == name && model.description.digest == digest)
        });
        state.remove_departed_models();
    }

    /// Sets what the supervisor says about the next workers.
    pub(crate) fn set_fleet_reply(&self, reply: SupervisorReply) {
        let mut state = self.lock();
        state.outlook.set_reply(reply);
        drop(state);
        // What waits for a worker looks again.
        self.changes.send_modify(|n| *n += 1);
    }

    /// A request waits for a worker of the model. If the model is idle, it is to be woken.
    pub(crate) fn want_worker(&self, name: &str) {
        let mut state = self.lock();
        let name = state.outlook.full_name(name).to_owned();
        if state.outlook.is_on_demand(&name) && state.wanted.insert(name) {
            self.wake_wanted.notify_one();
        }
    }

    /// Returns when a request waits for a model that is idle.
    pub(crate) async fn wake_is_wanted(&self) {
        self.wake_wanted.notified().await;
    }

    /// A request names a model that is not known. It may be new since the supervisor was asked.
    pub(crate) fn want_answer(&self) {
        self.answer_wanted.notify_one();
    }

    /// Returns when [`Self::want_answer`] was called.
    pub(crate) async fn answer_is_wanted(&self) {
        self.answer_wanted.notified().await;
    }

    /// Whether the supervisor may answer a question that is put after `time`, and has not yet.
    pub(crate) fn may_be_answered_after(&self, time: Instant) -> bool {
        self.lock().outlook.may_answer_after(time)
    }

    /// The idle models that requests wait for, each once.
    pub(crate) fn models_to_wake(&self) -> BTreeSet<String> {
        std::mem::take(&mut self.lock().wanted)
    }

    /// Whether the supervisor lists a model of this name that may get workers, and the caller may
    /// use it.
    pub(crate) fn is_listed(&self, name: &str, access: &ModelAccess) -> bool {
        let state = self.lock();
        let may_use = access.allows(name) || access.allows(state.outlook.full_name(name));
        may_use && state.outlook.lists(name)
    }

    /// Whether requests for this name get a model without asking the supervisor.
    pub(crate) fn is_known(&self, name: &str) -> bool {
        let state = self.lock();
        let is_it = |model: &&Arc<ServedModel>| model.names().any(|known| known == name);
        state.models.iter().filter(is_it).any(|model| !state.is_outdated(model))
    }

    /// Whether there may be models that no worker has told yet.
    pub(crate) fn has_unheard_models(&self) -> bool {
        let state = self.lock();
        let is_heard =
            |name: &str| state.models.iter().any(|model| model.name() == name && !state.is_outdated(model));
        state.models.is_empty() || !state.unidentified.is_empty() || !state.outlook.listed().all(is_heard)
    }

    /// Why the supervisor cannot load the model of this name.
    pub(crate) fn load_failure(&self, name: &str) -> Option<String> {
        self.lock().outlook.failure(name).map(str::to_owned)
    }

    /// When a worker of a model that has none is expected. Without a supervisor, one is expected
    /// for `wait` after the last one was lost.
    pub(crate) fn next_worker(&self, model: &ModelKey, wait: Duration) -> Option<ExpectedWorker> {
        let state = self.lock();
        if state.is_replaced(model) {
            return None;
        }
        // A model that the router has not heard counts as lost at its start.
        let lost = state.lost.get(model).copied().unwrap_or(self.start);
        let name = Some(&*model.name).filter(|name| !name.is_empty());
        state.outlook.next_worker(name, lost, wait, Instant::now())
    }

    pub(crate) fn has_workers_of(&self, model: &ModelKey) -> bool {
        self.lock().routing.worker_count(model) > 0
    }

    /// The key under which workers serve the model now. A restarted worker has another fingerprint
    /// if its version or its type of KV cache has changed.
    pub(crate) fn key_with_workers(&self, model: &ServedModel) -> ModelKey {
        let state = self.lock();
        let serves = |other: &&Arc<ServedModel>| {
            other.name() == model.name()
                && other.has_text_of(&model.description)
                && state.routing.worker_count(other.key()) > 0
        };
        match state.routing.worker_count(model.key()) {
            0 => state.models.iter().rev().find(serves).map_or(model.key(), |other| other.key()).clone(),
            _ => model.key().clone(),
        }
    }

    /// Removes a worker. Idempotent: the worker's link and a broken stream may both report its
    /// loss.
    pub(crate) fn remove(&self, id: WorkerId) {
        let mut state = self.lock();
        state.routing.remove_worker(id);
        if let Some(worker) = state.workers.remove(&id)
            && state.routing.worker_count(worker.model.key()) == 0
        {
            state.lost.insert(worker.model.key().clone(), Instant::now());
        }
        drop(state);
        self.changes.send_modify(|n| *n += 1);
    }

    /// Notes that the router cannot serve a worker. Returns the pause until it asks again.
    pub(crate) fn refuse(&self, socket: SocketId, reason: &str) -> Duration {
        let mut state = self.lock();
        state.unidentified.remove(&socket);
        let pause = state.refused.refuse(socket, reason, Instant::now());
        drop(state);
        self.changes.send_modify(|n| *n += 1);
        pause
    }

    /// Notes that the router can serve a worker.
    pub(crate) fn accept(&self, socket: &SocketId) {
        let mut state = self.lock();
        state.refused.accept(socket);
        state.identified.insert(socket.0.clone());
        state.unidentified.remove(socket);
        drop(state);
        self.changes.send_modify(|n| *n += 1);
    }

    /// Notes which sockets of workers exist. While the model of one is not known, a name that no
    /// worker has told may be its model.
    pub(crate) fn note_sockets(&self, sockets: &HashSet<SocketId>) {
        let mut state = self.lock();
        state.identified.retain(|path| sockets.iter().any(|socket| socket.0 == *path));
        let is_known =
            |socket: &SocketId| state.identified.contains(&socket.0) || state.refused.contains(socket);
        state.unidentified = sockets.iter().filter(|socket| !is_known(socket)).cloned().collect();
        state.older.get_or_insert_with(|| sockets.clone());
    }

    /// False during the pause after a refusal.
    pub(crate) fn may_ask(&self, socket: &SocketId) -> bool {
        self.lock().refused.may_ask(socket, Instant::now())
    }

    /// Forgets refused workers whose sockets are gone.
    pub(crate) fn retain_refused(&self, exists: impl Fn(&SocketId) -> bool) {
        if self.lock().refused.retain(exists) {
            self.changes.send_modify(|n| *n += 1);
        }
    }

    /// One line about the refused workers, or `None` if there are none.
    pub(crate) fn refused_summary(&self) -> Option<String> {
        self.lock().refused.summary()
    }

    pub(crate) fn update_report(&self, id: WorkerId, report: WorkerReport) {
        let mut state = self.lock();
        state.routing.update_load(id, report, self.now());
        if let Some(worker) = state.workers.get_mut(&id) {
            worker.report = report;
        }
    }

    /// Places a stream on a worker that is not among `tried`. Chooses `preferred` if it has free
    /// capacity, otherwise the worker that the routing policy chooses.
    pub(crate) fn place_stream(
        self: &Arc<Self>,
        demand: &StreamDemand<'_>,
        tried: &[WorkerId],
        preferred: Option<WorkerId>,
    ) -> Option<PlacedStream> {
        let mut state = self.lock();
        let placement = state.routing.place_stream(demand, tried, preferred, self.now())?;
        let worker = state.worker_handle(placement.worker);
        drop(state);
        metrics::record_placement(&demand.model.name, &placement);
        Some(PlacedStream { registry: self.clone(), placement: Some(placement), worker })
    }

    /// The worker that the next stream of the model would get, if it is not among `tried`.
    pub(crate) fn choose_worker(&self, model: &ModelKey, tried: &[WorkerId]) -> Option<WorkerHandle> {
        let state = self.lock();
        let id = state.routing.choose_worker(&StreamDemand::none(model), tried, self.now())?;
        Some(state.worker_handle(id))
    }

    /// Capacity of all workers of the model together.
    pub(crate) fn capacity(&self, model: &ModelKey) -> ModelCapacity {
        let state = self.lock();
        let workers = state.workers.values().filter(|worker| worker.model.key() == model);
        workers.map(|worker| worker.capacity).collect()
    }

    /// The key of every known model.
    pub(crate) fn model_keys(&self) -> Vec<ModelKey> {
        self.lock().models.iter().map(|model| model.key().clone()).collect()
    }

    /// A receiver that changes whenever a worker is registered or removed.
    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// The model of that name or alias, among those that the caller may use. While a model is
    /// swapped, two models have one name: the one that the supervisor wants is returned, if it has
    /// workers.
    pub(crate) fn resolve(
        &self,
        name: Option<&str>,
        access: &ModelAccess,
    ) -> Result<Arc<ServedModel>, ResolveError> {
        let state = self.lock();
        let may_use = |name: &str| access.allows(name) || access.allows(state.outlook.full_name(name));
        let failed = |name: &str| {
            let why = state.outlook.failure(name).filter(|_| may_use(name))?;
            Some(ResolveError::Failed { name: name.to_owned(), why: why.to_owned() })
        };
        if state.models.is_empty() {
            // Only a name that the supervisor lists is known not to be the caller's.
            let is_refused = |name: &&str| state.outlook.lists(name) && !may_use(name);
            return Err(match name.filter(is_refused) {
                Some(name) => ResolveError::unknown(name, Vec::new()),
                None => name.and_then(failed).unwrap_or(ResolveError::NoModel),
            });
        }
        let known = || {
            let models = state.models.iter();
            let names: BTreeSet<&str> = models.flat_map(|model| access.names_of(model)).collect();
            names.into_iter().map(str::to_owned).collect::<Vec<String>>()
        };
        let allowed = || state.models.iter().filter(|model| access.names_of(model).next().is_some());
        let is_one = || allowed().map(|model| model.name()).collect::<BTreeSet<_>>().len() == 1;
        let Some(name) = name else {
            // A worker that served before this router started may serve a second model.
            if is_one() && state.has_older_unidentified() {
                return Err(ResolveError::NotAllKnown);
            }
            let newest = state.choose_model(allowed().collect(), None);
            if newest.as_ref().is_some_and(|newest| state.is_outdated(newest)) {
                return Err(ResolveError::NotAllKnown);
            }
            return newest.filter(|_| is_one()).ok_or_else(|| ResolveError::Ambiguous { known: known() });
        };
        let named = allowed().filter(|model| !state.is_outdated(model));
        let named = named.filter(|model| access.names_of(model).any(|known| known == name));
        state.choose_model(named.collect(), Some(name)).ok_or_else(|| {
            let may_be_told = !state.unidentified.is_empty() || state.outlook.lists(name);
            match may_be_told && may_use(name) {
                true => ResolveError::NotAllKnown,
                false => failed(name).unwrap_or_else(|| ResolveError::unknown(name, known())),
            }
        })
    }

    /// True if any worker serves a model.
    pub(crate) fn has_workers(&self) -> bool {
        !self.lock().workers.is_empty()
    }
}

impl RegistryState {
    fn has_older_unidentified(&self) -> bool {
        self.older.iter().flatten().any(|socket| self.unidentified.contains(socket))
    }

    fn worker_handle(&self, id: WorkerId) -> WorkerHandle {
        let worker = self.workers.get(&id).expect("every worker of the routing policy is registered");
        WorkerHandle { id, name: worker.name.clone(), client: worker.client.clone() }
    }

    /// Removes models without a worker and without a request that are not of the fleet: they are
    /// unloaded, or the workers of another file serve under their name. A model whose workers
    /// restart is of the fleet.
    fn remove_departed_models(&mut self) {
        let has_workers = |model: &ServedModel| self.routing.worker_count(model.key()) > 0;
        let served: HashSet<String> = self
            .models
            .iter()
            .filter(|model| has_workers(model))
            .map(|model| model.name().to_owned())
            .collect();
        let files = &self.files;
        let departed = |model: &Arc<ServedModel>| match self.preferred.get(model.name()) {
            None => true,
            Some(digest) => {
                files.is_replaced(model.name(), &model.description.digest)
                    || (*digest != model.description.digest && served.contains(model.name()))
            }
        };
        self.models.retain(|model| has_workers(model) || Arc::strong_count(model) > 1 || !departed(model));
        self.forget_losses();
    }

    /// The files of the model were replaced: requests for its name mean another one.
    fn is_outdated(&self, model: &ServedModel) -> bool {
        self.files.is_replaced(model.name(), &model.description.digest)
    }

    /// Whether another model serves under the name of one that has no worker. During a swap the
    /// workers of the other file do not replace those that the supervisor wants.
    fn is_replaced(&self, model: &ModelKey) -> bool {
        let own = self.models.iter().find(|known| known.key() == model);
        let digest = own.map(|own| &own.description.digest);
        let is_wanted = digest.is_some() && self.preferred.get(&*model.name) == digest;
        let replaces = |other: &&Arc<ServedModel>| {
            let is_other = other.key().name == model.name && other.key() != model;
            let may_replace = !is_wanted || Some(&other.description.digest) == digest;
            is_other && may_replace && self.routing.worker_count(other.key()) > 0
        };
        self.models.iter().any(|other| replaces(&other))
    }

    fn forget_losses(&mut self) {
        let models = &self.models;
        self.lost.retain(|key, _| models.iter().any(|model| model.key() == key));
    }

    /// Keeps at most [`IDLE_MODELS_MAX`] models without a worker that the supervisor does not list,
    /// the newest.
    fn remove_idle_models(&mut self) {
        let routing = &self.routing;
        let is_idle = |model: &Arc<ServedModel>| {
            routing.worker_count(model.key()) == 0 && !self.preferred.contains_key(model.name())
        };
        let idle_models = self.models.iter().filter(|model| is_idle(model)).count();
        let mut excess = idle_models.saturating_sub(IDLE_MODELS_MAX);
        self.models.retain(|model| {
            let remove = excess > 0 && is_idle(model);
            excess -= usize::from(remove);
            !remove
        });
        self.forget_losses();
    }
}
