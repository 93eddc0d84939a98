// SPDX-License-Identifier: Apache-2.0

//! Requests wait for models that the router has not heard: it has restarted, or a model is new, and
//! no worker of the model has told its metadata. Without them a request cannot be tokenized.
//!
//! Such a request waits in a queue of admission control, before its body is parsed. So the bounds
//! of waiting requests hold, and bodies that wait keep no other request from being parsed.

use std::ops::ControlFlow;
use std::time::Duration;

use tokio::time::Instant;

use crate::access::ModelAccess;
use crate::admission::{AdmissionError, AdmissionRequest, Tenant};
use crate::generate::Generator;
use crate::opening::RequestRefusal;
use crate::registry::{ResolveError, WorkerRegistry};
use crate::routing::{ModelKey, WorkerFingerprint};

/// What a request tells of itself before it is parsed.
#[derive(Debug)]
pub(crate) struct ModelQuery<'a> {
    pub(crate) name: Option<&'a str>,
    pub(crate) access: &'a ModelAccess,
    pub(crate) tenant: Tenant,
    pub(crate) deadline: Instant,
}

impl ModelKey {
    /// The queue of requests for a model that the router has not heard. Names that only clients
    /// know share one queue, without a name.
    pub(crate) fn unheard(name: &str) -> Self {
        Self { name: name.into(), fingerprint: WorkerFingerprint(Vec::new()) }
    }

    pub(crate) fn is_unheard(&self) -> bool {
        self.fingerprint.0.is_empty()
    }
}

/// How long a request for an unknown model waits for the supervisor.
const ANSWER_WAIT: Duration = Duration::from_secs(1);

impl WorkerRegistry {
    /// The caller could use a model of this name, and the router knows none.
    fn is_unknown(&self, query: &ModelQuery<'_>) -> bool {
        let is_allowed = query.name.is_some_and(|name| query.access.allows(name));
        is_allowed && matches!(self.resolve(query.name, query.access), Err(ResolveError::Unknown { .. }))
    }

    fn may_hear(&self, query: &ModelQuery<'_>) -> bool {
        matches!(
            self.resolve(query.name, query.access),
            Err(ResolveError::NoModel | ResolveError::NotAllKnown)
        )
    }
}

impl Generator {
    /// Waits until the router knows which model a request means. If it does not hear it in time,
    /// this returns `Ok` too: [`WorkerRegistry::resolve`] then has the error.
    pub(crate) async fn wait_for_model(&self, query: ModelQuery<'_>) -> Result<(), RequestRefusal> {
        if self.registry.is_unknown(&query) {
            self.await_answer().await;
        }
        while self.registry.may_hear(&query) {
            let listed = query.name.filter(|name| self.registry.is_listed(name, query.access));
            // The supervisor may list the model only now: the request moves to the queue of its
            // name.
            if let ControlFlow::Break(waited) = self.wait_in_queue(listed, &query).await {
                return waited;
            }
        }
        Ok(())
    }

    /// Waits until the supervisor was asked for its models once more: one that a command has just
    /// loaded, or a file that has just come, is not unknown.
    async fn await_answer(&self) {
        let (began, mut changes) = (Instant::now(), self.registry.subscribe());
        let answered = async {
            while self.registry.may_be_answered_after(began) {
                // Once more if it was silent: another supervisor may just be taking over.
                self.registry.want_answer();
                if changes.changed().await.is_err() {
                    return;
                }
            }
        };
        // A supervisor that is stopped does not answer.
        let _: Result<(), _> = service::patience::timeout(ANSWER_WAIT, answered).await;
    }

    /// Waits in the queue of a model that the supervisor lists, or in that of all other names.
    async fn wait_in_queue(
        &self,
        listed: Option<&str>,
        query: &ModelQuery<'_>,
    ) -> ControlFlow<Result<(), RequestRefusal>> {
        let name = listed.unwrap_or_default();
        let request = AdmissionRequest {
            model: ModelKey::unheard(name),
            tenant: query.tenant.clone(),
            priority: 0,
            permits: 1,
            deadline: self.admission.uptime_at(query.deadline),
        };
        let is_listed_now = || query.name.is_some_and(|name| self.registry.is_listed(name, query.access));
        let mut changes = self.registry.subscribe();
        // Dropping the future takes the request out of the queue.
        let mut admitted = std::pin::pin!(self.admission.admit(name, request));
        loop {
            changes.borrow_and_update();
            if !self.registry.may_hear(query) || (listed.is_none() && is_listed_now()) {
                return ControlFlow::Continue(());
            }
            tokio::select! {
                // The sender lives as long as the registry.
                _ = changes.changed() => {}
                answer = &mut admitted => return ControlFlow::Break(match answer {
                    Ok(_) | Err(AdmissionError::NoWorker { .. }) => Ok(()),
                    Err(error) => {
                        let model = ModelKey::unheard(name);
                        let forecast = self.forecast(&model);
                        Err(RequestRefusal::of_admission(error, &model.name, forecast))
                    }
                }),
            }
        }
    }
}
