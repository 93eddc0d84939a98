// SPDX-License-Identifier: Apache-2.0

//! Which model a request gets if several have its name: during a swap, a rolling restart, or with
//! copies on devices that compute differently.

use std::sync::Arc;

use super::{RegisteredWorker, RegistryState};
use crate::model::ServedModel;

/// Requests for each sequence, as a whole number of parts. No model has so many requests that the
/// product overflows.
const LOAD_SCALE: u64 = 1 << 20;

impl RegistryState {
    /// Orders the models that a name may mean: those with workers before others, a name before an
    /// alias, the content that the supervisor wants before others, a newer generation before an
    /// older one.
    pub(super) fn precedence(&self, model: &ServedModel, name: &str) -> impl Ord + use<> {
        let has_workers = self.routing.worker_count(model.key()) > 0;
        let preferred = self.preferred.get(model.name());
        let is_preferred =
            preferred.is_none_or(|digest| digest.is_empty() || *digest == model.description.digest);
        (has_workers, model.name() == name, is_preferred, self.newest_generation(model))
    }

    /// The newest copy of the model that its workers have.
    pub(super) fn newest_generation(&self, model: &ServedModel) -> u64 {
        let workers = self.workers.values().filter(|worker| worker.model.key() == model.key());
        let newest = workers.map(|worker| worker.generation).max();
        newest.unwrap_or(model.description.generation)
    }

    /// The model that the next request gets, among those that its name may mean. `None`: each has
    /// the name. Of models with one content on devices that compute differently, it is the one with
    /// the fewest requests for each sequence that it may run.
    pub(super) fn choose_model(
        &self,
        named: Vec<&Arc<ServedModel>>,
        name: Option<&str>,
    ) -> Option<Arc<ServedModel>> {
        let order = |model: &Arc<ServedModel>| self.precedence(model, name.unwrap_or(model.name()));
        let first = *named.iter().max_by_key(|model| order(model))?;
        let load = |model: &Arc<ServedModel>| {
            let places: u64 =
                self.workers_of(model).map(|worker| u64::from(worker.capacity.running_max)).sum();
            (self.requests(model) as u64).saturating_mul(LOAD_SCALE) / places.max(1)
        };
        let beside = named.into_iter().filter(|model| self.is_beside(model, first));
        // Of equal loads, the first one stays.
        let least = std::iter::once(first).chain(beside).min_by_key(|model| load(model));
        least.cloned()
    }

    /// Whether the workers of both models have one content under one name, and no device in common.
    /// On one device, the newer settings of a rolling restart come first.
    fn is_beside(&self, model: &Arc<ServedModel>, first: &Arc<ServedModel>) -> bool {
        let is_same_content =
            model.name() == first.name() && model.description.digest == first.description.digest;
        let is_apart =
            |worker: &RegisteredWorker| self.workers_of(first).all(|other| other.device != worker.device);
        is_same_content
            && !Arc::ptr_eq(model, first)
            && self.workers_of(model).next().is_some()
            && self.workers_of(model).all(is_apart)
    }

    fn workers_of(&self, model: &ServedModel) -> impl Iterator<Item = &RegisteredWorker> {
        self.workers.values().filter(move |worker| worker.model.key() == model.key())
    }

    /// Whether new requests for the model's name get it.
    pub(super) fn is_current(&self, model: &Arc<ServedModel>) -> bool {
        let named = self.models.iter().filter(|other| other.name() == model.name());
        let current = named.max_by_key(|other| self.precedence(other, model.name()));
        current.is_some_and(|current| Arc::ptr_eq(current, model) || self.is_beside(model, current))
    }

    /// Requests that hold the model: all references but the registry's own. A listing under way
    /// counts too, for a moment.
    pub(super) fn requests(&self, model: &Arc<ServedModel>) -> usize {
        let of_workers = self.workers.values().filter(|worker| Arc::ptr_eq(&worker.model, model)).count();
        Arc::strong_count(model).saturating_sub(1 + of_workers)
    }
}
