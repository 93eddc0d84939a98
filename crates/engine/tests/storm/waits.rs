// SPDX-License-Identifier: Apache-2.0

//! What the queue promises to those who wait, as its head states it.

use super::{Storm, StormRequest};
use crate::schedule::sequence::{SequenceKind, SequenceState};
use crate::schedule::sequence_id::SequenceId;
use crate::schedule::waiting_queue::{OLDEST_FIRST_EVERY, ServiceRank};
use std::collections::BTreeMap;
use std::time::Duration;

/// Of one that waits.
#[derive(Clone, Debug)]
pub(super) struct WaitRecord {
    /// Its place in the line.
    rank: ServiceRank,
    admissions: u32,
    /// Each lasts `OLDEST_FIRST_EVERY` admissions.
    turns: u32,
    /// A request behind it was admitted before it.
    passed: bool,
    /// Set for the first request of a tenant in its class: by whom it was passed, and how often.
    passed_by: Option<BTreeMap<u64, u32>>,
}

impl Storm {
    fn state(&self, sequence_id: SequenceId) -> SequenceState {
        self.scheduler.sequence(sequence_id).unwrap().state
    }

    /// Those who have entered the queue: each older one that lives may be served before, once for
    /// each time it enters.
    pub(super) fn notice_waits(&mut self) {
        let enters = |(sequence_id, live): &(&SequenceId, &StormRequest)| {
            live.wait.is_none() && self.state(**sequence_id) == SequenceState::Waiting
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
            live.wait = Some(WaitRecord { rank, admissions: 0, turns: older + 1, passed: false, passed_by });
        }
    }

    /// Of the step that was just planned.
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
            // Of those admitted in one step, some came after it.
            let bound = OLDEST_FIRST_EVERY * wait.turns + count;
            let admissions = wait.admissions;
            assert!(
                admissions <= bound,
                "a request starves: {admissions} admissions, at most {bound} are promised"
            );
        }
        for sequence_id in admitted {
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

    /// `slot` is the next of the plan's admissions.
    fn pass_others(&mut self, sequence_id: SequenceId) {
        let is_oldest_turn = self.scheduler.sequence(sequence_id).unwrap().rank.is_promoted();
        let StormRequest { tenant, priority, ref mut wait, .. } = *self.live.get_mut(&sequence_id).unwrap();
        let wait = wait.as_mut().unwrap();
        // Its own place in the line is behind it.
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

    /// Nobody is passed by rank whom the step could have used.
    fn check_order(&mut self, admitted: &[SequenceId]) {
        let is_oldest_turn =
            |sequence_id: SequenceId| self.scheduler.sequence(sequence_id).unwrap().rank.is_promoted();
        let by_rank = admitted.iter().filter(|&&sequence_id| !is_oldest_turn(sequence_id));
        let rank = |sequence_id: &SequenceId| self.live[sequence_id].wait.as_ref().map(|wait| wait.rank);
        let Some(last) = by_rank.filter_map(rank).max() else { return };
        let is_passed = |sequence_id: &SequenceId| {
            rank(sequence_id) < Some(last) && self.state(*sequence_id) == SequenceState::Waiting
        };
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
