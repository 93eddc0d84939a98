// SPDX-License-Identifier: Apache-2.0

//! Drafts before a step and tokens after it: the engine's work between scheduler and model.
//!
//! The seed decides how often the text continues with its likely token, and thus how often drafts
//! are right. The storm counts drafts itself and compares the counts with the engine's.

use super::{Storm, StormRequest, StormRng, next_key};
use crate::draft::depth::DraftingCost;
use crate::draft::draft_tokens::DraftTokens;
use crate::draft::drafter::{DraftRequest, Drafter};
use crate::schedule::scheduler::Scheduler;
use crate::schedule::sequence::{SequenceKind, SequenceState};
use crate::schedule::sequence_id::SequenceId;
use crate::schedule::step_plan::{ChunkOutputs, Fork, ScheduledChunk};
use ops::{OpError, Reference};
use std::time::Duration;

/// Number of tokens that the storm samples, from `DRAWN_FIRST` on.
const DRAWN: u32 = 3;
const DRAWN_FIRST: u32 = 2000;
/// Vocabulary size. The engine cuts a draft at a token beyond the vocabulary.
pub(super) const VOCAB: usize = 2 + DRAWN_FIRST as usize + DRAWN as usize;

fn likely(previous: u32) -> u32 {
    DRAWN_FIRST + (previous + 1) % DRAWN
}

/// Proposes likely tokens. Sometimes the drafter proposes arbitrary tokens, none or too many, or
/// fails.
pub(super) struct RandomDrafter(pub(super) StormRng);

impl Drafter<Reference> for RandomDrafter {
    fn propose(
        &mut self,
        _: &mut Reference,
        scheduler: &Scheduler,
        wanted: &[DraftRequest],
        drafts: &mut [DraftTokens],
    ) -> Result<DraftingCost, OpError> {
        let random = &mut self.0;
        if random.one_in(40) {
            drafts.iter_mut().for_each(|draft| draft.push(DRAWN_FIRST));
            return Err(OpError::Memory { op: "storm", what: "a failure on purpose", bytes: 1, free: None });
        }
        for (wanted, draft) in wanted.iter().zip(drafts) {
            let mut previous = *scheduler.sequence(wanted.sequence_id).unwrap().tokens().last().unwrap();
            let count = match random.below(8) {
                0 => random.below(wanted.depth + 1),
                1 => wanted.depth + 2,
                _ => wanted.depth,
            };
            for _ in 0..count {
                previous = match random.below(12) {
                    0 => VOCAB as u32 - 4 + random.below(6) as u32,
                    _ => likely(previous),
                };
                draft.push(previous);
            }
        }
        Ok(DraftingCost { steps: 1, rows: wanted.len(), share: self.share() })
    }

    fn forget(&mut self, _: SequenceId) {}

    fn share(&self) -> f64 {
        0.05
    }
}

impl Storm {
    /// Adds drafts to some of the chunks that end with their sequence's last token.
    pub(super) fn draft(&mut self) {
        let preempted = self.scheduler.plan().preempted;
        let live = &self.live;
        let may = |sequence_id: SequenceId| {
            let live = &live[&sequence_id];
            live.kind == SequenceKind::Generate && !live.constrained
        };
        let Self { speculation, guesser, backend, scheduler, .. } = self;
        speculation.draft(guesser, backend, scheduler, may).unwrap();
        assert_eq!(self.scheduler.plan().preempted, preempted, "a draft preempts");
        let mut drafts = self.speculation.drafts();
        self.drafts = self
            .scheduler
            .plan()
            .chunks
            .iter()
            .map(|chunk| match chunk.drafts {
                0 => Vec::new(),
                count => drafts.next().filter(|draft| draft.len() == count).unwrap().to_vec(),
            })
            .collect();
        assert_eq!(drafts.next(), None, "more drafts than chunks with some");
    }

    /// Samples tokens after a step that was computed.
    pub(super) fn grow(&mut self, step: usize) {
        let chunks = self.scheduler.plan().chunks.clone();
        let forked = self.scheduler.plan().forked.clone();
        let drafts = std::mem::take(&mut self.drafts);
        for (chunk, drafts) in chunks.iter().zip(&drafts) {
            let sequence = self.scheduler.sequence(chunk.sequence_id).unwrap();
            assert_eq!(sequence.computed(), chunk.start + chunk.rows);
            if sequence.kind != SequenceKind::Generate && sequence.remaining() == 0 {
                self.end(chunk.sequence_id, step);
            } else if chunk.outputs == ChunkOutputs::Last {
                self.draw(chunk, drafts, step);
            }
        }
        for Fork { leader, follower: sequence_id } in forked {
            self.summary.forked += 1;
            let live = self.live.get_mut(&sequence_id).unwrap();
            live.computed = live.tokens.len();
            live.admitted = false;
            assert_ne!(leader, sequence_id);
            let sequence = self.scheduler.sequence(sequence_id).unwrap();
            assert_eq!((sequence.remaining(), sequence.state), (0, SequenceState::Running));
            self.put_out(sequence_id, step);
        }
        self.scheduler.release_rejected_drafts();
        self.speculation.record_acceptance();
        self.observe();
        self.check_texts();
        self.notice_waits();
    }

