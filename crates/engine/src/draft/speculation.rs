// SPDX-License-Identifier: Apache-2.0

//! Adds draft tokens to a step plan, and learns from their acceptance. A plain value: the drafter
//! is an argument.

use crate::draft::depth::{AcceptanceEstimate, DraftingCost, StepCostModel, depth};
use crate::draft::draft_tokens::{DRAFT_DEPTH_MAX, DraftTokens};
use crate::draft::drafter::{DraftRequest, Drafter};
use crate::schedule::scheduler::Scheduler;
use crate::schedule::sequence_id::SequenceId;
use crate::schedule::step_plan::ChunkOutputs;
use ops::{Backend, OpError};
use std::time::Duration;

/// Draft tokens since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftStats {
    /// Draft tokens that were computed, by position in their draft.
    pub drafted: [u64; DRAFT_DEPTH_MAX],
    /// Those of them that were accepted.
    pub accepted: [u64; DRAFT_DEPTH_MAX],
    /// Steps without drafts because the drafter failed.
    pub failures: u64,
}

impl DraftStats {
    pub fn drafted_tokens(&self) -> u64 {
        self.drafted.iter().sum()
    }

    pub fn accepted_tokens(&self) -> u64 {
        self.accepted.iter().sum()
    }
}

#[derive(Debug)]
pub struct Speculation {
    depth_max: usize,
    vocab_size: usize,
    cost: StepCostModel,
    /// By sequence id.
    acceptance: Vec<AcceptanceEstimate>,
    /// Drafts of the current step, in order of its chunks.
    requests: Vec<DraftRequest>,
    drafts: Vec<DraftTokens>,
    accepted: Vec<usize>,
    /// Index in `requests` of the sequence whose tokens were accepted last.
    accepting: usize,
    work: DraftingCost,
    stats: DraftStats,
}

impl Speculation {
    pub fn new(depth_max: usize, vocab_size: usize) -> Self {
        Self {
            depth_max,
            vocab_size,
            cost: StepCostModel::default(),
            acceptance: Vec::new(),
            requests: Vec::new(),
            drafts: Vec::new(),
            accepted: Vec::new(),
            accepting: 0,
            work: DraftingCost::default(),
            stats: DraftStats::default(),
        }
    }

    /// The sequence with this id is new.
    pub fn begin(&mut self, sequence_id: SequenceId) {
        let index = sequence_id.index();
        if self.acceptance.len() <= index {
            self.acceptance.resize(index + 1, AcceptanceEstimate::default());
        }
        self.acceptance[index] = AcceptanceEstimate::default();
    }

    /// Adds drafts to the plan for sequences that `may_draft`. Only a device failure is an error.
    pub fn draft<B: Backend>(
        &mut self,
        drafter: &mut dyn Drafter<B>,
        backend: &mut B,
        scheduler: &mut Scheduler,
        may_draft: impl Fn(SequenceId) -> bool,
    ) -> Result<(), OpError> {
        self.requests.clear();
        self.accepted.clear();
        self.accepting = 0;
        self.work = DraftingCost::default();
        self.request_drafts(drafter.share(), scheduler, may_draft);
        self.drafts.clear();
        self.drafts.resize(self.requests.len(), DraftTokens::default());
        if self.requests.is_empty() {
            return Ok(());
        }
        match drafter.propose(backend, scheduler, &self.requests, &mut self.drafts) {
            Ok(work) => self.work = work,
            Err(error @ OpError::Device { .. }) => return Err(error),
            Err(_) => {
                self.stats.failures += 1;
                self.drafts.fill(DraftTokens::default());
            }
        }
        for (request, draft) in self.requests.iter().zip(&mut self.drafts) {
            // The model cannot sample a token outside its vocabulary.
            let known =
                draft.tokens().iter().take_while(|&&token| (token as usize) < self.vocab_size).count();
            draft.truncate(known.min(request.depth));
            scheduler.drop_drafts(request.chunk, request.depth - draft.tokens().len());
        }
        self.accepted.resize(self.requests.len(), 0);
        Ok(())
    }

    /// Reserves rows and blocks for the drafts of this step.
    fn request_drafts(
        &mut self,
        share: f64,
        scheduler: &mut Scheduler,
        may_draft: impl Fn(SequenceId) -> bool,
    ) {
        let mut spare = scheduler.spare_blocks();
        let (cost, sequences) = (self.cost.fit(), scheduler.plan().chunks.len());
        for index in 0..sequences {
            let chunk = scheduler.plan().chunks[index];
            if chunk.outputs != ChunkOutputs::Last || !may_draft(chunk.sequence_id) {
                continue;
            }
            let acceptance = &mut self.acceptance[chunk.sequence_id.index()];
            let best = depth(acceptance.rate(), cost, share, sequences, self.depth_max);
            let most = acceptance.next_depth(best, self.depth_max);
            let depth = scheduler.add_drafts(index, most, &mut spare);
            if depth > 0 {
                self.requests.push(DraftRequest { sequence_id: chunk.sequence_id, depth, chunk: index });
            }
        }
    }

    /// Draft tokens of the plan's chunks that have some, in order.
    pub fn drafts(&self) -> impl Iterator<Item = &[u32]> {
        self.drafts.iter().map(DraftTokens::tokens).filter(|tokens| !tokens.is_empty())
    }

    /// The next draft token of the sequence is accepted. Calls come in the order of the plan.
    pub fn accept(&mut self, sequence_id: SequenceId) {
        while self.requests.get(self.accepting).is_some_and(|request| request.sequence_id != sequence_id) {
            self.accepting += 1;
        }
        let Some(accepted) = self.accepted.get_mut(self.accepting) else {
            panic!("{sequence_id:?} accepts a draft token but has no drafts in this step")
        };
        *accepted += 1;
    }

    /// Records acceptance after the last row of the step.
    pub fn record_acceptance(&mut self) {
        for ((request, draft), &right) in self.requests.iter().zip(&self.drafts).zip(&self.accepted) {
            let drafted = draft.tokens().len();
            self.acceptance[request.sequence_id.index()].observe(drafted, right);
            self.stats.drafted[..drafted].iter_mut().for_each(|count| *count += 1);
            self.stats.accepted[..right].iter_mut().for_each(|count| *count += 1);
        }
    }

    /// Records the duration of the step, drafting included.
    pub fn observe(&mut self, rows: usize, took: Duration) {
        self.cost.observe(rows, self.work, took.as_secs_f64());
    }

    pub fn stats(&self) -> DraftStats {
        self.stats
    }

    /// Estimated acceptance rate of the sequence's draft tokens.
    pub fn rate(&self, sequence_id: SequenceId) -> Option<f64> {
        self.acceptance.get(sequence_id.index()).map(AcceptanceEstimate::rate)
    }
}
