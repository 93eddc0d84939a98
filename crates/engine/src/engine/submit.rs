// SPDX-License-Identifier: Apache-2.0

//! Submission: a request is checked, and queued or refused at once.

use super::{Drafting, Engine};
use crate::request::embedding::sequence_kind;
use crate::request::input::{EmbedRequest, Request, RequestId, ScoreRequest};
use crate::request::refusal::{Queued, RefuseReason};
use crate::request::state::ActiveRequest;
use crate::sample::constraint::Constraint;
use crate::schedule::sequence::{NewSequence, SequenceKind};
use crate::schedule::sequence_id::SequenceId;
use ops::Backend;
use prefix::Scope;

/// Tenant of requests without one.
const NO_TENANT: u64 = 0;

impl<B: Backend> Engine<B> {
    /// Validates and queues a request. After an error the engine has no record of it.
    pub fn submit(&mut self, request: Request) -> Result<Queued, RefuseReason> {
        self.submit_constrained(request, None)
    }

    /// As `submit`, with structured output: only tokens that `constraint` allows are sampled. The
    /// constraint has already accepted the request's prior output.
    pub fn submit_constrained(
        &mut self,
        request: Request,
        constraint: Option<Box<dyn Constraint>>,
    ) -> Result<Queued, RefuseReason> {
        let checked = self.capacity.check(&request).and_then(|checked| {
            self.check_admission(request.id, request.priority, request.tenant).map(|()| checked)
        });
        let (tokens_max, history) = self.count_refusal(checked)?;
        let request_state = ActiveRequest::generate(&request, history, constraint, tokens_max);
        Ok(self.enqueue(
            request_state,
            NewSequence {
                kind: SequenceKind::Generate,
                priority: request.priority,
                tenant: request.tenant,
                tokens: request.prompt,
                tokens_max,
                scope: &request.scope,
            },
        ))
    }

    /// As `submit`, for given tokens to be scored.
    pub fn submit_score(&mut self, request: ScoreRequest) -> Result<Queued, RefuseReason> {
        let checked = self
            .capacity
            .check_score(&request)
            .and_then(|()| self.check_admission(request.id, request.priority, NO_TENANT));
        self.count_refusal(checked)?;
        let request_state = ActiveRequest::score(&request);
        Ok(self.enqueue(
            request_state,
            NewSequence {
                kind: SequenceKind::Score,
                priority: request.priority,
                tenant: NO_TENANT,
                tokens_max: request.tokens.len(),
                tokens: request.tokens,
                scope: &Scope::default(),
            },
        ))
    }

    /// As `submit`, for a text whose hidden states become one vector.
    pub fn submit_embed(&mut self, request: EmbedRequest) -> Result<Queued, RefuseReason> {
        let checked = self
            .capacity
            .check_embed(&request)
            .and_then(|()| self.check_admission(request.id, request.priority, request.tenant));
        self.count_refusal(checked)?;
        let request_state = ActiveRequest::embed(&request);
        Ok(self.enqueue(
            request_state,
            NewSequence {
                kind: sequence_kind(request.pooling),
                priority: request.priority,
                tenant: request.tenant,
                tokens_max: request.tokens.len(),
                tokens: request.tokens,
                scope: &request.scope,
            },
        ))
    }

    /// The last check: on success the request counts as waiting.
    pub(super) fn check_admission(
        &mut self,
        id: RequestId,
        priority: i32,
        tenant: u64,
    ) -> Result<(), RefuseReason> {
        if self.draining {
            Err(RefuseReason::Draining)
        } else if self.sequence_ids.contains_key(&id) {
            Err(RefuseReason::DuplicateId(id))
        } else {
            Ok(self.admission.try_enter(priority, tenant)?)
        }
    }

    pub(super) fn count_refusal<T>(&mut self, checked: Result<T, RefuseReason>) -> Result<T, RefuseReason> {
        self.stats.refused += u64::from(checked.is_err());
        checked
    }

    pub(super) fn enqueue(&mut self, mut request_state: ActiveRequest, new: NewSequence<'_>) -> Queued {
        request_state.queued_tenant = Some(new.tenant);
        let sequence_id = self.scheduler.add(new);
        self.sequence_ids.insert(request_state.id, sequence_id);
        if let Some(deadline) = request_state.deadline {
            self.deadlines.insert((deadline, sequence_id));
        }
        self.set_request(sequence_id, request_state);
        Queued { ahead: self.scheduler.waiting_ahead(sequence_id) }
    }

    /// Records the request of a sequence that was added to the scheduler.
    pub(super) fn set_request(&mut self, sequence_id: SequenceId, request_state: ActiveRequest) {
        if self.requests.len() <= sequence_id.index() {
            self.requests.resize_with(sequence_id.index() + 1, || None);
        }
        self.requests[sequence_id.index()] = Some(request_state);
        if let Some(Drafting { speculation, .. }) = &mut self.drafting {
            speculation.begin(sequence_id);
        }
    }
}