    /// Samples the token of the chunk's last row, and one more token after each right draft token.
    fn draw(&mut self, chunk: &ScheduledChunk, drafts: &[u32], step: usize) {
        let sequence_id = chunk.sequence_id;
        self.put_out(sequence_id, step);
        let mut right = 0;
        for (place, &draft) in drafts.iter().enumerate() {
            let position = chunk.start + chunk.rows + place;
            let drawn =
                self.live.get(&sequence_id).and_then(|live| live.tokens.get(position)) == Some(&draft);
            let accepted = self.scheduler.accept_draft(sequence_id, position, draft);
            assert_eq!(accepted, drawn, "a draft counts that was not drawn, or one that was does not");
            if accepted {
                self.speculation.accept(sequence_id);
                self.live.get_mut(&sequence_id).unwrap().computed += 1;
                right += 1;
                self.put_out(sequence_id, step);
            }
        }
        self.counted.0 += drafts.len();
        self.counted.1 += right;
        self.summary.accepted += right;
        if let Some(live) = self.live.get_mut(&sequence_id)
            && !drafts.is_empty()
        {
            live.acceptance.observe(drafts.len(), right);
        }
    }

    /// Samples the next token of a sequence whose last row is computed. If the sequence has a
    /// constraint, its mask is sometimes pending, and the token comes later.
    fn put_out(&mut self, sequence_id: SequenceId, step: usize) {
        let Some(live) = self.live.get_mut(&sequence_id) else { return };
        if live.constrained && self.random.one_in(2) {
            live.late = true;
            self.summary.late += 1;
            return;
        }
        live.late = false;
        if live.tokens.len() + 1 == live.tokens_max || self.random.one_in(400) {
            self.end(sequence_id, step);
            return;
        }
        let previous = *live.tokens.last().unwrap();
        let token = match self.random.below(100) < self.likely_percent {
            true => likely(previous),
            false => DRAWN_FIRST + self.random.below(DRAWN as usize) as u32,
        };
        live.push(token);
        self.scheduler.push_token(sequence_id, token);
    }

    /// Before a step, samples the deferred tokens, since their masks have arrived.
    pub(super) fn sample_deferred(&mut self, step: usize) {
        let late: Vec<SequenceId> =
            self.live.iter().filter(|(_, live)| live.late).map(|(&sequence_id, _)| sequence_id).collect();
        for sequence_id in late {
            // A sequence that was preempted meanwhile computes its last row once more.
            let is_computed = self.scheduler.sequence(sequence_id).unwrap().remaining() == 0;
            match is_computed {
                true => self.put_out(sequence_id, step),
                false => self.live.get_mut(&sequence_id).unwrap().late = false,
            }
        }
    }

    /// Reports the step's time, from which the engine derives the next draft depths.
    fn observe(&mut self) {
        let plan = self.scheduler.plan();
        if plan.rows > 0 && plan.rows == plan.decode_rows + plan.draft_rows {
            let (fixed, row) = self.cost;
            let noise = self.random.below(20);
            self.speculation
                .observe(plan.rows, Duration::from_micros((fixed + row * plan.rows + noise) as u64));
        }
        let stats = self.speculation.stats();
        let counted = (stats.drafted_tokens() as usize, stats.accepted_tokens() as usize);
        assert_eq!(counted, self.counted, "drafted and accepted tokens");
        for (&sequence_id, live) in &self.live {
            let rate = self.speculation.rate(sequence_id);
            assert_eq!(rate, Some(live.acceptance.rate()), "drafts are counted for another sequence");
        }
    }

    fn check_texts(&self) {
        for (&sequence_id, live) in &self.live {
            let sequence = self.scheduler.sequence(sequence_id).unwrap();
            let most = sequence.tokens().len().div_ceil(self.limits.block_tokens);
            assert!(sequence.blocks().len() <= most, "blocks of wrong drafts are kept");
            assert_eq!(sequence.tokens(), live.tokens);
            assert!(sequence.remaining() > 0 || live.late, "a token is missing");
            assert!(live.tokens.len() <= live.tokens_max);
        }
    }
}

impl StormRequest {
    fn push(&mut self, token: u32) {
        self.keys.push(next_key(self.keys.last().copied().unwrap_or(0), token));
        self.tokens.push(token);
    }
}
