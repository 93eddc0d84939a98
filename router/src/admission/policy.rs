// SPDX-License-Identifier: Apache-2.0

//! The admission policy of all models: routes events to the [`ModelAdmission`] of their model.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::limits::AdmissionLimits;
use super::model::{ModelAdmission, ModelAdmissionStats, RETRY_MIN};
use super::request::{
    AdmissionDecision, AdmissionError, AdmissionId, AdmissionRequest, Uptime, WorkerAvailability,
};
use crate::routing::ModelKey;

#[derive(Clone, Debug)]
pub enum AdmissionEvent {
    /// A request arrived. Its id is new.
    Arrived(AdmissionId, AdmissionRequest),
    /// The client is gone. Has no effect if the request is not waiting.
    Cancelled(AdmissionId),
    /// One stream of an admitted request has ended.
    StreamEnded(AdmissionId),
    /// Workers of a model joined or left, or it is known when the next one starts.
    WorkersChanged(ModelKey, WorkerAvailability),
    /// Time has passed.
    Tick,
}

#[derive(Debug)]
pub struct AdmissionPolicy {
    limits: AdmissionLimits,
    pub(super) models: BTreeMap<ModelKey, ModelAdmission>,
    /// The model of each request that waits or holds permits.
    pub(super) requests: HashMap<AdmissionId, ModelKey>,
    /// Streams that run or wait, of all models.
    streams: u32,
}

impl AdmissionPolicy {
    pub fn new(limits: AdmissionLimits) -> Self {
        Self { limits, models: BTreeMap::new(), requests: HashMap::new(), streams: 0 }
    }

    /// Returns the decisions that follow from `event`, in order.
    pub fn handle(&mut self, now: Uptime, event: AdmissionEvent) -> Vec<AdmissionDecision> {
        let mut decisions = Vec::new();
        match event {
            AdmissionEvent::Arrived(id, request) => self.arrive(now, id, request, &mut decisions),
            AdmissionEvent::Cancelled(id) => {
                if let Some(model) = self.model_of(id)
                    && model.cancel(now, id, &mut decisions)
                {
                    self.requests.remove(&id);
                }
            }
            AdmissionEvent::StreamEnded(id) => {
                if let Some(model) = self.model_of(id)
                    && model.end_stream(now, id, &mut decisions)
                {
                    self.requests.remove(&id);
                }
            }
            AdmissionEvent::WorkersChanged(model, workers) => {
                let limits = self.limits;
                let model = self.models.entry(model).or_insert_with(|| ModelAdmission::new(limits));
                model.set_workers(now, workers, &mut decisions);
            }
            AdmissionEvent::Tick => {
                self.models.values_mut().for_each(|model| model.advance(now, &mut decisions));
            }
        }
        for decision in &decisions {
            if let AdmissionDecision::Refuse(id, _) = decision {
                self.requests.remove(id);
            }
        }
        self.models.retain(|_, model| !model.is_idle());
        self.streams = self.models.values().map(ModelAdmission::streams).sum();
        decisions
    }

    /// The next time at which a decision is due without an event.
    pub fn next_deadline(&self) -> Option<Uptime> {
        self.models.values().filter_map(ModelAdmission::next_deadline).min()
    }

    /// Streams that run or wait, of all models.
    pub fn streams(&self) -> u32 {
        self.streams
    }

    pub fn stats(&self, model: &ModelKey) -> Option<ModelAdmissionStats> {
        self.models.get(model).map(ModelAdmission::stats)
    }

    fn arrive(
        &mut self,
        now: Uptime,
        id: AdmissionId,
        request: AdmissionRequest,
        decisions: &mut Vec<AdmissionDecision>,
    ) {
        let max = self.limits.streams_max;
        let Some(model) = self.models.get_mut(&request.model) else {
            let error = AdmissionError::NoWorker { waited: Duration::ZERO, retry_after: RETRY_MIN };
            return decisions.push(AdmissionDecision::Refuse(id, error));
        };
        if let Some(error) = model.no_worker_error(now, now) {
            return decisions.push(AdmissionDecision::Refuse(id, error));
        }
        if self.streams.saturating_add(request.permits) > max {
            let (streams, retry_after) = (self.streams, model.estimate_retry_after(now, request.permits));
            let error = AdmissionError::TooManyStreams { streams, max, retry_after };
            return decisions.push(AdmissionDecision::Refuse(id, error));
        }
        self.requests.insert(id, request.model.clone());
        model.arrive(now, id, request, decisions);
    }

    fn model_of(&mut self, id: AdmissionId) -> Option<&mut ModelAdmission> {
        self.models.get_mut(self.requests.get(&id)?)
    }
}
