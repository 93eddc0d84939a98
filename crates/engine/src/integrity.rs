// SPDX-License-Identifier: Apache-2.0

//! Integrity check of the engine's request records against the scheduler's sequences.

use crate::request::input::RequestId;
use crate::request::state::ActiveRequest;
use crate::schedule::admission::AdmissionControl;
use crate::schedule::integrity::IntegrityError;
use crate::schedule::scheduler::Scheduler;
use crate::schedule::sequence_id::SequenceId;
use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

pub(crate) struct RequestRecords<'a> {
    pub(crate) requests: &'a [Option<ActiveRequest>],
    pub(crate) sequence_ids: &'a HashMap<RequestId, SequenceId>,
    pub(crate) deadlines: &'a BTreeSet<(Duration, SequenceId)>,
    pub(crate) admission: &'a AdmissionControl,
    pub(crate) scheduler: &'a Scheduler,
}

impl RequestRecords<'_> {
    /// Checks that every request has a sequence, an id, its deadline and, until admission, its
    /// count in the waiting queue; and that no others exist.
    pub(crate) fn check(&self) -> Result<(), IntegrityError> {
        let (mut live, mut with_deadline) = (0, 0);
        let mut queued: HashMap<u64, usize> = HashMap::new();
        for (index, request_state) in self.requests.iter().enumerate() {
            let sequence_id = SequenceId(index as u32);
            let sequence = self.scheduler.sequence(sequence_id);
            let Some(request_state) = request_state else {
                sequence.map_or(Ok(()), |_| Err(IntegrityError::RequestRecord(sequence_id)))?;
                continue;
            };
            let is_named = self.sequence_ids.get(&request_state.id) == Some(&sequence_id);
            if !is_named
                || sequence
                    .is_none_or(|sequence| sequence.was_admitted == request_state.queued_tenant.is_some())
            {
                return Err(IntegrityError::RequestRecord(sequence_id));
            }
            live += 1;
            with_deadline += usize::from(
                request_state.deadline.is_some_and(|at| self.deadlines.contains(&(at, sequence_id))),
            );
            if let Some(tenant) = request_state.queued_tenant {
                *queued.entry(tenant).or_default() += 1;
            }
        }
        if self.sequence_ids.len() != live {
            return Err(IntegrityError::Named { named: self.sequence_ids.len(), live });
        }
        let expected =
            self.requests.iter().flatten().filter(|request_state| request_state.deadline.is_some()).count();
        if self.deadlines.len() != expected || with_deadline != expected {
            return Err(IntegrityError::Deadlines { listed: self.deadlines.len(), live: expected });
        }
        for (&tenant, &found) in &queued {
            let counted = self.admission.waiting_of(tenant);
            if counted != found {
                return Err(IntegrityError::Admission { tenant, counted, found });
            }
        }
        let found = queued.values().sum();
        match self.admission.waiting() {
            counted if counted == found => Ok(()),
            counted => Err(IntegrityError::QueueLength { counted, found }),
        }
    }
}
