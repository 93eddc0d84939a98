// SPDX-License-Identifier: Apache-2.0

//! The models of the registry as listings and metrics show them.

use std::sync::Arc;

use super::{RegisteredWorker, WorkerRegistry};
use crate::access::ModelAccess;
use crate::model::ServedModel;
use crate::routing::{WorkerId, WorkerReport};

/// A model and its workers, for listings and metrics.
#[derive(Debug)]
pub(crate) struct ModelSnapshot {
    pub(crate) model: Arc<ServedModel>,
    pub(crate) workers: Vec<WorkerSnapshot>,
    /// Requests that hold the model, from the moment that its name is resolved to the last token.
    pub(crate) requests: usize,
    /// New requests for the name get this model.
    pub(crate) is_current: bool,
}

/// A model of which the router knows what the supervisor says.
#[derive(Debug)]
pub(crate) struct UnheardModel {
    pub(crate) name: String,
    /// Those that the caller may use, perhaps not the first one.
    pub(crate) names: Vec<String>,
}

#[derive(Debug)]
pub(crate) struct WorkerSnapshot {
    pub(crate) name: String,
    pub(crate) device: Arc<str>,
    /// Of its copy of the weights.
    pub(crate) generation: u64,
    /// Streams of this router on the worker.
    pub(crate) own_streams: u32,
    pub(crate) report: WorkerReport,
    /// What the router knows of its prefix cache: bytes, and whether its events arrive.
    pub(crate) prefix_index: (u64, bool),
}

impl WorkerRegistry {
    /// Every known model with its workers, by name, among those that the caller may use.
    pub(crate) fn snapshot_for(&self, access: &ModelAccess) -> Vec<ModelSnapshot> {
        let mut models = self.snapshot();
        models.retain(|snapshot| access.names_of(&snapshot.model).next().is_some());
        models
    }

    /// Idle models that no worker has told this router, with those of their names that the caller
    /// may use.
    pub(crate) fn unheard_idle_models(&self, access: &ModelAccess) -> Vec<UnheardModel> {
        let state = self.lock();
        let is_heard = |name: &str| state.models.iter().any(|model| model.name() == name);
        let mut unheard: Vec<UnheardModel> = Vec::new();
        for (name, aliases) in state.outlook.idle() {
            let is_whole = access.allows(name);
            let names = std::iter::once(name).chain(aliases);
            let names = names.filter(|name| is_whole || access.allows(name));
            let names: Vec<String> = names.map(str::to_owned).collect();
            if !is_heard(name) && !names.is_empty() {
                unheard.push(UnheardModel { name: name.to_owned(), names });
            }
        }
        unheard
    }

    /// Every known model with its workers, by name.
    pub(crate) fn snapshot(&self) -> Vec<ModelSnapshot> {
        let state = self.lock();
        let worker_snapshot = |(&id, worker): (&WorkerId, &RegisteredWorker)| WorkerSnapshot {
            name: worker.name.clone(),
            device: worker.device.clone(),
            generation: worker.generation,
            own_streams: state.routing.own_streams(id),
            report: worker.report,
            prefix_index: state.routing.prefix_index(id),
        };
        let model_snapshot = |model: &Arc<ServedModel>| {
            let workers = state.workers.iter().filter(|(_, worker)| worker.model.key() == model.key());
            let workers: Vec<WorkerSnapshot> = workers.map(worker_snapshot).collect();
            let (requests, is_current) = (state.requests(model), state.is_current(model));
            ModelSnapshot { model: model.clone(), workers, requests, is_current }
        };
        let mut models: Vec<ModelSnapshot> = state.models.iter().map(model_snapshot).collect();
        models.sort_by(|a, b| {
            let order = |snapshot: &ModelSnapshot| state.newest_generation(&snapshot.model);
            a.model.name().cmp(b.model.name()).then(order(a).cmp(&order(b)))
        });
        models
    }
}
