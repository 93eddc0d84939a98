// SPDX-License-Identifier: Apache-2.0

//! Beam searches: their requests, and the sequences with which they continue.

use super::{Drafting, Engine};
use crate::beam::group::BeamGroup;
use crate::beam::search::{BeamContinuation, BeamSearch, SearchStep};
use crate::request::input::{BeamRequest, RequestId};
use crate::request::output::{EngineOutput, FinishReason};
use crate::request::refusal::{Queued, RefuseReason};
use crate::request::state::ActiveRequest;
use crate::schedule::sequence::{NewSequence, SequenceKind};
use crate::schedule::sequence_id::SequenceId;
use ops::Backend;

/// Tokens of a running sequence after which a search reports once more how far it is.
const PROGRESS_TOKENS: usize = 16;

impl<B: Backend> Engine<B> {
    /// As `submit`, for the most probable outputs of a prompt.
    pub fn submit_beams(&mut self, request: BeamRequest) -> Result<Queued, RefuseReason> {
        let checked = self.capacity.check_beams(&request).and_then(|tokens_max| {
            self.check_admission(request.id, request.priority, request.tenant).map(|()| tokens_max)
        });
        let tokens_max = self.count_refusal(checked)?;
        let id = request.id;
        let request_state = ActiveRequest::beams(&request);
        let max_tokens = tokens_max - request.prompt.len();
        let alternatives = usize::from(request.logprobs.unwrap_or(0));
        let search = BeamSearch::new(request.params, request.stop, max_tokens, alternatives);
        let queued = self.enqueue(
            request_state,
            NewSequence {
                kind: SequenceKind::Generate,
                priority: request.priority,
                tenant: request.tenant,
                tokens: request.prompt,
                tokens_max,
                scope: &request.scope,
            },
        );
        self.beam_groups.insert(id, BeamGroup::new(search, self.sequence_ids[&id]));
        Ok(queued)
    }

    /// Takes the row of one beam. The search continues after the step.
    pub(super) fn take_beam_row(
        &mut self,
        id: RequestId,
        sequence_id: SequenceId,
        logits: &[f32],
    ) -> Option<FinishReason> {
        let Some(group) = self.beam_groups.get_mut(&id) else { panic!("{id} has a beam but no group") };
        match group.take_row(sequence_id, logits) {
            Ok(is_complete) => {
                self.scheduler.set_paused(sequence_id, true);
                if is_complete {
                    self.complete_groups.push(id);
                }
                None
            }
            Err(error) => Some(FinishReason::BadLogits(error)),
        }
    }

    /// Continues the searches whose rows are all known.
    pub(super) fn advance_beams(&mut self, out: &mut Vec<EngineOutput>) {
        for id in std::mem::take(&mut self.complete_groups) {
            // Another beam of the request may have failed in this step.
            let Some(group) = self.beam_groups.get_mut(&id) else { continue };
            let step = group.advance();
            let (length, computed_tokens) = group.progress();
            let is_last = matches!(step, SearchStep::Done(_));
            if is_last || length == 1 || length.is_multiple_of(PROGRESS_TOKENS) {
                out.push(EngineOutput::BeamProgress { id, length, computed_tokens });
            }
            match step {
                SearchStep::Continue(next) => self.continue_beams(id, &next),
                SearchStep::Done(beams) => {
                    let sequence_id = self.sequence_ids[&id];
                    let tokens = beams.iter().map(|beam| beam.tokens.len()).sum();
                    self.stats.output_tokens += tokens as u64;
                    if let Some(request_state) = &mut self.requests[sequence_id.index()] {
                        request_state.usage.output_tokens = tokens;
                    }
                    out.push(EngineOutput::Beams { id, beams });
                    self.finish(sequence_id, FinishReason::Searched, out);
                }
            }
        }
    }

    fn continue_beams(&mut self, id: RequestId, next: &[BeamContinuation]) {
        let parents = self.beam_groups[&id].sequences().to_vec();
        let continues = |index: &usize| next.iter().any(|continuation| continuation.parent == *index);
        // First, so that forks find seats and blocks.
        let first = self.sequence_ids[&id];
        let mut ended_first = None;
        for index in (0..parents.len()).filter(|index| !continues(index)) {
            let request_state = self.remove_beam(parents[index]);
            if parents[index] == first {
                ended_first = Some(request_state);
            }
        }
        // Forks come before any parent has grown.
        let mut is_taken = vec![false; parents.len()];
        let mut sequences = Vec::with_capacity(next.len());
        for &BeamContinuation { parent, .. } in next {
            sequences.push(match std::mem::replace(&mut is_taken[parent], true) {
                false => parents[parent],
                true => self.branch_beam(id, parents[parent]),
            });
        }
        for (&sequence_id, continuation) in sequences.iter().zip(next) {
            self.scheduler.push_token(sequence_id, continuation.token);
            self.scheduler.set_paused(sequence_id, false);
        }
        // The request itself belongs to a sequence that lives.
        if let Some(request_state) = ended_first {
            let heir = sequences[0];
            if let Some(deadline) = request_state.deadline {
                self.deadlines.remove(&(deadline, first));
                self.deadlines.insert((deadline, heir));
            }
            self.sequence_ids.insert(id, heir);
            self.requests[heir.index()] = Some(request_state);
        }
        if let Some(group) = self.beam_groups.get_mut(&id) {
            group.continue_with(sequences);
        }
    }

    /// A further sequence with the tokens of `parent`.
    fn branch_beam(&mut self, id: RequestId, parent: SequenceId) -> SequenceId {
        let sequence_id = self.scheduler.branch(parent);
        self.set_request(sequence_id, ActiveRequest::further_beam(id));
        sequence_id
    }

    /// If the sequence belongs to a beam search, removes all others of the search. Returns the one
    /// that is left, to which the request belongs.
    pub(super) fn end_other_beams(&mut self, sequence_id: SequenceId) -> SequenceId {
        let request_state = self.requests[sequence_id.index()].as_ref();
        let Some(group) = request_state.and_then(|request_state| self.beam_groups.remove(&request_state.id))
        else {
            return sequence_id;
        };
        let last = request_state.map_or(sequence_id, |request_state| self.sequence_ids[&request_state.id]);
        for &other in group.sequences().iter().filter(|&&other| other != last) {
            self.remove_beam(other);
        }
        last
    }

    /// Removes one sequence of a search.
    pub(super) fn remove_beam(&mut self, sequence_id: SequenceId) -> ActiveRequest {
        let Some(request_state) = self.requests[sequence_id.index()].take() else {
            panic!("{sequence_id:?} is a beam but has no request")
        };
        self.scheduler.remove(sequence_id);
        if let Some(Drafting { drafter, .. }) = &mut self.drafting {
            drafter.forget(sequence_id);
        }
        request_state
    }
}
