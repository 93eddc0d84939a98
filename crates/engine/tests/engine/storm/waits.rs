// SPDX-License-Identifier: Apache-2.0

//! Checks the bounds that the head of `schedule/waiting_queue.rs` states.

use super::{Storm, StormRequest};
use crate::schedule::sequence::{SequenceKind, SequenceState};
use crate::schedule::sequence_id::SequenceId;
use crate::schedule::waiting_queue::{OLDEST_FIRST_EVERY, ServiceRank};
use std::collections::BTreeMap;
use std::time::Duration;

/// Record of one waiting sequence.
#[derive(Clone, Debug)]
pub(super) struct WaitRecord {
    /// The sequence's rank in the queue.
    rank: ServiceRank,
    admissions: u32,
    /// Turns that the sequence may wait. Each turn is `OLDEST_FIRST_EVERY` admissions.
    turns: u32,
    /// A sequence behind this one was admitted first, or may have been during a pause.
    passed: bool,
    /// Set for the first request of a tenant in its priority: how often requests of each other
    /// tenant overtook it.
    passed_by: Option<BTreeMap<u64, u32>>,
}

impl Storm {
    fn state(&self, sequence_id: SequenceId) -> SequenceState {
        self.scheduler.sequence(sequence_id).unwrap().state
    }

    /// Waits for its admission. A paused sequence waits for its reader.
    fn is_queued(&self, sequence_id: SequenceId) -> bool {
        let is_paused = self.scheduler.sequence(sequence_id).unwrap().is_paused;
        self.state(sequence_id) == SequenceState::Waiting && !is_paused
    }

    /// Pauses a sequence, which leaves the queue, or lets it continue.
    pub(super) fn set_paused(&mut self, sequence_id: SequenceId, is_paused: bool) {
        self.scheduler.set_paused(sequence_id, is_paused);
        let is_waiting = self.state(sequence_id) == SequenceState::Waiting;
        if is_paused && is_waiting {
            let live = self.live.get_mut(&sequence_id).unwrap();
            (live.wait, live.returns) = (None, true);
        }
    }

    /// Sequences that hold blocks, or a place among the running ones.
    pub(super) fn running(&self, is_paused: bool) -> Vec<SequenceId> {
        let is_meant = |sequence_id: &SequenceId| {
            self.state(*sequence_id) != SequenceState::Waiting
                && self.scheduler.sequence(*sequence_id).unwrap().is_paused == is_paused
        };
        self.live.keys().copied().filter(is_meant).collect()
    }

    /// Checks that paused sequences are preempted before all that compute. `computed` ran before
    /// this step.
    pub(super) fn check_preemptions(&self, computed: &[SequenceId]) {
        let is_lost = computed.iter().any(|&sequence_id| self.state(sequence_id) == SequenceState::Waiting);
        if is_lost {
            assert!(self.scheduler.plan().admitted.is_empty());
            assert_eq!(self.running(true), [], "paused sequences keep blocks that others lose");
        }
    }

    /// Records the sequences that entered the queue. The queue may serve each older live sequence
    /// first, once for each time that the older sequence enters.
    pub(super) fn notice_waits(&mut self) {
        let enters = |(sequence_id, live): &(&SequenceId, &StormRequest)| {
            live.wait.is_none() && self.is_queued(**sequence_id)
        };
        let entered: Vec<(SequenceId, u64)> =
            self.live.iter().filter(enters).map(|(&sequence_id, live)| (sequence_id, live.age)).collect();
        for &(_, age) in &entered {
            let younger = self.live.values_mut().filter(|live| live.age > age);
            younger.filter_map(|live| live.wait.as_mut()).for_each(|wait| wait.turns += 1);
        }
        for (sequence_id, age) in entered {
            let older = self.live.values().filter(|live| live.age < age).count() as u32;
            let rank = self.scheduler.sequence(sequence_id).unwrap().rank;
            let live = self.live.get_mut(&sequence_id).unwrap();
            let passed_by = (live.queued && live.first).then(BTreeMap::new);
            let (turns, passed) = (older + 1, live.returns);
            live.wait = Some(WaitRecord { rank, admissions: 0, turns, passed, passed_by });
        }
    }

