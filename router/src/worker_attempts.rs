// SPDX-License-Identifier: Apache-2.0

//! Attempts of a request to be answered by a worker. If the workers are lost before one has
//! admitted the request, it goes back to the waiting queue and tries again.

use std::time::Duration;

use tokio::time::Instant;

use crate::admission::AdmissionError;
use crate::admission_control::StreamPermits;
use crate::generate::{GenerationRequest, Generator};
use crate::opening::RequestRefusal;
use crate::opening::WorkerForecast;
use crate::routing::ModelKey;

/// How long a request waits for a change of the workers before it asks them again. A worker that
/// drains has refused it, and its link has not noticed yet.
const CHANGE_WAIT: Duration = Duration::from_millis(100);

/// The attempts of one request.
pub(crate) struct WorkerAttempts<'a> {
    generator: &'a Generator,
    request: &'a GenerationRequest,
    permits: u32,
    /// When an attempt first found no worker.
    first_lost: Option<Instant>,
}

impl Generator {
    /// What a client is told of the next worker of a model that has none.
    pub(crate) fn forecast(&self, model: &ModelKey) -> WorkerForecast {
        let expected = self.registry.next_worker(model, self.admission.worker_wait());
        match WorkerForecast::of(expected, Instant::now()) {
            WorkerForecast::NoneExpected => self
                .registry
                .load_failure(&model.name)
                .map_or(WorkerForecast::NoneExpected, WorkerForecast::CannotLoad),
            forecast => forecast,
        }
    }

    pub(crate) fn worker_attempts<'a>(
        &'a self,
        request: &'a GenerationRequest,
        permits: u32,
    ) -> WorkerAttempts<'a> {
        WorkerAttempts { generator: self, request, permits, first_lost: None }
    }
}

impl WorkerAttempts<'_> {
    /// Waits for a worker and for permits. Returns the permits with the key under which workers
    /// serve the model now.
    pub(crate) async fn next(&self) -> Result<(ModelKey, StreamPermits), RequestRefusal> {
        let (generator, request) = (self.generator, self.request);
        let mut span = request.origin().trace.admission_queue();
        loop {
            let model = generator.registry.key_with_workers(&request.model);
            let admission = generator.admission_request(request, model.clone(), self.permits);
            match generator.admission.admit(request.model.name(), admission).await {
                // Workers with another key have replaced those that it waited for.
                Err(AdmissionError::NoWorker { .. })
                    if generator.registry.key_with_workers(&request.model) != model => {}
                Err(error) => {
                    let forecast = generator.forecast(&model);
                    let refusal = RequestRefusal::of_admission(error, &model.name, forecast);
                    span.fail(refusal.reason());
                    return Err(refusal);
                }
                Ok(permits) => return Ok((model, permits)),
            }
        }
    }

    /// Returns `Ok` if the request may try again after this refusal. The permits of the attempt
    /// must have been dropped.
    pub(crate) async fn refused(&mut self, refusal: RequestRefusal) -> Result<(), RequestRefusal> {
        let RequestRefusal::NoWorker { model, forecast, retry_after, .. } = refusal else {
            return Err(refusal);
        };
        let now = Instant::now();
        let first_lost = *self.first_lost.get_or_insert(now);
        if now.duration_since(first_lost) >= self.generator.admission.worker_wait() {
            let waited = self.request.origin().arrived.elapsed();
            return Err(RequestRefusal::NoWorker { model, forecast, waited, retry_after });
        }
        let registry = &self.generator.registry;
        let mut changes = registry.subscribe();
        if registry.has_workers_of(&registry.key_with_workers(&self.request.model)) {
            let _unchanged = tokio::time::timeout(CHANGE_WAIT, changes.changed()).await;
        }
        Ok(())
    }
}