    /// Checks the admissions of the step that was just planned.
    pub(super) fn note_admissions(&mut self, step: usize) {
        let first = self.scheduler.plan().admitted.clone();
        for &(sequence_id, _) in &first {
            self.pass_others(sequence_id);
            assert!(self.live[&sequence_id].queued, "reported once, when first admitted");
        }
        let waited =
            self.live.iter().filter(|(_, live)| live.wait.is_some()).map(|(&sequence_id, _)| sequence_id);
        let admitted: Vec<SequenceId> =
            waited.filter(|&sequence_id| self.state(sequence_id) != SequenceState::Waiting).collect();
        self.check_order(&admitted);
        let count = admitted.len() as u32;
        for wait in self.live.values_mut().filter_map(|live| live.wait.as_mut()) {
            wait.admissions += count;
            // Some sequences of the same step may have been admitted after this one.
            let bound = OLDEST_FIRST_EVERY * wait.turns + count;
            let admissions = wait.admissions;
            assert!(
                admissions <= bound,
                "a request starves: {admissions} admissions, at most {bound} are promised"
            );
        }
        for sequence_id in admitted {
            let is_paused = self.scheduler.sequence(sequence_id).unwrap().is_paused;
            assert!(!is_paused, "a paused sequence is admitted");
            let live = self.live.get_mut(&sequence_id).unwrap();
            live.wait = None;
            live.admitted = true;
            let is_first = first.iter().any(|&(other, _)| other == sequence_id);
            assert_eq!(is_first, live.queued, "the first admission is reported");
            if std::mem::replace(&mut live.queued, false) {
                self.admission.admitted(live.tenant, Duration::from_millis(step as u64));
            }
        }
        self.notice_waits();
    }

    /// Counts the requests that `sequence_id`, the next of the plan's admissions, overtakes.
    fn pass_others(&mut self, sequence_id: SequenceId) {
        let is_oldest_turn = self.scheduler.sequence(sequence_id).unwrap().rank.is_promoted();
        let StormRequest { tenant, priority, ref mut wait, .. } = *self.live.get_mut(&sequence_id).unwrap();
        let wait = wait.as_mut().unwrap();
        // The sequence is admitted, so no request can overtake it any more.
        wait.passed_by = None;
        let (rank, is_owed) = (wait.rank, wait.passed);
        if is_oldest_turn || is_owed {
            return;
        }
        for live in self.live.values_mut().filter(|live| live.priority == priority && live.tenant != tenant) {
            let Some(wait) = live.wait.as_mut().filter(|wait| wait.rank > rank) else { continue };
            let Some(passed_by) = &mut wait.passed_by else { continue };
            let times = passed_by.entry(tenant).or_default();
            *times += 1;
            assert!(*times <= 1, "a tenant's first request is passed by another of tenant {tenant}");
        }
    }

    /// Checks that the step skipped only sequences that it could not use.
    fn check_order(&mut self, admitted: &[SequenceId]) {
        let is_oldest_turn =
            |sequence_id: SequenceId| self.scheduler.sequence(sequence_id).unwrap().rank.is_promoted();
        let by_rank = admitted.iter().filter(|&&sequence_id| !is_oldest_turn(sequence_id));
        let rank = |sequence_id: &SequenceId| self.live[sequence_id].wait.as_ref().map(|wait| wait.rank);
        let Some(last) = by_rank.filter_map(rank).max() else { return };
        let is_passed =
            |sequence_id: &SequenceId| rank(sequence_id) < Some(last) && self.is_queued(*sequence_id);
        let passed: Vec<SequenceId> = self.live.keys().copied().filter(is_passed).collect();
        for sequence_id in passed {
            let is_scored = self.live[&sequence_id].kind == SequenceKind::Score;
            let has_reason = if is_scored { self.score_rows_are_used() } else { self.follows(sequence_id) };
            assert!(has_reason, "a request is passed for nothing");
            self.summary.passed += usize::from(!is_scored);
            self.live.get_mut(&sequence_id).unwrap().wait.as_mut().unwrap().passed = true;
        }
    }

    fn score_rows_are_used(&self) -> bool {
        let chunks = self.scheduler.plan().chunks.iter();
        let scored = chunks.filter(|chunk| self.live[&chunk.sequence_id].kind == SequenceKind::Score);
        scored.map(|chunk| chunk.rows).sum::<usize>() == self.limits.score_rows_max
    }
}
